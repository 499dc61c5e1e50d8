"""The table of extensions: which Python type has which code, how it is taken apart, and how it is made again.

`take` turns a value into a payload of simpler values, which the encoder lowers in turn, and raises `ValueError` with the
reason where a value cannot be saved. `make` checks a decoded payload and builds the value; it raises `ValueError` or
`TypeError` where the payload is not what `take` gives. Neither knows addresses, limits or bytes.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import os
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from anyshard.records import values_numpy
from anyshard.records.values_types import LARGE_VALUE_NBYTES, NamedTupleRecord, PerRankMark, TensorMark, Unregistered

MAX_INT_NBYTES = LARGE_VALUE_NBYTES
# A set or dict whose members share one hash takes time quadratic in them: small ones may, larger ones only a little.
MAX_EQUAL_HASHES = 64

_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
_NAMESPACES: dict[str, type] = {kind.__name__: kind for kind in (types.SimpleNamespace, argparse.Namespace)}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}


class Code(enum.IntEnum):
    """The extension codes of the wire format; `anyshard.records.values` describes each payload."""

    MARK = 1
    INT = 2
    COMPLEX = 3
    TUPLE = 4
    SET = 5
    FROZENSET = 6
    DICT = 7
    ORDERED_DICT = 8
    COUNTER = 9
    DEFAULT_DICT = 10
    DEQUE = 11
    NAMED_TUPLE = 12
    NAMESPACE = 13
    RANGE = 14
    SLICE = 15
    BYTEARRAY = 16
    MEMORYVIEW = 17
    BYTES_IO = 18
    PATH = 19
    NUMPY_SCALAR = 20
    NUMPY_ARRAY = 21
    DATETIME = 22
    DATE = 23
    TIMEDELTA = 24
    UUID = 25
    REGISTERED = 26
    PER_RANK = 27


class Fields(list[object]):
    """A payload array of fields: they have no address of their own but that of the value."""


class Members(list[object]):
    """A payload array in the order of its encoded items, as sets have none of their own."""


class Pairs(list[tuple[object, object]]):
    """A payload array of keys and values in turn; each value lies at its key."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One extension: its code, the types that it stands for, and the two directions."""

    code: Code
    types: tuple[type, ...]
    take: Callable[[Any], object]
    make: Callable[[Any], object]


def find_kind(value: object) -> Kind | None:
    """The extension for exactly this value's type; None where there is none (subclasses have none)."""
    kind = _BY_TYPE.get(type(value))
    if kind is None and values_numpy.is_numpy_scalar(value):
        return _BY_CODE[Code.NUMPY_SCALAR]
    if kind is None and is_named_tuple(value):
        return _BY_CODE[Code.NAMED_TUPLE]
    return kind


def is_named_tuple(value: object) -> bool:
    """Whether a value's type was made by `namedtuple` or `NamedTuple` itself; a class derived from one may hold more."""
    kind = type(value)
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple) and hasattr(kind, "_make")


def is_builtin_type(kind: type) -> bool:
    """Whether the codec itself stores values of this type, so that nobody else may say how."""
    return kind in _BY_TYPE or kind in _PLAIN_TYPES or kind in values_numpy.SCALAR_TYPES


def make_value(code: int, payload: object) -> object:
    """The value of one extension but `REGISTERED`; raises `ValueError` or `TypeError` where the payload is not well formed."""
    return _BY_CODE[Code(code)].make(payload)


def read_fields(payload: object, *kinds: type | tuple[type, ...]) -> Any:
    """The fields of a payload array after comparing their number and exact types; `object` stands for any."""
    fields = _read(payload, list)
    if len(fields) != len(kinds):
        raise ValueError(f"expected {len(kinds)} fields, found {len(fields)}")
    for field, kind in zip(fields, kinds, strict=True):
        if kind is not object:
            _read(field, kind)
    return fields


def _read(value: Any, kind: type | tuple[type, ...]) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise ValueError(f"expected {' or '.join(k.__name__ for k in kinds)}, found {type(value).__name__}")
    return value


def _make_mark(payload: object) -> TensorMark:
    address, kind = read_fields(payload, str, str)
    if kind not in ("tensor", "ndarray", "bytes"):
        raise ValueError(f"expected a mark of a tensor, ndarray or bytes, found {kind[:40]!r}")
    return TensorMark(address, kind)


def _take_int(value: int) -> bytes:
    nbytes = value.bit_length() // 8 + 1
    if nbytes > MAX_INT_NBYTES:
        raise ValueError(f"expected an int of at most {MAX_INT_NBYTES} bytes, found {nbytes}; store it as bytes")
    return value.to_bytes(nbytes, "big", signed=True)


def _make_int(payload: object) -> int:
    data = _read(payload, bytes)
    if not 0 < len(data) <= MAX_INT_NBYTES:
        raise ValueError(f"expected an int of 1 to {MAX_INT_NBYTES} bytes, found {len(data)}")
    return int.from_bytes(data, "big", signed=True)


def _check_hashes(members: Collection[object]) -> None:
    if len(members) <= MAX_EQUAL_HASHES:
        return
    most = max(Counter(map(hash, members)).values())
    if most > MAX_EQUAL_HASHES:
        raise ValueError(f"expected members, at most {MAX_EQUAL_HASHES} with the same hash, found {most}; use a list")


def _take_set(value: set[object] | frozenset[object]) -> Members:
    _check_hashes(value)
    return Members(value)


def _make_set(payload: object) -> set[object]:
    items = _read(payload, list)
    _check_hashes(items)
    members = set(items)
    if len(members) != len(items):
        raise ValueError("expected members of a set to differ, found two equal ones")
    return members


def _take_dict(value: dict[object, object]) -> Pairs:
    _check_hashes(value)
    return Pairs(value.items())


def _make_dict(payload: object) -> dict[object, object]:
    flat = _read(payload, list)
    _check_hashes(flat[::2])
    made = dict(zip(flat[::2], flat[1::2], strict=True))
    if 2 * len(made) != len(flat):
        raise ValueError("expected keys of a dict to differ, found two equal ones")
    return made


def _take_default_dict(value: defaultdict[Any, Any]) -> Fields:
    name = getattr(value.default_factory, "__name__", None)
    if value.default_factory is not None and _FACTORIES.get(str(name)) is not value.default_factory:
        raise ValueError(f"expected a defaultdict factory that is None or one of {', '.join(_FACTORIES)}; use a dict")
    return Fields([name, dict(value)])


def _make_default_dict(payload: object) -> defaultdict[Any, Any]:
    name, items = read_fields(payload, (str, NoneType), dict)
    return defaultdict(None if name is None else _look_up(name, _FACTORIES), items)


def _make_deque(payload: object) -> deque[object]:
    maxlen, items = read_fields(payload, (int, NoneType), list)
    if maxlen is not None and maxlen < len(items):
        raise ValueError(f"expected at most maxlen items in a deque, found {len(items)}")
    return deque(items, maxlen)


def _take_named_tuple(value: Any) -> Fields:
    is_record = type(value) is NamedTupleRecord
    # Made only for its checks: what is stored can be read.
    record = value if is_record else NamedTupleRecord(value, type(value).__name__, type(value)._fields)
    return Fields([record.__dict__["type_name"], list(record._fields), list(record)])


def _make_named_tuple(payload: object) -> NamedTupleRecord:
    type_name, names, items = read_fields(payload, str, list, list)
    return NamedTupleRecord(items, type_name, tuple(_read(name, str) for name in names))


def _take_namespace(value: Any) -> Fields:
    return Fields([type(value).__name__, dict(vars(value))])


def _make_namespace(payload: object) -> object:
    name, attributes = read_fields(payload, str, dict)
    made = _look_up(name, _NAMESPACES)()
    # Not by setattr, which would let the file set `__class__`.
    vars(made).update(attributes)
    return made


def _make_range(payload: object) -> range:
    return range(*read_fields(payload, int, int, int))


def _take_memoryview(value: memoryview) -> bytes:
    if value.ndim != 1 or value.format != "B" or not value.contiguous:
        raise ValueError("expected a memoryview of plain contiguous bytes; save its bytes, or a numpy array")
    return bytes(value)


def _take_bytes_io(value: io.BytesIO) -> bytes:
    if value.closed:
        raise ValueError("expected an open BytesIO, found a closed one")
    return value.getvalue()


def _make_path(payload: object) -> pathlib.PurePath:
    name, text = read_fields(payload, str, str)
    kind: type[pathlib.PurePath] = _look_up(name, _PATHS)
    if name == ("PosixPath" if os.name == "nt" else "WindowsPath"):
        # A path of the other system can be held here, but not opened.
        kind = _PATHS[f"Pure{name}"]
    return kind(text)


def _take_datetime(value: datetime.datetime) -> str:
    if value.fold or type(value.tzinfo) not in (NoneType, datetime.timezone):
        raise ValueError("expected a datetime without fold that is naive or has a datetime.timezone; use astimezone")
    return value.isoformat()


def _look_up(name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"expected one of {', '.join(table)}, found {name[:40]!r}")
    return table[name]


def _index_types(kinds: Iterable[Kind]) -> dict[type, Kind]:
    return {kind_type: kind for kind in kinds for kind_type in kind.types}


_PLAIN_TYPES = frozenset({NoneType, bool, int, float, str, bytes, list, dict})

_KINDS = (
    Kind(Code.MARK, (TensorMark,), lambda v: Fields([v.address, v.kind]), _make_mark),
    Kind(Code.INT, (int,), _take_int, _make_int),
    Kind(Code.COMPLEX, (complex,), lambda v: Fields([v.real, v.imag]), lambda p: complex(*read_fields(p, float, float))),
    Kind(Code.TUPLE, (tuple,), list, lambda p: tuple(_read(p, list))),
    Kind(Code.SET, (set,), _take_set, _make_set),
    Kind(Code.FROZENSET, (frozenset,), _take_set, lambda p: frozenset(_make_set(p))),
    Kind(Code.DICT, (dict,), _take_dict, _make_dict),
    Kind(Code.ORDERED_DICT, (OrderedDict,), lambda v: Fields([dict(v)]), lambda p: OrderedDict(*read_fields(p, dict))),
    Kind(Code.COUNTER, (Counter,), lambda v: Fields([dict(v)]), lambda p: Counter(*read_fields(p, dict))),
    Kind(Code.DEFAULT_DICT, (defaultdict,), _take_default_dict, _make_default_dict),
    Kind(Code.DEQUE, (deque,), lambda v: Fields([v.maxlen, list(v)]), _make_deque),
    Kind(Code.NAMED_TUPLE, (NamedTupleRecord,), _take_named_tuple, _make_named_tuple),
    Kind(Code.NAMESPACE, tuple(_NAMESPACES.values()), _take_namespace, _make_namespace),
    Kind(Code.RANGE, (range,), lambda v: Fields([v.start, v.stop, v.step]), _make_range),
    Kind(
        Code.SLICE,
        (slice,),
        lambda v: Fields([v.start, v.stop, v.step]),
        lambda p: slice(*read_fields(p, object, object, object)),
    ),
    Kind(Code.BYTEARRAY, (bytearray,), bytes, lambda p: bytearray(_read(p, bytes))),
    Kind(Code.MEMORYVIEW, (memoryview,), _take_memoryview, lambda p: memoryview(_read(p, bytes))),
    Kind(Code.BYTES_IO, (io.BytesIO,), _take_bytes_io, lambda p: io.BytesIO(_read(p, bytes))),
    Kind(Code.PATH, tuple(_PATHS.values()), lambda v: Fields([type(v).__name__, str(v)]), _make_path),
    Kind(
        Code.NUMPY_SCALAR,
        (),
        lambda v: Fields(values_numpy.take_scalar(v)),
        lambda p: values_numpy.make_scalar(*read_fields(p, str, bytes)),
    ),
    Kind(
        Code.NUMPY_ARRAY,
        (np.ndarray,),
        lambda v: Fields(values_numpy.take_array(v)),
        lambda p: values_numpy.make_array(*read_fields(p, str, list, bytes)),
    ),
    Kind(Code.DATETIME, (datetime.datetime,), _take_datetime, lambda p: datetime.datetime.fromisoformat(_read(p, str))),
    Kind(Code.DATE, (datetime.date,), datetime.date.isoformat, lambda p: datetime.date.fromisoformat(_read(p, str))),
    Kind(
        Code.TIMEDELTA,
        (datetime.timedelta,),
        lambda v: Fields([v.days, v.seconds, v.microseconds]),
        lambda p: datetime.timedelta(*read_fields(p, int, int, int)),
    ),
    Kind(Code.UUID, (uuid.UUID,), lambda v: v.bytes, lambda p: uuid.UUID(bytes=_read(p, bytes))),
    Kind(Code.PER_RANK, (PerRankMark,), lambda v: Fields([v.address]), lambda p: PerRankMark(*read_fields(p, str))),
)
_BY_TYPE = _index_types((*_KINDS, Kind(Code.REGISTERED, (Unregistered,), lambda v: Fields([v.name, v.payload]), read_fields)))
_BY_CODE = {kind.code: kind for kind in _KINDS}

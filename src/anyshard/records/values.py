"""The value codec: plain Python values to MessagePack bytes and back, never by pickle, never by running code of the file.

One value is one MessagePack object. It must know nothing of torch, files or where its bytes lie.

Wire format
-----------
Plain MessagePack carries what MessagePack has: nil, bool, integers from -2^63 to 2^64 - 1, float (always 64 bit, all bits
kept), str (UTF-8), bin (`bytes`), array (`list`), map (`dict` whose keys are all `str`; order kept, no key twice). All else is
an extension. Its payload is again exactly one MessagePack object, which is not itself an extension:

```
code  value                     payload
   1  mark                      [address, kind]; kind is "tensor", "ndarray" or "bytes": the leaf is stored as an extent
   2  int beyond 64 bits        bin: two's complement, big-endian, at most 65,536 bytes
   3  complex                   [re, im], two floats
   4  tuple                     [items...]
   5  set                       [members...], sorted by their encoded bytes
   6  frozenset                 [members...], likewise
   7  dict, not all keys str    [key, value, key, value, ...], order kept
   8  OrderedDict               [d]; d is the dict as a value of its own (a map, or code 7)
   9  Counter                   [d]
  10  defaultdict               [factory, d]; factory is nil or one of "bool" "dict" "float" "int" "list" "set" "str" "tuple"
  11  deque                     [maxlen or nil, [items...]]
  12  named tuple               [type name, [field names...], [items...]]
  13  namespace                 [type, map of attributes]; type is "SimpleNamespace" or "Namespace" (argparse)
  14  range                     [start, stop, step]
  15  slice                     [start, stop, step], each any value
  16  bytearray                 bin
  17  memoryview                bin
  18  BytesIO                   bin: all its content; the position is 0 again
  19  path                      [type, text]; type is "PosixPath" "WindowsPath" "PurePosixPath" "PureWindowsPath"
  20  numpy scalar              [dtype, bin]: its bytes, little-endian
  21  numpy array               [dtype, [lengths...], bin]: its elements in C order, little-endian
  22  datetime                  ISO 8601 text, with microseconds and a fixed offset if it has them
  23  date                      ISO 8601 text
  24  timedelta                 [days, seconds, microseconds]
  25  UUID                      bin: 16 bytes, big-endian
  26  registered type           [name, payload as its encoder gave it]; a reader that lacks the name keeps both
```

dtype names are those of `records/dtypes.py`. Where a payload says int, an int beyond 64 bits stands as code 2. A reader refuses
every other code.
Limits (`ValueLimits`): 64 MiB in all, 64 nested arrays and maps, 2 million objects, those within extensions counted too. Of more
than 1,000 members of a set, or keys of a code-7 dict, at most 64 may have the same hash in Python.

Encoding the same value gives the same bytes in every process. Types are kept exactly: a value whose type is a subclass of a
type above, but not itself in the table or registered, is refused with the address of the element. A named tuple comes back
as `NamedTupleRecord`. Nothing is kept of: whether two elements are the same object, the memory order of an array, and the
position in a BytesIO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from anyshard.errors import CheckpointDamaged, InvalidRegistration, LimitExceeded, UnsupportedValue
from anyshard.records.addresses import component, join_address, show
from anyshard.records.values_kinds import Code, Fields, Members, Pairs, find_kind, is_builtin_type, make_value, read_fields
from anyshard.records.values_registry import RESERVED_PREFIXES, RegisteredType, ValueRegistry
from anyshard.records.values_scan import scan
from anyshard.records.values_tree import (
    collect_marks,
    is_container,
    iterate_leaves,
    label_item,
    list_components,
    list_items,
    map_leaves,
    map_marks,
    rebuild_container,
)
from anyshard.records.values_types import LARGE_VALUE_NBYTES, NamedTupleRecord, TensorMark, Unregistered, ValueLimits

__all__ = [
    "DEFAULT_LIMITS",
    "LARGE_VALUE_NBYTES",
    "InvalidRegistration",
    "NamedTupleRecord",
    "RegisteredType",
    "TensorMark",
    "Unregistered",
    "ValueLimits",
    "ValueRegistry",
    "collect_marks",
    "decode_value",
    "encode_value",
    "is_container",
    "iterate_leaves",
    "label_item",
    "list_components",
    "list_items",
    "map_leaves",
    "map_marks",
    "rebuild_container",
]

DEFAULT_LIMITS = ValueLimits()

_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_ATOMS = frozenset({type(None), bool, int, float, str})
_CODES = frozenset(Code)
_ADVICE = "store large data as tensors or numpy arrays"

_Sized = TypeVar("_Sized", str, bytes)


def encode_value(value: object, *, address: str, registry: ValueRegistry, limits: ValueLimits = DEFAULT_LIMITS) -> bytes:
    """The bytes of one value, the same in every process; `decode_value` gives back an equal value of the same types.

    `address` is where the value lies in the app state. Raises `UnsupportedValue` with the address of the element that no
    type of the table or registry fits exactly, and `LimitExceeded` where the value is too large or nested too deep.
    """
    encoder = _Encoder(address, registry, limits)
    data = msgspec.msgpack.encode(encoder.lower(value))
    if len(data) > limits.max_nbytes:
        raise encoder.exceed(f"{limits.max_nbytes} bytes")
    return data


def decode_value(
    data: bytes | bytearray | memoryview, *, registry: ValueRegistry, file: str, limits: ValueLimits = DEFAULT_LIMITS
) -> object:
    """The value of encoded bytes, with marks as `TensorMark`; nothing is built before shape and limits have been checked.

    Calls no code but that of the standard library, NumPy and `registry`. A name that the registry lacks gives `Unregistered`,
    as does a value of a reserved name that cannot be made here.
    Raises `CheckpointDamaged` naming `file` where the bytes are not what `encode_value` gives, and `InvalidRegistration` where
    a registered decoder fails.
    """
    whole = bytes(data)
    try:
        scan(whole, codes=_CODES, limits=limits)
        return _Decoder(registry, file).decode(whole)
    except InvalidRegistration:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        message = f"{show(file)}: expected a well-formed value of {len(whole)} bytes, found damage: {show(str(error))}"
        raise CheckpointDamaged(f"{message}; load another checkpoint", file=file) from error


class _Encoder:
    """Lowers one value to what MessagePack has: atoms, bytes, lists, dicts with string keys, and extensions.

    `_path` has one entry per list or dict around the present element: its position, its key in a tuple, or None where the
    list is not the user's own but part of a payload.
    """

    def __init__(self, address: str, registry: ValueRegistry, limits: ValueLimits) -> None:
        self._root = address
        self._registry = registry
        self._limits = limits
        self._path: list[int | tuple[object] | None] = []
        self._around: set[int] = set()
        self._num_nodes = 0
        self._nbytes = 0
        self._lowerings: dict[type, Callable[[Any], object]] = {
            list: self._lower_list,
            dict: self._lower_dict,
            Fields: self._lower_fields,
            Members: self._lower_members,
            Pairs: self._lower_pairs,
        }

    def lower(self, value: Any) -> object:
        """The element as MessagePack has it. Counts each object of the wire once, as `scan` does."""
        self._count(1)
        kind = type(value)
        if kind is str:
            return self._check_text(value)
        if kind is bytes:
            return self._check_size(value)
        if kind in _ATOMS and (kind is not int or _MIN_INT <= value <= _MAX_INT):
            return value
        if id(value) in self._around:
            raise self._refuse("expected a tree, found an element that contains itself; break the cycle")
        self._around.add(id(value))
        lowered = self._lowerings.get(kind, self._lower_extension)(value)
        self._around.remove(id(value))
        return lowered

    def exceed(self, limit: str, advice: str = _ADVICE) -> LimitExceeded:
        """The error for a limit that was met at the present element."""
        where = f"in the values of {show(self._root)}"
        return LimitExceeded(f"{show(self._address())}: expected at most {limit} {where}, found more; {advice}")

    def _lower_list(self, items: list[object]) -> object:
        self._enter()
        lowered = self._pack_atoms(items, items)
        if lowered is None:
            lowered = []
            for position, item in enumerate(items):
                self._path[-1] = position
                lowered.append(self.lower(item))
        self._path.pop()
        return lowered

    def _pack_atoms(self, items: Any, *parts: Iterable[object]) -> Any:
        # Lists and dicts of numbers or names go to msgspec in one call; what it refuses, the slow way finds and names.
        if not all(_ATOMS.issuperset(map(type, part)) for part in parts):
            return None
        try:
            packed = msgspec.Raw(msgspec.msgpack.encode(items))
        except (OverflowError, UnicodeEncodeError):
            return None
        self._count(len(items) * len(parts))
        return packed

    def _lower_fields(self, fields: Fields) -> list[object]:
        self._enter()
        lowered = [self.lower(field) for field in fields]
        self._path.pop()
        return lowered

    def _lower_members(self, members: Members) -> list[msgspec.Raw]:
        self._enter()
        packed = sorted(msgspec.msgpack.encode(self.lower(member)) for member in members)
        self._path.pop()
        return [msgspec.Raw(member) for member in packed]

    def _lower_dict(self, items: dict[object, object]) -> object:
        if set(map(type, items)) - {str}:
            return self._lower_extension(items)
        self._enter()
        lowered = self._pack_atoms(items, items.keys(), items.values())
        if lowered is None:
            lowered = {}
            for key, item in items.items():
                self._path[-1] = None
                name = self.lower(key)
                self._path[-1] = (key,)
                lowered[name] = self.lower(item)
        self._path.pop()
        return lowered

    def _lower_pairs(self, pairs: Pairs) -> list[object]:
        self._enter()
        lowered = []
        for key, item in pairs:
            self._path[-1] = None
            lowered.append(self.lower(key))
            self._path[-1] = (key,)
            lowered.append(self.lower(item))
        self._path.pop()
        return lowered

    def _lower_extension(self, value: Any) -> msgspec.msgpack.Ext:
        code, parts = self._take_registered(value) or self._take(value)
        return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(self.lower(parts)))

    def _take(self, value: object) -> tuple[Code, object]:
        kind = find_kind(value)
        if kind is None:
            raise self._refuse(f"expected a type that can be stored exactly, found {_describe_type(value)}")
        try:
            return kind.code, kind.take(value)
        except ValueError as error:
            raise self._refuse(str(error)) from error

    def _take_registered(self, value: object) -> tuple[Code, object] | None:
        entry = self._registry.find_type(type(value))
        if entry is None:
            return None
        try:
            return Code.REGISTERED, Fields([entry.name, entry.encode(value)])
        except Exception as error:  # The encoder is the user's code; whatever it raises gets the address.
            raise self._refuse(f"the encoder registered as {entry.name!r} failed: {error!r}") from error

    def _enter(self) -> None:
        self._path.append(None)
        if len(self._path) > self._limits.max_depth:
            raise self.exceed(f"{self._limits.max_depth} nested containers", "flatten them")

    def _count(self, num: int) -> None:
        self._num_nodes += num
        if self._num_nodes > self._limits.max_nodes:
            raise self.exceed(f"{self._limits.max_nodes} elements")

    def _check_size(self, data: _Sized) -> _Sized:
        self._nbytes += len(data)
        if self._nbytes > self._limits.max_nbytes:
            raise self.exceed(f"{self._limits.max_nbytes} bytes")
        return data

    def _check_text(self, text: str) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise self._refuse(f"expected text that is valid UTF-8, found {show(text[:80])!r}; save it as bytes") from None
        return self._check_size(text)

    def _refuse(self, reason: str) -> UnsupportedValue:
        address = self._address()
        return UnsupportedValue(f"{show(address)}: {reason}", address=address)

    def _address(self) -> str:
        return join_address(self._root, *(_write_component(entry) for entry in self._path if entry is not None))


def _write_component(entry: int | tuple[object]) -> str:
    if isinstance(entry, int):
        return str(entry)
    try:
        return component(entry[0])
    except (UnsupportedValue, ValueError):
        # Values may have keys that no address can hold, such as paths; only tensors may not lie below them.
        return f"~?{type(entry[0]).__qualname__}"


def _describe_type(value: object) -> str:
    kind = type(value)
    bases = [base.__qualname__ for base in kind.__mro__[1:-1] if is_builtin_type(base)]
    found = f"{kind.__module__}.{kind.__qualname__}"
    advice = f"or register {kind.__qualname__} with anyshard.register_value"
    if not bases:
        return f"{found}; convert it to plain values, {advice}"
    return f"{found}, a subclass of {bases[0]}, which would come back as a plain {bases[0]}; convert it yourself, {advice}"


class _Decoder:
    """Builds one value from bytes that `scan` has let through."""

    def __init__(self, registry: ValueRegistry, file: str) -> None:
        self._registry = registry
        self._file = file
        self._msgpack = msgspec.msgpack.Decoder(ext_hook=self._make)

    def decode(self, data: bytes | memoryview) -> object:
        """The value of one MessagePack object; raises `ValueError`, `TypeError` or `OverflowError` where a payload is wrong."""
        return self._msgpack.decode(data)

    def _make(self, code: int, data: memoryview) -> object:
        payload = self.decode(data)
        return self._make_registered(payload, data) if code == Code.REGISTERED else make_value(code, payload)

    def _make_registered(self, payload: object, data: memoryview) -> object:
        name, stored = read_fields(payload, str, object)
        entry = self._registry.find_name(name)
        if entry is None:
            return Unregistered(name, stored, bytes(data))
        try:
            return entry.decode(stored)
        except Exception as error:  # The decoder is the user's code; whatever it raises gets the name and the file.
            # Ours, of a device or dtype that this process lacks: the rest of the tree can still be read.
            if name.startswith(RESERVED_PREFIXES):
                return Unregistered(name, stored, bytes(data))
            raise InvalidRegistration(
                f"{show(self._file)}: the decoder registered as {name!r} failed on a stored value: {error!r}; correct it and "
                "register it again with anyshard.register_value"
            ) from error

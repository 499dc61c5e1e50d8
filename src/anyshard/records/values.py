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
  27  per-rank mark             [address]: each rank has a tree of its own there, beside this one
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

import msgspec

from anyshard.errors import CheckpointDamaged, InvalidRegistration
from anyshard.records.addresses import show
from anyshard.records.values_encoder import Encoder
from anyshard.records.values_kinds import Code, make_value, read_fields
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
from anyshard.records.values_types import (
    LARGE_VALUE_NBYTES,
    NamedTupleRecord,
    PerRankMark,
    TensorMark,
    Unregistered,
    ValueLimits,
)

__all__ = [
    "DEFAULT_LIMITS",
    "LARGE_VALUE_NBYTES",
    "InvalidRegistration",
    "NamedTupleRecord",
    "PerRankMark",
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

_CODES = frozenset(Code)


def encode_value(value: object, *, address: str, registry: ValueRegistry, limits: ValueLimits = DEFAULT_LIMITS) -> bytes:
    """The bytes of one value, the same in every process; `decode_value` gives back an equal value of the same types.

    `address` is where the value lies in the app state. Raises `UnsupportedValue` with the address of the element that no
    type of the table or registry fits exactly, and `LimitExceeded` where the value is too large or nested too deep.
    """
    return Encoder(address, registry, limits).encode(value)


def decode_value(
    data: bytes | bytearray | memoryview, *, registry: ValueRegistry, file: str, limits: ValueLimits = DEFAULT_LIMITS
) -> object:
    """The value of encoded bytes, marks in it as records; nothing is built before shape and limits have been checked.

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

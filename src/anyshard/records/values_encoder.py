"""The encoder of the value codec: takes a value apart until MessagePack has all of it, and knows where it is meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar, final

import msgspec

from anyshard.errors import LimitExceeded, UnsupportedValue
from anyshard.records.addresses import component, join_address, show
from anyshard.records.constant_trees import ConstantTrees, EncodedTree
from anyshard.records.values_kinds import Code, Fields, Members, Pairs, find_kind, is_builtin_type
from anyshard.records.values_registry import ValueRegistry
from anyshard.records.values_types import TensorMark, ValueLimits

_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_ATOMS = frozenset({type(None), bool, int, float, str})
_ADVICE = "store large data as tensors or numpy arrays"

_Sized = TypeVar("_Sized", str, bytes)


@dataclass(frozen=True, slots=True)
class Rooted:
    """A value within a payload of ours that has an address of its own; encoded as the value alone."""

    address: str
    value: object


@final
class Encoder:
    """Lowers one value to what MessagePack has: atoms, bytes, lists, dicts with string keys, and extensions.

    `_path` has one entry per list or dict around the present element: its position, its key in a tuple, or None where the
    list is not the user's own but part of a payload. `is_canonical`: equal values that came about in another order get equal
    bytes; they are good for comparing only, since they do not keep the order. `constants` are trees whose encodings are kept.
    """

    def __init__(
        self,
        address: str,
        registry: ValueRegistry,
        limits: ValueLimits,
        *,
        is_canonical: bool = False,
        constants: ConstantTrees | None = None,
    ) -> None:
        self._root = address
        self._registry = registry
        self._limits = limits
        self._is_canonical = is_canonical
        self._constants = constants
        self._depth = 0  # the most entries that `_path` has had
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
            Rooted: self._lower_rooted,
        }

    def encode(self, value: object) -> bytes:
        """The bytes of a whole value."""
        data = msgspec.msgpack.encode(self.lower(value))
        if len(data) > self._limits.max_nbytes:
            raise self._exceed(f"{self._limits.max_nbytes} bytes")
        return data

    def lower(self, value: Any) -> object:
        """The element as MessagePack has it. Counts each object of the wire once, as `scan` does."""
        self._count(1)
        kind = type(value)
        if kind is str:
            return self._check_text(value)
        if kind is bytes:
            return self._check_size(value)
        if kind is TensorMark:
            return self._lower_mark(value)
        if kind in _ATOMS and (kind is not int or _MIN_INT <= value <= _MAX_INT):
            return value
        if id(value) in self._around:
            raise self._refuse("expected a tree, found an element that contains itself; break the cycle")
        if self._constants is not None and value in self._constants and (known := self._take_constant(value)) is not None:
            return known
        self._around.add(id(value))
        lowered = self._lowerings.get(kind, self._lower_extension)(value)
        self._around.remove(id(value))
        return lowered

    def _lower_mark(self, mark: TensorMark) -> msgspec.msgpack.Ext:
        # As `_lower_extension` does it, in a third of the time, for most of what there is are marks.
        self._enter()
        fields = [self.lower(mark.address), self.lower(mark.kind)]
        self._count(1)
        self._path.pop()
        return msgspec.msgpack.Ext(int(Code.MARK), msgspec.msgpack.encode(fields))

    def _take_constant(self, tree: object) -> msgspec.Raw | None:
        """The encoding of a constant tree; None if it has none, or would exceed a limit, so that the slow way says where."""
        assert self._constants is not None
        encoded = self._constants.encoded
        if id(tree) not in encoded:
            encoded[id(tree)] = encode_alone(tree, self._registry, self._limits)
        known = encoded[id(tree)]
        if known is None or not self._has_room(known):
            return None
        self._num_nodes += known.num_nodes - 1  # one is counted already
        self._nbytes += known.nbytes
        self._depth = max(self._depth, len(self._path) + known.depth)
        return known.data

    def _has_room(self, tree: EncodedTree) -> bool:
        limits = self._limits
        return (
            self._num_nodes + tree.num_nodes - 1 <= limits.max_nodes
            and self._nbytes + tree.nbytes <= limits.max_nbytes
            and len(self._path) + tree.depth <= limits.max_depth
        )

    def encode_tree(self, tree: object) -> EncodedTree:
        """The bytes of a tree, and what it takes of the limits, for use within other values."""
        data = msgspec.Raw(msgspec.msgpack.encode(self.lower(tree)))
        return EncodedTree(data, self._num_nodes, self._nbytes, self._depth)

    def _exceed(self, limit: str, advice: str = _ADVICE) -> LimitExceeded:
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

    def _lower_rooted(self, rooted: Rooted) -> object:
        self._num_nodes -= 1  # nothing of it is on the wire
        outer = self._root, self._path
        self._root, self._path = rooted.address, [None] * len(self._path)
        lowered = self.lower(rooted.value)
        self._root, self._path = outer
        return lowered

    def _lower_dict(self, items: dict[Any, object]) -> object:
        if set(map(type, items)) - {str}:
            return self._lower_extension(items)
        if self._is_canonical:
            items = dict(sorted(items.items(), key=itemgetter(0)))
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
            name = self.lower(key)
            self._path[-1] = (key,)
            lowered.append((name, self.lower(item)))
        self._path.pop()
        if self._is_canonical:
            lowered.sort(key=lambda pair: msgspec.msgpack.encode(pair[0]))
        return list(chain.from_iterable(lowered))

    def _lower_extension(self, value: Any) -> msgspec.msgpack.Ext:
        code, parts = self._take_registered(value) or self._take(value)
        return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(self.lower(parts)))

    def _take(self, value: object) -> tuple[Code, object]:
        kind = find_kind(value)
        if kind is None:
            raise self._refuse(f"expected a type that can be stored exactly, found {_describe_type(value)}")
        try:
            if self._is_canonical and isinstance(value, OrderedDict):  # equal ones have their keys in the same order
                return kind.code, Fields([Fields(value), dict(value)])
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
        self._depth = max(self._depth, len(self._path))
        if len(self._path) > self._limits.max_depth:
            raise self._exceed(f"{self._limits.max_depth} nested containers", "flatten them")

    def _count(self, num: int) -> None:
        self._num_nodes += num
        if self._num_nodes > self._limits.max_nodes:
            raise self._exceed(f"{self._limits.max_nodes} elements")

    def _check_size(self, data: _Sized) -> _Sized:
        self._nbytes += len(data)
        if self._nbytes > self._limits.max_nbytes:
            raise self._exceed(f"{self._limits.max_nbytes} bytes")
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


def encode_alone(tree: object, registry: ValueRegistry, limits: ValueLimits) -> EncodedTree | None:
    """The encoding of a tree by itself, or None if it cannot be stored."""
    try:
        return Encoder("", registry, limits).encode_tree(tree)
    except (UnsupportedValue, LimitExceeded):
        return None


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

"""The small records of the value codec: marks, limits, and what stands in for a type that is not known here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from anyshard.errors import LimitExceeded

MIB = 1 << 20

# From this size on, adapters store arrays and byte strings as extents and leave a mark in the tree.
LARGE_VALUE_NBYTES = 64 * 1024

MarkKind: TypeAlias = Literal["tensor", "ndarray", "bytes"]


@dataclass(frozen=True, slots=True)
class TensorMark:
    """Stands in a value tree for a leaf that is stored as extents under `address`; `kind` says what to make of them."""

    address: str
    kind: MarkKind


@dataclass(frozen=True, slots=True)
class PerRankMark:
    """Stands in a value tree for what every rank has of its own at `address`."""

    address: str


@dataclass(frozen=True, slots=True)
class Unregistered:
    """A stored value of a registered type that cannot be made in this process. Saving it again keeps it whole.

    Nobody registered its name here or, if it is one of torch's own, this torch lacks its dtype or device.

    Two are equal if their stored bytes are, so that they can stand in a set or as a key as the value itself did.
    """

    name: str
    payload: object = field(compare=False)
    encoded: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """How large one encoded value may be; checked before anything is stored, and before anything is built from bytes.

    `max_depth` counts nested MessagePack arrays and maps, `max_nodes` every MessagePack object, also those inside extensions.
    """

    max_nbytes: int = 64 * MIB
    max_depth: int = 64
    max_nodes: int = 2_000_000

    def __post_init__(self) -> None:
        if min(self.max_nbytes, self.max_depth, self.max_nodes) <= 0:
            raise LimitExceeded(f"limits of values must be positive, found {self}")


class NamedTupleRecord(tuple[Any, ...]):  # noqa: SLOT001 - a tuple cannot have slots that hold anything
    """A decoded named tuple: equal to the original as a tuple, its fields readable by name, no class made from the file.

    The original class is never looked up. Register it with `anyshard.register_value` to get it back itself.
    """

    type_name: str
    _fields: tuple[str, ...]

    def __new__(cls, values: Iterable[object], type_name: str, fields: tuple[str, ...]) -> Self:
        """Pair values with field names; the names must be distinct public identifiers, one per value."""
        record = super().__new__(cls, values)
        if len(fields) != len(record) or len(set(fields)) != len(fields):
            raise ValueError(f"expected {len(record)} distinct field names, found {fields!r}")
        if wrong := [name for name in fields if not name.isidentifier() or name.startswith("_")]:
            raise ValueError(f"expected field names that are public identifiers, found {wrong!r}")
        record.__dict__.update(type_name=type_name, _fields=fields)
        return record

    def __getattribute__(self, name: str) -> Any:
        # Fields come first, as in a real named tuple: one called `count` hides the method of that name.
        if not name.startswith("_") and name in self._fields:
            return self[self._fields.index(name)]
        return super().__getattribute__(name)

    def __getnewargs__(self) -> tuple[tuple[object, ...], str, tuple[str, ...]]:
        return tuple(self), self.__dict__["type_name"], self._fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{self.__dict__['type_name']}({fields})"

    def _asdict(self) -> dict[str, object]:
        """The fields by name."""
        return dict(zip(self._fields, self, strict=True))

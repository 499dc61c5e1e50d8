"""The registry of value types: how classes beyond the built-in ones are stored, under names that the file carries.

Only what the caller registered is ever called at load; a name in a file is looked up here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

from anyshard.errors import InvalidRegistration
from anyshard.records.values_kinds import is_builtin_type

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,127}")
RESERVED_PREFIXES = ("anyshard.", "numpy.", "python.", "torch.")


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """One class with its name in files, its encoder (to a plain value) and its decoder (back)."""

    name: str
    type: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRegistration(f"expected a name of at most 128 letters, digits and _ . : -, found {self.name!r}")
        if not isinstance(self.type, type):
            raise InvalidRegistration(f"expected a class under the name {self.name!r}, found {self.type!r}")
        if is_builtin_type(self.type):
            raise InvalidRegistration(f"{self.type.__qualname__} is stored by anyshard itself; register a class of your own")

    def is_successor_of(self, other: RegisteredType) -> bool:
        """Whether this is the same class again, perhaps defined anew (a reloaded module, a notebook cell)."""
        return (self.name, self.type.__module__, self.type.__qualname__) == (
            other.name,
            other.type.__module__,
            other.type.__qualname__,
        )


@final
class ValueRegistry:
    """Looks registered types up by exact class when saving and by name when loading.

    A registry made by `extended` sees its own entries first, then those of the registry that it was made from, also those
    that are registered there later. It may be read by several threads while one registers.
    """

    def __init__(self) -> None:
        self._parent: ValueRegistry | None = None
        self._by_type: dict[type, RegisteredType] = {}
        self._by_name: dict[str, RegisteredType] = {}

    def register(self, name: str, type_: type, encode: Callable[[Any], object], decode: Callable[[Any], object]) -> None:
        """Store instances of exactly `type_` as `encode(instance)`, a plain value, and load them by `decode` of it.

        Registering the same class again under its name replaces the functions; a name or class that is taken by another raises
        `InvalidRegistration`, as do reserved names and the types that anyshard stores itself.
        """
        if name.startswith(RESERVED_PREFIXES):
            raise InvalidRegistration(f"names that start with {', '.join(RESERVED_PREFIXES)} are reserved, found {name!r}")
        self._add(RegisteredType(name, type_, encode, decode))

    def extended(self, entries: Iterable[RegisteredType]) -> ValueRegistry:
        """A registry with further entries, which may have reserved names; this one does not change."""
        registry = ValueRegistry()
        registry._parent = self
        for entry in entries:
            registry._add(entry)
        return registry

    def find_type(self, kind: type) -> RegisteredType | None:
        """The entry of exactly this class, or None."""
        entry = self._by_type.get(kind)
        return self._parent.find_type(kind) if entry is None and self._parent else entry

    def find_name(self, name: str) -> RegisteredType | None:
        """The entry of this name, or None."""
        entry = self._by_name.get(name)
        return self._parent.find_name(name) if entry is None and self._parent else entry

    def _add(self, entry: RegisteredType) -> None:
        for other in (self.find_name(entry.name), self.find_type(entry.type)):
            if other is not None and not entry.is_successor_of(other):
                raise InvalidRegistration(
                    f"expected a free name and class, found {other.type.__qualname__} registered as {other.name!r} "
                    f"already; use another name than {entry.name!r}, and one name per class"
                )
        if replaced := self._by_name.get(entry.name):
            self._by_type.pop(replaced.type, None)
        self._by_name[entry.name] = entry
        self._by_type[entry.type] = entry

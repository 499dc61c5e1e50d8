"""Subtrees of value trees that are the same objects from one save to the next, and what was worked out of them meanwhile."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import msgspec

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """The encoding of a tree, and how much of an encoder's limits it takes."""

    data: msgspec.Raw
    num_nodes: int
    nbytes: int
    depth: int


@final
class ConstantTrees:
    """Trees of marks, known by identity; nobody changes them. Holds no tensor. Good for as long as a structure stays the same.

    Several threads may use it: each entry is put in whole, and it does not matter whose is kept.
    """

    def __init__(self, trees: Iterable[object]) -> None:
        self._trees = {id(tree): tree for tree in trees}
        self.encoded: dict[int, EncodedTree | None] = {}  # by id; None for one that cannot be encoded by itself
        self.parts: dict[Hashable, Mapping[Path, bytes]] = {}  # digests by path, as value_parts lists them
        self._origins: tuple[Hashable, ...] = ()
        self._facts: dict[Hashable, str] = {}

    def __contains__(self, tree: object) -> bool:
        # No id can be that of another object, for the trees live as long as this.
        return id(tree) in self._trees

    def keep_origins(self, origins: tuple[Hashable, ...]) -> None:
        """Note which parts the trees of a save have, and which of them are constants: other ones mean another structure."""
        if origins != self._origins:
            self._origins, self._facts = origins, {}

    @property
    def facts(self) -> dict[Hashable, str]:
        """What was worked out of the structure whose parts were listed last; what is put in stays as long as that is the same."""
        return self._facts

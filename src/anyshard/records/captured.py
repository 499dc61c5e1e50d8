"""What adapters hand over: the taken-apart app state of a save, and what a load knows of the checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from anyshard.records.constant_trees import ConstantTrees
from anyshard.records.handles import Source
from anyshard.records.tables import IntColumn, ShardTable, TensorTable


@dataclass(frozen=True, slots=True)
class PerRankPart:
    """What one rank has of a per-rank value: its tree, and the encoded key. Ranks with equal keys are replicas."""

    key: bytes
    tree: object


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFacts:
    """Where tensors of rows lie, as a capture has just found again; all captures give the same object that have found the same.

    `address` is 0 where nothing is known, of any row. `is_dense`: in C order without holes, and no conj or neg view.
    """

    address: IntColumn
    is_host: NDArray[np.bool_]
    is_dense: NDArray[np.bool_]

    def pick(self, rows: IntColumn) -> MemoryFacts:
        """Those of some rows."""
        return MemoryFacts(self.address[rows], self.is_host[rows], self.is_dense[rows])


@dataclass(frozen=True, slots=True)
class Captured:
    """The part of an app state that one rank holds, taken apart.

    The rows of `shards` are the regions on this rank, and `sources` are parallel to them; a logical tensor of which it holds
    nothing has no row. `trees` has one value tree per section, in app state order, in which a `TensorMark` stands for every
    tensor and a `PerRankMark` for every key of `per_rank`. `buffers` are the addresses of modules' buffers. `mesh` gives the size
    of each named axis of the meshes that were met. `branches` are addresses of dicts in the trees that are united with those of
    other ranks key by key, whatever is in them. `warnings` are sentences for the report. `constants` are subtrees of `trees` that
    are the same objects in all captures of this structure; there are some only if a cache has taken the app state apart.
    `memory` says where the rows lie, if such a cache has found the very tensors of an earlier capture where they were.
    """

    shards: ShardTable
    sources: tuple[Source, ...]
    trees: Mapping[str, object]
    warnings: tuple[str, ...] = ()
    buffers: frozenset[str] = frozenset()
    per_rank: Mapping[str, PerRankPart] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    branches: frozenset[str] = frozenset()
    constants: ConstantTrees | None = None
    memory: MemoryFacts | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The elements [start, stop) of a stored tensor, counted in the order that its dims have as `dims`, outermost first."""

    address: str
    dims: tuple[int, ...]
    start: int
    stop: int


# The trees of the per-rank values that one rank of the saving group had in one section, by address.
ReadRank: TypeAlias = Callable[[int, str], Mapping[str, object]]


def _read_nothing(rank: int, section: str) -> Mapping[str, object]:
    raise AssertionError(f"a checkpoint without per-rank values was asked for those of rank {rank} in {section}")


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds: its logical tensors, the decoded value tree of each section that was read, and all its sections.

    Every `TensorMark` in `trees` names a row of `tensors`. Sections that nobody asked for need not be read; `sections` names
    them too, and may be left empty if all were read. `per_rank` says for each per-rank value which rank has it under which key;
    `read_rank` reads what that rank has.
    """

    tensors: TensorTable
    trees: Mapping[str, object]
    sections: tuple[str, ...] = ()
    per_rank: Mapping[str, Mapping[bytes, int]] = field(default_factory=dict)
    read_rank: ReadRank = _read_nothing

    def list_sections(self) -> tuple[str, ...]:
        """The names of all sections of the checkpoint."""
        return self.sections or tuple(self.trees)

"""What adapters hand over: the taken-apart app state of a save, and what a load knows of the checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyshard.records.handles import Source
from anyshard.records.tables import ShardTable, TensorTable


@dataclass(frozen=True, slots=True)
class Captured:
    """An app state taken apart.

    `sources` are parallel to the rows of `shards`. `trees` has one value tree per section, in app state order, in which a
    `TensorMark` stands for every leaf of `shards`. `warnings` are sentences for the report.
    """

    shards: ShardTable
    sources: tuple[Source, ...]
    trees: Mapping[str, object]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The elements [start, stop) of a stored tensor, counted in the order that its dims have as `dims`, outermost first."""

    address: str
    dims: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds: its logical tensors, the decoded value tree of each section that was read, and all its sections.

    Every `TensorMark` in `trees` names a row of `tensors`. Sections that nobody asked for need not be read; `sections` names
    them too, and may be left empty if all were read.
    """

    tensors: TensorTable
    trees: Mapping[str, object]
    sections: tuple[str, ...] = ()

    def list_sections(self) -> tuple[str, ...]:
        """The names of all sections of the checkpoint."""
        return self.sections or tuple(self.trees)

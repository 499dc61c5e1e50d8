"""What a rehearsal is asked, and what the coordinator finds out for it about the place, its room, and loads of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anyshard.agreed_plan import GlobalPlan
from anyshard.commit.guard import UNGUARDED
from anyshard.commit.probe import Ground
from anyshard.errors import InvalidOption, StorageFull
from anyshard.options import SaveOptions
from anyshard.planning.forecast import NO_VALUES, ReadForecast, forecast_reads, lay_out_blobs
from anyshard.planning.layouts import Layout, PlacedTensors, place
from anyshard.records.index import decode_index
from anyshard.records.rank_messages import Message
from anyshard.records.tables import Index, ShardTable
from anyshard.reports import LoadForecast
from anyshard.save_intent import check_space, estimate_nbytes
from anyshard.storage.protocol import Store

_MAX_TOLD_NBYTES = 8 << 20  # of an index: a longer one would be a burden on what carries messages


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the caller wants to know: room for how many checkpoints, loads under which layouts, how long a training step is."""

    num_steps: int
    step_s: float | None
    also: Sequence[Layout]
    options: SaveOptions

    def __post_init__(self) -> None:
        _check(type(self.num_steps) is int and self.num_steps > 0, "num_steps", "a whole number above 0", self.num_steps)
        is_time = self.step_s is None or (isinstance(self.step_s, (int, float)) and 0 < self.step_s < math.inf)
        _check(is_time, "step_s", "the seconds of a training step, above 0", self.step_s)
        is_layouts = isinstance(self.also, Sequence) and all(isinstance(layout, Layout) for layout in self.also)
        _check(is_layouts, "also", "a list of anyshard.Layout", self.also)


class Outline(Message, frozen=True):
    """The checkpoint that was planned: its index of so many rows (empty if too long to tell), and the values of each blob."""

    index: bytes
    num_rows: int
    values_nbytes: tuple[int, ...]

    def forecast(self, wanted: ShardTable, *, block_nbytes: int) -> ReadForecast:
        """What a load of these regions would read of it; nothing if the index was not told."""
        if not self.index:
            return ReadForecast(0, 0, 0)
        index = decode_index(self.index, max_rows=self.num_rows, file="index")
        return forecast_reads(wanted, index, lay_out_blobs(index, self.values_nbytes), block_nbytes=block_nbytes)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the coordinator knows of the plan and the place before anything is tried."""

    plan: GlobalPlan
    index: Index
    placed: tuple[PlacedTensors, ...]
    needed_nbytes: int
    free_nbytes: int | None
    warnings: tuple[str, ...]

    def outline(self, values_nbytes: Sequence[Mapping[str, int]]) -> Outline:
        """The planned checkpoint as it is told to all ranks; `values_nbytes` has the payloads of each rank by section."""
        blobs, sections = self.plan.blobs, self.plan.sections
        columns = zip(blobs.section.tolist(), blobs.rank.tolist(), blobs.k.tolist(), strict=True)
        values = (NO_VALUES if k else values_nbytes[rank][sections[section]] for section, rank, k in columns)
        index = self.plan.index if len(self.plan.index) <= _MAX_TOLD_NBYTES else b""
        return Outline(index, self.plan.num_rows, tuple(values))

    def forecast_loads(self, outline: Outline, *, block_nbytes: int) -> tuple[LoadForecast, ...]:
        """For each of the layouts that were asked for what the rank reads that holds most; of equal ones the first."""
        layouts = lay_out_blobs(self.index, outline.values_nbytes) if self.placed else {}
        loads = []
        for placed in self.placed:
            rank = int(np.argmax(placed.count_bytes()))
            found = forecast_reads(placed.shards_of(rank), self.index, layouts, block_nbytes=block_nbytes)
            name, num_ranks = str(placed.layout), placed.layout.num_ranks
            loads.append(LoadForecast(name, num_ranks, found.wanted_nbytes, found.read_nbytes, found.num_blobs))
        return tuple(loads)


def look_ahead(store: Store, ground: Ground, plan: GlobalPlan, *, values_nbytes: int, rehearsal: Rehearsal) -> Outlook:
    """The outlook on a place and a plan; `values_nbytes` are those of the coordinator.

    Raises `StorageFull` for too little room, `InvalidOption` for a layout under which a tensor cannot lie.
    """
    index = decode_index(plan.index, max_rows=plan.num_rows, file="index")
    placed = tuple(place(index.shards.tensors, layout) for layout in rehearsal.also)
    warnings = [*ground.warnings]
    warnings += [f"also: layout {one.layout}: {glob!r} matches no tensor" for one in placed for glob in one.unmatched]
    if not store.capabilities.guarded:
        warnings.append(UNGUARDED)
    nbytes, num_steps = estimate_nbytes(plan) + values_nbytes, rehearsal.num_steps
    try:
        check_space(store, num_steps * nbytes)
    except StorageFull as full:
        raise StorageFull(f"{full}. That is for num_steps={num_steps} checkpoints of {nbytes} bytes", file=store.url) from full
    return Outlook(plan, index, placed, num_steps * nbytes, store.free_nbytes(), tuple(warnings))


def _check(is_fine: bool, name: str, expected: str, found: object) -> None:  # noqa: FBT001 - the verdict, not a mode
    if not is_fine:
        raise InvalidOption(f"{name}: expected {expected}, found {found!r}")

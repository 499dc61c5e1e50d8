"""Forecasts: what a load would read of a checkpoint that has been planned and not been written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anyshard.planning.match import match_shards
from anyshard.planning.pack import shard_nbytes
from anyshard.planning.reads import plan_reads
from anyshard.records.layout import align_up, lay_out
from anyshard.records.load_plan import BlobLayout, ReadLimits
from anyshard.records.tables import NO_BLOB, Index, IntColumn, ShardTable
from anyshard.records.tail import CELL_NBYTES, SMALL_ALIGNMENT

NO_VALUES = -1


@dataclass(frozen=True, slots=True)
class ReadForecast:
    """What one rank would read: `wanted_nbytes` that it holds, out of `read_nbytes` of `num_blobs` blobs."""

    wanted_nbytes: int
    read_nbytes: int
    num_blobs: int


def lay_out_blobs(index: Index, values_nbytes: Sequence[int]) -> dict[int, BlobLayout]:
    """The layouts of all blobs that an index is about, as they will be written.

    `values_nbytes` has for each blob the length of its values slot, or `NO_VALUES` if it has none.
    """
    stored = np.flatnonzero(index.blob != NO_BLOB)
    stored = stored[np.lexsort((index.slot[stored], index.blob[stored]))]
    nbytes = shard_nbytes(index.shards)[stored]
    bounds = np.searchsorted(index.blob[stored], np.arange(len(values_nbytes) + 1))
    slots = np.split(nbytes, bounds[1:-1]) if len(values_nbytes) else []
    return {
        blob: _lay_out_blob(own if values == NO_VALUES else np.append(own, values))
        for blob, (own, values) in enumerate(zip(slots, values_nbytes, strict=True))
    }


def _lay_out_blob(nbytes: IntColumn) -> BlobLayout:
    position = lay_out(nbytes)
    end = align_up(int(position[-1] + nbytes[-1]), SMALL_ALIGNMENT)
    return BlobLayout(CELL_NBYTES, end, position, nbytes)


def forecast_reads(wanted: ShardTable, index: Index, layouts: Mapping[int, BlobLayout], *, block_nbytes: int) -> ReadForecast:
    """What a load of these regions would read, cells and gaps between them included."""
    limits = ReadLimits(block_nbytes, CELL_NBYTES if block_nbytes > CELL_NBYTES else 0)
    plan = plan_reads(match_shards(wanted, index), layouts, limits=limits)
    wanted_nbytes = int((plan.items.lengths.prod(axis=1) * plan.items.itemsize).sum())
    return ReadForecast(wanted_nbytes, plan.read_nbytes, len(np.unique(plan.reads.blob)))

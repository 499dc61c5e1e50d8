"""Cover: whether the shards of a table hold every logical tensor exactly once. Asked before a commit, never at a read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anyshard.records.addresses import show
from anyshard.records.tables import NOT_AN_ALIAS, ShardTable
from anyshard.records.tiling import Flaw, check_tiling


@dataclass(frozen=True, slots=True)
class CoverFlaw:
    """One region of one logical tensor that no shard holds, that two hold, or that lies outside; `flaw.rows` are table rows."""

    address: str
    flaw: Flaw

    def __str__(self) -> str:
        return f"{show(self.address)}: {self.flaw}"


def check_cover(shards: ShardTable, *, limit: int = 16) -> tuple[CoverFlaw, ...]:
    """No flaw if and only if the shards of each stored tensor tile it; else up to `limit` flaws of the first tensors with any.

    Tensors that are one whole shard, the usual case, are seen at once.
    """
    tensors, flaws = shards.tensors, list[CoverFlaw]()
    is_whole = ((shards.offsets == 0) & (shards.lengths == tensors.shapes[shards.tensor])).all(axis=1)
    num_shards = np.bincount(shards.tensor, minlength=len(tensors))
    num_whole = np.bincount(shards.tensor[is_whole], minlength=len(tensors))
    is_fine = (num_shards == 1) & (num_whole == 1)
    order = np.argsort(shards.tensor, kind="stable")
    ends = np.cumsum(num_shards)
    for tensor in np.flatnonzero((tensors.alias_of == NOT_AN_ALIAS) & ~is_fine).tolist():
        rows, ndim = order[ends[tensor] - num_shards[tensor] : ends[tensor]], int(tensors.ndims[tensor])
        offsets, lengths = shards.offsets[rows, :ndim], shards.lengths[rows, :ndim]
        for flaw in check_tiling(tensors.shape(tensor), offsets, lengths, limit=limit - len(flaws)):
            own = Flaw(flaw.kind, flaw.offsets, flaw.lengths, tuple(int(rows[row]) for row in flaw.rows))
            flaws.append(CoverFlaw(tensors.addresses[tensor], own))
        if len(flaws) == limit:
            break
    return tuple(flaws)

"""What one rank holds, as planning for many ranks needs it: its shard table, its sections, and which tensors are buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.records.tables import ShardTable


@dataclass(frozen=True, slots=True)
class RankTable:
    """The shards of one rank, its sections in app state order, and for each of its tensors whether it is a module's buffer.

    Buffers may differ between replicas: they are never cut, and taken from the first rank that holds them. Every address lies in
    one of `sections`. Ranks whose tables are the same object are planned as one.
    """

    shards: ShardTable
    sections: tuple[str, ...]
    is_buffer: NDArray[np.bool_]


def make_rank_table(shards: ShardTable, sections: tuple[str, ...], *, buffers: frozenset[str] = frozenset()) -> RankTable:
    """The table of a rank, with buffers given by their addresses."""
    is_buffer = np.array([address in buffers for address in shards.tensors.addresses], dtype=np.bool_)
    return RankTable(shards, sections, is_buffer)

"""Cases of planning for many ranks, without processes. Each test is named after its row in cases.md."""

from __future__ import annotations

import re

import numpy as np
import pytest

from anyshard.errors import InvalidAppState
from anyshard.planning.group_plan import plan_group
from anyshard.records.rank_table import make_rank_table
from anyshard.records.tables import ShardTable, make_tensor_table

OVERLAP = r"a/v \(50000, 4\): .* overlap at \(7008, 0\) of lengths \(1, 4\) \(\(3, 4\) at \(7006, 0\) on rank 7 and .* on rank 7"
HOLE = r"a/w \(50000, 4\): hole at \(20998, 0\) of lengths \(2, 4\) \(it is known to ranks 0, 1, "


def test_b041_planted_overlap_and_hole_of_50_000_shards() -> None:
    """Of 50,000 shards on 50 ranks one that overlaps and one that is missing are both named, with address, region and ranks."""
    tensors = make_tensor_table(["a/v", "a/w"], ["float32"] * 2, [(50_000, 4)] * 2, {})
    tables = []
    for rank in range(50):
        tensor, rows = np.repeat([0, 1], 500), np.tile(np.arange(1000 * rank, 1000 * (rank + 1), 2), 2)
        offsets, lengths = np.stack([rows, 0 * rows], axis=1), np.tile([2, 4], (1000, 1))
        lengths[3, 0] += rank == 7
        kept = slice(-1 if rank == 20 else None)
        tables.append(make_rank_table(ShardTable(tensors, tensor[kept], offsets[kept], lengths[kept]), ("a",)))
    with pytest.raises(InvalidAppState) as caught:
        plan_group(tables, max_blob_nbytes=1 << 30)
    assert [True] * 2 == [re.search(part, str(caught.value)) is not None for part in (OVERLAP, HOLE)], str(caught.value)

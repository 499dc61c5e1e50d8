"""Matching: what one read costs beside many other tensors."""

from __future__ import annotations

import tracemalloc

import numpy as np

from anyshard.planning.match import locate, match_shards
from anyshard.records.load_plan import BlobLayout
from anyshard.records.tables import Index, make_tensor_table, one_shard, whole_shards

NUM = 20_000


def test_one_read_does_not_look_at_all_other_tensors() -> None:
    """Once the rows of addresses are known, matching one tensor of 20,000 takes no column of their length."""
    tensors = make_tensor_table([f"a/{i:05d}" for i in range(NUM)], ["uint8"] * NUM, [(64,)] * NUM, {})
    index = Index(whole_shards(tensors), np.zeros(NUM, dtype=np.int64), np.arange(NUM))
    layouts = {0: BlobLayout(1 << 18, NUM * 64, np.arange(NUM) * 64, np.full(NUM, 64))}
    locate(match_shards(one_shard(tensors, 0, (0,), (64,)), index), layouts)
    tracemalloc.start()
    items = locate(match_shards(one_shard(tensors, 7, (0,), (64,)), index), layouts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ([7], [7 * 64]) == (items.stored.tolist(), items.position.tolist())
    assert peak < NUM


def test_rows_of_addresses_are_found_once() -> None:
    """The table keeps the map that it made."""
    tensors = make_tensor_table(["a/x", "a/w"], ["uint8"] * 2, [(1,)] * 2, {})
    assert {"a/w": 0, "a/x": 1} == dict(tensors.rows)
    assert tensors.rows is tensors.rows

"""Sets of bytes in memory: what they contain and touch, and which plain tensors stand for others."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyshard.adapters.memory_ranges import Column, MemoryRanges, list_plain, locate, locate_sources
from anyshard.adapters.tensors import DeviceSource, HostSource
from tests.adapters.fake_ranks import as_rank
from tests.adapters.rank_parts import shard

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def columns(ranges: list[tuple[int, int]]) -> tuple[Column, Column]:
    """Starts and stops."""
    starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    return starts, stops


@given(held=RANGES, asked=RANGES)
def test_ranges_answer_as_sets_of_bytes_do(held: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    """Whatever overlaps, touches or is empty; a range without a byte is nowhere."""
    memory = MemoryRanges(*columns(held))
    known = {byte for start, stop in held for byte in range(start, stop)}
    wanted = [set(range(start, stop)) for start, stop in asked]
    assert [bool(each) and each <= known for each in wanted] == memory.contain(*columns(asked)).tolist()
    assert [bool(each & known) for each in wanted] == memory.touch(*columns(asked)).tolist()


def test_memory_of_devices_is_never_that_of_the_host() -> None:
    """The same address on a device is another place, whatever else is the same."""
    tensor = torch.zeros(4)
    host, device = locate_sources([HostSource(tensor, "x")]), locate_sources([DeviceSource(tensor, "x")])
    assert [True, False] == [MemoryRanges(*locate([tensor])).touch(*place).tolist() == [True] for place in (host, device)]


def test_tensors_are_looked_for_where_their_elements_lie() -> None:
    """Local tensors for DTensors; sparse tensors are nowhere."""
    plain = torch.zeros(4)
    with as_rank(0, 2):
        sharded = shard((4, 2))
        found = list_plain([plain, sharded, torch.eye(2).to_sparse()])
    assert [plain.data_ptr(), sharded.to_local().data_ptr()] == [tensor.data_ptr() for tensor in found]

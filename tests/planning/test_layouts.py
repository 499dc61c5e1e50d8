"""Layouts of ranks that need not exist: which regions they hold, and what a load under them would read."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.adapters.placements import Split, local_regions
from anyshard.errors import InvalidOption
from anyshard.planning.forecast import ReadForecast, forecast_reads, lay_out_blobs
from anyshard.planning.group_plan import plan_group
from anyshard.planning.layouts import Layout, place
from anyshard.planning.pack import shard_nbytes
from anyshard.records.rank_table import make_rank_table
from anyshard.records.tables import TensorTable, make_tensor_table, whole_shards
from anyshard.records.tail import CELL_NBYTES
from tests.planning.groups import make_wide_tensors
from tests.planning.simulated import tensor_tables

MIB = 1 << 20
FSDP = Layout({"fsdp": 4}, {"**": {"fsdp": 0}})

Regions = list[tuple[str, tuple[int, ...], tuple[int, ...]]]


@st.composite
def layouts(draw: st.DrawFn, tensors: TensorTable) -> Layout:
    """Up to three axes, and for some tensors a rule of their own."""
    mesh = {axis: draw(st.integers(1, 5)) for axis in ("dp", "fsdp", "tp")[: draw(st.integers(1, 3))]}
    rules = {}
    for row, address in enumerate(tensors.addresses):
        dims = st.integers(0, max(int(tensors.ndims[row]) - 1, 0))
        rules[address] = {axis: draw(dims) for axis in mesh if draw(st.booleans())}
    return Layout(mesh, rules)


def list_regions(tensors: TensorTable, layout: Layout, rank: int) -> Regions:
    shards = place(tensors, layout).shards_of(rank)
    return [(tensors.addresses[tensor], *shards.region(row)) for row, tensor in enumerate(shards.tensor.tolist())]


@given(st.data())
def test_chunks_are_those_of_torch(data: st.DataObject) -> None:
    """Every rank of any mesh holds the regions that a DTensor with the same `Shard` placements has there."""
    tensors = data.draw(tensor_tables())
    layout = data.draw(layouts(tensors))
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    sizes = tuple(layout.mesh.values())
    coordinate = [int(index) for index in np.unravel_index(rank, sizes)]
    expected: Regions = []
    for row, address in enumerate(tensors.addresses):
        shape, cuts = tensors.shape(row), layout.shard[address] if tensors.ndims[row] else {}
        splits = [Split(cuts[axis]) if axis in cuts else None for axis in layout.mesh]
        regions = local_regions(shape, splits, mesh_shape=sizes, coordinate=coordinate)
        boxes = zip(regions.offsets.tolist(), regions.lengths.tolist(), strict=True)
        expected += [(address, tuple(offsets), tuple(lengths)) for offsets, lengths in boxes if 0 not in shape]
    assert expected == list_regions(tensors, layout, rank)


@given(st.data())
def test_bytes_of_all_ranks(data: st.DataObject) -> None:
    """What is counted for all ranks at once is what each of them holds."""
    tensors = data.draw(tensor_tables())
    placed = place(tensors, data.draw(layouts(tensors)))
    expected = [int(shard_nbytes(placed.shards_of(rank)).sum()) for rank in range(placed.layout.num_ranks)]
    assert expected == placed.count_bytes().tolist()


def test_the_first_rule_that_matches_counts() -> None:
    """A rule stands before those behind it; what no rule matches and what has no dims is whole; idle rules are told."""
    tensors = make_tensor_table(["a/q.weight", "a/k.weight", "a/step", "b/x"], ["uint8"] * 4, [(8, 6), (8, 6), (), (5,)], {})
    rules = {"**.q.weight": {"tp": 0}, "a/q.weight": {"tp": 1}, "a/**": {"tp": -1}, "c/*": {"tp": 0}}
    layout = Layout({"dp": 2, "tp": 2}, rules)
    assert [("a/k.weight", (0, 3), (8, 3)), ("a/q.weight", (0, 3), (8, 3)), ("a/step", (), ()), ("b/x", (0,), (5,))] == (
        list_regions(tensors, layout, 3)
    )
    assert ("**.q.weight", "c/*") == place(tensors, layout).unmatched


def test_ties_and_what_ranks_have_of_their_own() -> None:
    """A tied tensor is held once, and what single ranks have of their own by nobody: another layout does not say by whom."""
    addresses = ["a/t", "a/tied", "rng/cpu/~r0", "rng/cpu/~r1"]
    tensors = make_tensor_table(addresses, ["uint8"] * 4, [(8,), (8,), (9,), (9,)], {"a/tied": "a/t"})
    assert [2, 2, 2, 2] == place(tensors, FSDP).count_bytes().tolist()


WRONG: dict[str, tuple[Any, Any]] = {
    "mesh: expected axes and their sizes, like {'fsdp': 8}, found {}": ({}, {}),
    "mesh: axis 'fsdp': expected a size above 0, found 0": ({"fsdp": 0}, {}),
    "mesh: axis 'fsdp': expected a size above 0, found True": ({"fsdp": True}, {}),
    "mesh: expected at most 1048576 ranks, found 4194304": ({"dp": 2048, "fsdp": 2048}, {}),
    "shard: '**': expected an axis of the mesh (fsdp, tp), found 'ep'": ({"fsdp": 2, "tp": 2}, {"**": {"ep": 0}}),
    "shard: '**': axis 'fsdp': expected the number of a dim, found '0'": ({"fsdp": 2}, {"**": {"fsdp": "0"}}),
    "shard: '**': expected {axis: dim}, found 0": ({"fsdp": 2}, {"**": 0}),
}


@pytest.mark.parametrize("message", WRONG)
def test_layouts_that_cannot_be(message: str) -> None:
    """A mesh without ranks, an axis that it does not have, or no dim is refused where the layout is made."""
    with pytest.raises(InvalidOption) as caught:
        Layout(*WRONG[message])
    assert f"layout: {message}" == str(caught.value)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_a_tensor_lacks(dim: int) -> None:
    """The error names the tensor, its shape, and the rule."""
    with pytest.raises(
        InvalidOption, match=rf"a/t00: expected a dim of shape \(4, 4\) for axis 'fsdp', found {dim} \(by the rule"
    ):
        place(make_wide_tensors([(4, 4)]), Layout({"fsdp": 4}, {"**": {"fsdp": dim}}))


# Forecasts ------------------------------------------------------------------------------------------------------------


def forecast(tensors: TensorTable, layout: Layout, rank: int) -> ReadForecast:
    """What a rank of a layout would read of what two ranks have saved that hold halves of everything, without values."""
    halves = place(tensors, Layout({"fsdp": 2}, {"**": {"fsdp": 0}}))
    tables = [make_rank_table(halves.shards_of(rank), ("a",)) for rank in range(2)]
    index = plan_group(tables, max_blob_nbytes=1 << 40).index
    return forecast_reads(place(tensors, layout).shards_of(rank), index, lay_out_blobs(index, [0, 0]), block_nbytes=8 * MIB)


@pytest.mark.parametrize(
    ("layout", "rank", "expected"),
    [
        (Layout({"dp": 3}), 1, ReadForecast(16 * MIB, 16 * MIB + 2 * 4096, 2)),
        (FSDP, 0, ReadForecast(4 * MIB, 4 * MIB + CELL_NBYTES, 1)),
        (FSDP, 3, ReadForecast(4 * MIB, 4 * MIB + 4096, 1)),
        (Layout({"tp": 4}, {"**": {"tp": 1}}), 2, ReadForecast(4 * MIB, 16 * MIB, 2)),
    ],
    ids=["whole", "rows", "last rows", "columns"],
)
def test_what_a_load_would_read(layout: Layout, rank: int, expected: ReadForecast) -> None:
    """Rows are read with the cells that hold them, columns with the rows around them, from the blobs that have them."""
    assert expected == forecast(make_wide_tensors([(1024, 4096)]), layout, rank)


def test_nothing_wanted() -> None:
    """A rank that a short tensor does not reach reads nothing."""
    assert ReadForecast(0, 0, 0) == forecast(make_wide_tensors([(2, 8)]), FSDP, 3)


def test_many_ranks_and_tensors() -> None:
    """1,024 ranks and 1,000 tensors of 100 shapes take a moment, not a loop over all of them."""
    shapes = [(64 * (1 + i % 10), 128 * (1 + i // 10 % 10)) for i in range(1000)]
    tensors = make_tensor_table([f"a/layers.{i:03}.w" for i in range(1000)], ["bfloat16"] * 1000, shapes, {})
    index = plan_group([make_rank_table(whole_shards(tensors), ("a",))], max_blob_nbytes=1 << 40).index
    began_s = time.perf_counter()
    placed = place(tensors, Layout({"fsdp": 512, "tp": 2}, {"**.w": {"tp": 1, "fsdp": 0}}))
    rank = int(placed.count_bytes().argmax())
    found = forecast_reads(placed.shards_of(rank), index, lay_out_blobs(index, [0]), block_nbytes=8 * MIB)
    assert sum(2 * -(-rows // 512) * columns // 2 for rows, columns in shapes) == found.wanted_nbytes
    assert time.perf_counter() - began_s < 5

"""Load planning: any layout to any layout gives the same bytes, from few, whole, bounded reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedFormat
from anyshard.planning.match import match_shards
from anyshard.planning.reads import plan_reads
from anyshard.records.load_plan import NOT_DENSE, BlobLayout, LoadPlan, ReadLimits, Uncovered
from anyshard.records.tables import ShardTable, make_tensor_table, whole_shards
from tests.planning.simulated import Simulated, load, make_shards, part, partitions, save, simulated_checkpoints

LIMITS = st.sampled_from([(1024, 0), (1024, 64), (4096, 1000), (4096, 256), (1 << 20, 0)])


@st.composite
def wanted_shards(draw: st.DrawFn, stored: Simulated) -> ShardTable:
    """Regions of some of the tensors, from their own partitions; some of them wanted twice."""
    regions = []
    for tensor in range(len(stored.tensors)):
        regions += [(tensor, r) for r in draw(partitions(stored.tensors.shape(tensor))) if draw(st.integers(0, 3))]
    again = [region for region in regions if draw(st.integers(0, 5)) == 5]
    return make_shards(stored.tensors, draw(st.permutations(regions + again)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), LIMITS, st.booleans())
def test_any_layout_to_any_layout(data: st.DataObject, limits: tuple[int, int], is_strided: bool) -> None:
    """Whatever the partitions, each wanted element is written exactly once, with the saved bits, by lawful reads."""
    stored = data.draw(simulated_checkpoints())
    wanted = data.draw(wanted_shards(stored))
    plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(*limits))
    assert () == plan.uncovered
    check_reads(stored, wanted, plan, ReadLimits(*limits))
    found, writes = load(stored, wanted, plan, is_strided=is_strided)
    for row, (got, count) in enumerate(zip(found, writes, strict=True)):
        expected = part(stored.bits[wanted.tensor[row]], wanted.region(row))
        assert expected.tobytes() == got.tobytes()
        assert (count == 1).all()


def check_reads(stored: Simulated, wanted: ShardTable, plan: LoadPlan, limits: ReadLimits) -> None:
    """Reads lie on cell borders, never overlap, are not too long, and hold no more than the allowed waste."""
    reads = plan.reads
    for blob in set(reads.blob.tolist()):
        layout, (start, stop) = stored.layouts[blob], (column[reads.blob == blob] for column in (reads.start, reads.stop))
        assert (start % layout.cell_nbytes == 0).all()
        assert ((stop % layout.cell_nbytes == 0) | (stop == layout.tail_position)).all()
        assert (stop[:-1] <= start[1:]).all()
        assert (stop - start <= limits.block_nbytes).all()
    touched = find_touched_cells(stored, wanted)
    cell = next(iter(stored.layouts.values())).cell_nbytes
    assert len(touched) * cell * (1 + limits.max_gap_nbytes / cell) >= plan.read_nbytes
    if limits.max_gap_nbytes == 0:
        assert touched == {(b, c) for b, s, e in zip(reads.blob, reads.start, reads.stop, strict=True) for c in range(s, e, cell)}


def find_touched_cells(stored: Simulated, wanted: ShardTable) -> set[tuple[int, int]]:
    """The cells (blob, position) that hold wanted bytes, found element by element."""
    masks = [np.zeros(stored.tensors.shape(tensor), dtype=bool) for tensor in range(len(stored.tensors))]
    for row, tensor in enumerate(wanted.tensor):
        part(masks[tensor], wanted.region(row))[...] = True
    shards, cells = stored.index.shards, set()
    for row in np.flatnonzero(stored.index.blob >= 0):
        layout, tensor = stored.layouts[stored.index.blob[row]], shards.tensor[row]
        first = layout.position[stored.index.slot[row]]
        hits = np.flatnonzero(part(masks[tensor], shards.region(row)).reshape(-1)) * stored.bits[tensor].itemsize + first
        cells |= {(int(stored.index.blob[row]), int(cell)) for cell in np.unique(hits // layout.cell_nbytes * layout.cell_nbytes)}
    return cells


def store_whole(addresses: list[str], shapes: list[tuple[int, ...]], *, cell_nbytes: int = 64, dtype: str = "uint8") -> Simulated:
    """A checkpoint of one rank that holds whole tensors."""
    tensors = make_tensor_table(addresses, [dtype] * len(addresses), shapes, {})
    return save(tensors, [whole_shards(tensors)], cell_nbytes=cell_nbytes, max_blob_nbytes=1 << 30)


def read_ranges(plan: LoadPlan) -> list[tuple[int, int]]:
    """Start and stop of all reads."""
    return list(zip(plan.reads.start.tolist(), plan.reads.stop.tolist(), strict=True))


def test_reads_cross_the_borders_of_tensors() -> None:
    """Whole tensors that follow each other are read block by block, whichever tensors lie in a block."""
    stored = store_whole(["a/x", "a/y", "a/z"], [(36,), (1000,), (30,)])
    plan = plan_reads(match_shards(whole_shards(stored.tensors), stored.index), stored.layouts, limits=ReadLimits(512, 0))
    # x lies at 64, y at 128 up to 1128, z at 1152.
    assert [(64, 576), (576, 1088), (1088, 1192)] == read_ranges(plan)
    assert [0, 2, 3, 5] == plan.reads.first_piece.tolist()
    assert [0, 1, 1, 1, 2] == plan.pieces.wanted.tolist()
    assert [0, 0, 448, 960, 0] == plan.pieces.wanted_position.tolist()


def test_rows_of_a_matrix_read_only_their_cells() -> None:
    """A few rows of a big matrix cost the cells that hold them and nothing else."""
    stored = store_whole(["a/w"], [(1000, 64)])
    wanted = make_shards(stored.tensors, [(0, ((10, 0), (16, 64)))])
    plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(1 << 20, 0))
    start = int(stored.layouts[0].position[0]) + 640
    assert [(start, start + 1024)] == read_ranges(plan)
    assert [0] == plan.pieces.wanted_position.tolist()


@pytest.mark.parametrize(("max_gap", "num_reads"), [(0, 10), (191, 10), (192, 1)])
def test_columns_read_only_touched_cells_unless_gaps_are_small(max_gap: int, num_reads: int) -> None:
    """Each row's piece of a column slice is its own read, until the cells between them are fewer than the gap allows."""
    stored = store_whole(["a/w"], [(10, 256)])
    wanted = make_shards(stored.tensors, [(0, ((0, 32), (10, 8)))])
    plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(1 << 20, max_gap))
    assert num_reads == len(plan.reads)
    assert [NOT_DENSE] * num_reads == plan.pieces.wanted_position.tolist()
    assert 64 * 10 + 192 * (10 - num_reads) == plan.read_nbytes


def test_bytes_wanted_twice_are_read_once() -> None:
    """Two wanted shards of the same bytes share reads."""
    stored = store_whole(["a/w"], [(1000,)])
    wanted = make_shards(stored.tensors, [(0, ((0,), (1000,))), (0, ((0,), (1000,)))])
    plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(1 << 20, 0))
    assert [(64, 1074)] == read_ranges(plan)
    assert [0, 1] == plan.pieces.wanted.tolist()


def test_bytes_within_a_longer_wanted_run_are_read_once() -> None:
    """A long wanted run shares its bytes with all others inside it, not only with the next one."""
    stored = store_whole(["a/w"], [(1000,)])
    regions = [((0,), (1000,)), ((5,), (5,)), ((200,), (700,))]
    wanted = make_shards(stored.tensors, [(0, region) for region in regions])
    plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(1 << 20, 0))
    assert [(64, 1074)] == read_ranges(plan)
    assert [0, 1, 2] == plan.pieces.wanted.tolist()


def test_alias_is_read_from_its_stored_tensor() -> None:
    """A tied name is filled from the tensor that holds its bytes."""
    tensors = make_tensor_table(["a/head", "a/tok"], ["uint8"] * 2, [(8,)] * 2, {"a/tok": "a/head"})
    stored = save(tensors, [whole_shards(tensors)], cell_nbytes=64, max_blob_nbytes=1 << 20)
    plan = plan_reads(
        match_shards(make_shards(tensors, [(1, ((0,), (8,)))]), stored.index), stored.layouts, limits=ReadLimits(64, 0)
    )
    assert ([0], [0], ()) == (plan.items.stored.tolist(), plan.items.wanted.tolist(), plan.uncovered)


def test_uncovered_regions_are_named() -> None:
    """Wanted regions that are not stored, and tensors that are unknown, are listed with address and region."""
    tensors = make_tensor_table(["a/w"], ["uint8"], [(4, 4)], {})
    stored = save(tensors, [make_shards(tensors, [(0, ((0, 0), (2, 4)))])], cell_nbytes=64, max_blob_nbytes=1 << 20)
    more = make_tensor_table(["a/w", "a/x"], ["uint8"] * 2, [(4, 4), (3,)], {})
    wanted = make_shards(more, [(0, ((1, 0), (3, 4))), (1, ((1,), (2,)))])
    plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(64, 0))
    assert (Uncovered(0, "a/w", (2, 0), (2, 4)), Uncovered(1, "a/x", (1,), (2,))) == plan.uncovered
    assert "a/x: region at (1,) of lengths (2,)" == str(plan.uncovered[1])


@pytest.mark.parametrize("second", [((2,), (2,)), ((2,), (1,))])
def test_overlapping_stored_shards_are_damage(second: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """An index that stores an element twice where it is wanted is refused, also if a hole makes up for it in number."""
    tensors = make_tensor_table(["a/w"], ["uint8"], [(4,)], {})
    shards = make_shards(tensors, [(0, ((0,), (3,))), (0, second)])
    stored = save(tensors, [shards], cell_nbytes=64, max_blob_nbytes=1 << 20)
    with pytest.raises(CheckpointDamaged, match="a/w: expected every element in one stored shard"):
        plan_reads(match_shards(whole_shards(tensors), stored.index), stored.layouts, limits=ReadLimits(64, 0))


@pytest.mark.parametrize(
    "layout", [None, BlobLayout(64, 128, np.array([64]), np.array([5])), BlobLayout(64, 128, *[np.array([])] * 2)]
)
def test_index_and_tail_must_agree(layout: BlobLayout | None) -> None:
    """An index row whose blob, slot or length the tails lack is damage that names address, slot and blob."""
    stored = store_whole(["a/w"], [(4,)])
    with pytest.raises(CheckpointDamaged, match="a/w: expected 4 bytes in slot 0 of blob 0"):
        plan_reads(
            match_shards(whole_shards(stored.tensors), stored.index), {0: layout} if layout else {}, limits=ReadLimits(64, 0)
        )


def test_unknown_dtypes_only_matter_where_wanted() -> None:
    """A stored tensor of a dtype that this release does not know can be left out, but not read."""
    stored = store_whole(["a/v", "a/w"], [(4,), (4,)])
    tensors = replace(stored.tensors, dtypes=("float3", "uint8"))
    index = replace(stored.index, shards=replace(stored.index.shards, tensors=tensors))
    wanted = make_shards(tensors, [(1, ((0,), (4,)))])
    assert 1 == len(plan_reads(match_shards(wanted, index), stored.layouts, limits=ReadLimits(64, 0)).items)
    with pytest.raises(UnsupportedFormat, match="unknown dtype 'float3'"):
        plan_reads(match_shards(whole_shards(tensors), index), stored.layouts, limits=ReadLimits(64, 0))


def test_cells_longer_than_a_block_are_refused() -> None:
    """A checkpoint with larger cells than blocks says which option to raise."""
    stored = store_whole(["a/w"], [(4,)], cell_nbytes=1024)
    with pytest.raises(LimitExceeded, match="raise block_nbytes"):
        plan_reads(match_shards(whole_shards(stored.tensors), stored.index), stored.layouts, limits=ReadLimits(512, 0))


@pytest.mark.parametrize("limits", [(64, -1), (64, 64), (64, 128)])
def test_limits_must_fit_together(limits: tuple[int, int]) -> None:
    """A gap that could swallow a block is refused."""
    with pytest.raises(LimitExceeded, match="max_gap_nbytes must be"):
        ReadLimits(*limits)


def test_nothing_wanted_is_an_empty_plan() -> None:
    """No wanted rows, or only empty ones, give no reads."""
    stored = store_whole(["a/e", "a/w"], [(0, 3), (4,)])
    for wanted in (make_shards(stored.tensors, []), make_shards(stored.tensors, [(0, ((0, 0), (0, 3)))])):
        plan = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(64, 0))
        assert (0, 0, 0, ()) == (len(plan.items), len(plan.reads), len(plan.pieces), plan.uncovered)
        assert [0] == plan.reads.first_piece.tolist()

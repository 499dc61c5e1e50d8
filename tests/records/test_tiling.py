"""Tiling: regions cover a tensor exactly once, or a flaw says where not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.errors import LimitExceeded
from anyshard.records.regions import decompose_run
from anyshard.records.tiling import Flaw, FlawKind, check_tiling
from tests.records.test_regions import Columns, grid, mask_of, shape_and_regions


@settings(max_examples=300)
@given(shape_and_regions())
def test_flaws_are_real_and_complete(case: tuple[tuple[int, ...], Columns]) -> None:
    """All holes and all elements of overlaps are found, and the regions named do have the flaw."""
    shape, (offsets, lengths) = case
    masks = [mask_of(shape, *region) for region in zip(offsets, lengths, strict=True)]
    count = sum((mask.astype(int) for mask in masks), np.zeros(shape, int))
    flaws = check_tiling(shape, offsets, lengths, limit=1000)
    for flaw in flaws:
        where = mask_of(shape, np.array(flaw.offsets, dtype=np.int64), np.array(flaw.lengths, dtype=np.int64))
        assert where.any()
        if flaw.kind is FlawKind.OVERLAP:
            assert flaw.rows[0] != flaw.rows[1]
            assert (masks[flaw.rows[0]] & masks[flaw.rows[1]])[where].all()
        count -= where if flaw.kind is FlawKind.OVERLAP else -where.astype(int)
    assert (count == 1).all()


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_flattened_partitions_tile(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Cutting a flattened tensor anywhere and decomposing the runs gives a tiling."""
    numel = int(np.prod(shape))
    cuts = sorted(data.draw(st.sets(st.integers(0, numel), max_size=4)) | {0, numel})
    parts = [decompose_run(shape, start, stop) for start, stop in itertools.pairwise(cuts)]
    assert () == check_tiling(shape, *(np.concatenate([part[side] for part in parts]) for side in (0, 1)))


@pytest.mark.timeout(30)
def test_b041_planted_overlap_and_hole_among_50_000() -> None:
    """Among 50,000 regions one planted overlap and one planted hole are both found, with rows and regions."""
    offsets, lengths = grid((10_000, 10_000), (250, 200))
    assert () == check_tiling((10_000, 10_000), offsets, lengths)
    lengths[30_100, 1] += 3
    lengths[40_150, 0] -= 1
    expected = {
        Flaw(FlawKind.OVERLAP, (6000, 5050), (40, 3), (30_100, 30_101)),
        Flaw(FlawKind.HOLE, (8039, 7500), (1, 50), ()),
    }
    assert expected == set(check_tiling((10_000, 10_000), offsets, lengths))


def test_b084_missing_end_is_a_hole() -> None:
    """Rows that nobody saved at the end of a tensor are named."""
    flaws = check_tiling((8, 3), np.array([[0, 0], [2, 0], [4, 0]]), np.array([[2, 3], [2, 3], [2, 3]]))
    assert (Flaw(FlawKind.HOLE, (6, 0), (2, 3), ()),) == flaws
    assert "hole at (6, 0) of lengths (2, 3)" == str(flaws[0])


@pytest.mark.parametrize(
    "region", [((0, -1), (2, 1)), ((0, 0), (3, 3)), ((2, 0), (1, 3)), ((0, 0), (-1, 3)), ((2**62, 0), (2**62, 1))]
)
def test_regions_outside_are_named(region: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """A region that leaves the tensor is reported by its row, whatever its numbers."""
    offsets, lengths = np.array([[0, 0], region[0]]), np.array([[2, 3], region[1]])
    flaws = check_tiling((2, 3), offsets, lengths)
    assert (Flaw(FlawKind.OUTSIDE, *region, (1,)),) == flaws
    assert str(flaws[0]).endswith("(rows (1,))")


def test_empty_tensors_need_no_regions() -> None:
    """A tensor without elements is tiled by nothing, and by empty regions."""
    nothing = np.zeros((0, 2), dtype=np.int64)
    assert () == check_tiling((0, 4), nothing, nothing)
    assert () == check_tiling((0, 4), np.array([[0, 0]]), np.array([[0, 4]]))


def test_scalars_need_exactly_one_region() -> None:
    """A 0-d tensor is tiled by one region of no dims."""
    kinds = [[flaw.kind for flaw in check_tiling((), *(np.zeros((n, 0), dtype=np.int64),) * 2)] for n in (0, 1, 2)]
    assert [[FlawKind.HOLE], [], [FlawKind.OVERLAP]] == kinds


def test_flaws_are_limited() -> None:
    """No more flaws are listed than asked for."""
    offsets = np.arange(0, 100, 2)[:, None]
    assert 3 == len(check_tiling((100,), offsets, np.ones_like(offsets), limit=3))


def test_hostile_dims_are_refused() -> None:
    """Regions cut in very many dims, and shapes beyond the limits, are refused instead of filling memory."""
    shape = (2,) * 40
    with pytest.raises(LimitExceeded, match="cut in 40 dims"):
        check_tiling(shape, np.zeros((2, 40), dtype=np.int64), np.ones((2, 40), dtype=np.int64))
    with pytest.raises(LimitExceeded, match="2\\^62"):
        check_tiling((2**32, 2**32), np.zeros((1, 2), dtype=np.int64), np.full((1, 2), 2**32))

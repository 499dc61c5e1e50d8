"""The algebra of regions, against brute force on small masks."""

from __future__ import annotations

import itertools
import math
from functools import cache
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from anyshard.errors import LimitExceeded
from anyshard.records import regions
from anyshard.records.regions import decompose_run, dense_strides, difference, find_overlaps, flat_span, overlap, volume

Columns = tuple[NDArray[np.int64], NDArray[np.int64]]
SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def shape_and_regions(draw: st.DrawFn, *, min_length: int = 0, max_regions: int = 6) -> tuple[tuple[int, ...], Columns]:
    """A small shape and some regions within it, overlapping or not, empty or not."""
    shape = draw(SHAPES)
    count = draw(st.integers(0, max_regions))
    spans = [[_draw_span(draw, length, min_length) for length in shape] for _ in range(count)]
    columns = np.array(spans, dtype=np.int64).reshape(count, len(shape), 2)
    return shape, (columns[..., 0], columns[..., 1])


def _draw_span(draw: st.DrawFn, length: int, min_length: int) -> tuple[int, int]:
    start = draw(st.integers(0, length - min_length))
    return start, draw(st.integers(min_length, length - start))


def mask_of(shape: tuple[int, ...], offset: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where the region is."""
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))] = True
    return mask


@given(SHAPES, st.data())
def test_decomposition_is_the_run_in_flat_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The regions' elements, one region after the other, are the run's elements in order."""
    stop = data.draw(st.integers(0, math.prod(shape)))
    start = data.draw(st.integers(0, stop))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    cut = zip(*decompose_run(shape, start, stop), strict=True)
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(*region, strict=True))].reshape(-1) for region in cut]
    assert list(range(start, stop)) == np.concatenate([np.arange(0), *found]).tolist()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (4, 1), (1, 4), (2, 2, 2), (3, 2, 4), (2, 1, 3, 2), (2, 2, 2, 2)])
def test_decomposition_is_the_shortest(shape: tuple[int, ...]) -> None:
    """No cut of any run into regions that are runs themselves has fewer parts, and none has more than 2 * ndim - 1."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    boxes = (numbers[tuple(slice(*span) for span in box)].reshape(-1) for box in itertools.product(*spans))
    runs = {(int(box[0]), int(box[-1]) + 1) for box in boxes if len(box) == box[-1] - box[0] + 1}

    @cache
    def fewest(start: int, stop: int) -> int:
        if start == stop:
            return 0
        return 1 + min(fewest(middle, stop) for middle in range(start + 1, stop + 1) if (start, middle) in runs)

    for start, stop in itertools.combinations_with_replacement(range(numbers.size + 1), 2):
        count = len(decompose_run(shape, start, stop)[0])
        assert fewest(start, stop) == count
        assert count <= max(2 * len(shape) - 1, 1)


def test_decomposition_example() -> None:
    """A run across rows of a matrix is a tail, whole rows and a head."""
    offsets, lengths = decompose_run((4, 5), 3, 17)
    assert [[0, 3], [1, 0], [3, 0]] == offsets.tolist()
    assert [[1, 2], [2, 5], [1, 2]] == lengths.tolist()


@pytest.mark.parametrize(
    ("shape", "start", "stop"), [((2, 3), -1, 2), ((2, 3), 4, 3), ((2, 3), 0, 7), ((), 0, 2), ((0, 3), 0, 1)]
)
def test_runs_outside_are_refused(shape: tuple[int, ...], start: int, stop: int) -> None:
    """A run that the tensor does not hold is an error that names both."""
    with pytest.raises(ValueError, match="expected a run within the"):
        decompose_run(shape, start, stop)


def test_negative_dims_are_refused() -> None:
    """A negative dim is an error, even where two of them give a positive product."""
    with pytest.raises(ValueError, match="expected dims of 0 or more"):
        decompose_run((-2, -3), 0, 1)


@given(shape_and_regions())
def test_volume_counts_elements(case: tuple[tuple[int, ...], Columns]) -> None:
    """A volume is the number of elements."""
    shape, (offsets, lengths) = case
    assert [int(mask_of(shape, *region).sum()) for region in zip(offsets, lengths, strict=True)] == volume(lengths).tolist()


@pytest.mark.parametrize("lengths", [(2**32, 2**32), (2**62,), (2**31, 2**31), (3,) * 40, (1,) * 65])
def test_volume_refuses_to_wrap(lengths: tuple[int, ...]) -> None:
    """A count of 2^62 or more, and more than 64 dims, is an error and never a small number."""
    with pytest.raises(LimitExceeded, match="expected"):
        volume(np.array([lengths], dtype=np.int64))


@pytest.mark.parametrize(
    ("lengths", "expected"), [((2**61, 1), 2**61), ((2**62 - 1,), 2**62 - 1), ((2**40, 2**40, 0), 0), ((), 1)]
)
def test_volume_is_exact_up_to_the_limit(lengths: tuple[int, ...], expected: int) -> None:
    """Counts just below the limit are exact, and a zero dim makes any shape empty."""
    assert [expected] == volume(np.array([lengths], dtype=np.int64)).tolist()


def test_volume_refuses_negative_lengths() -> None:
    """A negative length is an error."""
    with pytest.raises(ValueError, match="found -1"):
        volume(np.array([[-1, -1]]))


@given(shape_and_regions(), st.data())
def test_overlap_is_the_common_part(case: tuple[tuple[int, ...], Columns], data: st.DataObject) -> None:
    """Row by row with broadcasting, the overlap holds the elements that both regions hold."""
    shape, (offsets, lengths) = case
    one = [_draw_span(data.draw, length, 0) for length in shape]
    offset, length = (np.array([span[side] for span in one], dtype=np.int64) for side in (0, 1))
    found_offsets, found_lengths, is_any = overlap(offset, length, offsets, lengths)
    for row in range(len(offsets)):
        common = mask_of(shape, offset, length) & mask_of(shape, offsets[row], lengths[row])
        assert bool(common.any()) == bool(is_any[row])
        assert not is_any[row] or np.array_equal(common, mask_of(shape, found_offsets[row], found_lengths[row]))


@given(shape_and_regions(min_length=1))
def test_flat_span_of_regions(case: tuple[tuple[int, ...], Columns]) -> None:
    """The span runs from first to last element, and is dense if the region is all of it."""
    shape, (offsets, lengths) = case
    shapes = np.tile(np.array(shape, dtype=np.int64), (len(offsets), 1))
    start, stop, is_dense = flat_span(shapes, offsets, lengths)
    for row in range(len(offsets)):
        flat = np.flatnonzero(mask_of(shape, offsets[row], lengths[row]))
        assert (flat[0], flat[-1] + 1, len(flat) == flat[-1] + 1 - flat[0]) == (start[row], stop[row], is_dense[row])


def test_dense_strides() -> None:
    """Strides count elements, also of padded and dimensionless rows."""
    assert [[12, 4, 1], [1, 1, 1]] == dense_strides(np.array([[2, 3, 4], [5, 1, 1]])).tolist()
    assert (2, 0) == dense_strides(np.ones((2, 0), dtype=np.int64)).shape


@given(shape_and_regions(), st.data())
def test_difference_is_disjoint_and_exact(case: tuple[tuple[int, ...], Columns], data: st.DataObject) -> None:
    """What is left are disjoint, non-empty regions that hold each remaining element once."""
    shape, (offsets, lengths) = case
    one = [_draw_span(data.draw, length, 0) for length in shape]
    offset, length = (np.array([span[side] for span in one], dtype=np.int64) for side in (0, 1))
    expected = mask_of(shape, offset, length).astype(int)
    for region in zip(offsets, lengths, strict=True):
        expected *= ~mask_of(shape, *region)
    left = list(zip(*difference(offset, length, offsets, lengths), strict=True))
    assert np.array_equal(expected, sum((mask_of(shape, *region).astype(int) for region in left), np.zeros(shape, int)))
    assert all(mask_of(shape, *region).any() for region in left)


@given(shape_and_regions(), st.data())
def test_find_overlaps_finds_all_pairs(case: tuple[tuple[int, ...], Columns], data: st.DataObject) -> None:
    """Exactly the pairs that share an element are found, each once and in order."""
    shape, (a_offsets, a_lengths) = case
    count = data.draw(st.integers(0, 6))
    spans = [[_draw_span(data.draw, length, 0) for length in shape] for _ in range(count)]
    columns = np.array(spans, dtype=np.int64).reshape(count, len(shape), 2)
    b_offsets, b_lengths = columns[..., 0], columns[..., 1]
    _, _, hit = overlap(a_offsets[:, None], a_lengths[:, None], b_offsets[None], b_lengths[None])
    # Few rows are compared one by one; with 0 they are joined dim by dim as many rows are.
    with mock.patch.object(regions, "_PAIRS_PER_ENTRY", data.draw(st.sampled_from([0, 8]))):
        found = find_overlaps(a_offsets, a_lengths, b_offsets, b_lengths)
    assert np.argwhere(hit).tolist() == np.stack(found, axis=1).tolist()


def grid(shape: tuple[int, int], cuts: tuple[int, int]) -> Columns:
    """Regions of a matrix that is cut in `cuts` parts per dim."""
    borders = [np.linspace(0, length, parts + 1).astype(np.int64) for length, parts in zip(shape, cuts, strict=True)]
    offsets = np.stack(np.meshgrid(*(b[:-1] for b in borders), indexing="ij"), axis=-1).reshape(-1, 2)
    lengths = np.stack(np.meshgrid(*(np.diff(b) for b in borders), indexing="ij"), axis=-1).reshape(-1, 2)
    return offsets, lengths


@pytest.mark.timeout(30)
def test_find_overlaps_of_large_grids() -> None:
    """Two grids of 50,000 regions are matched by work that grows with the pairs found, not with the square."""
    a, b = grid((10_000, 10_000), (250, 200)), grid((10_000, 10_000), (200, 250))
    found = find_overlaps(*a, *b)
    # Along each dim 200 and 250 equal parts share 50 borders, so 400 pieces begin at distinct places.
    assert 400 * 400 == len(found[0])
    _, _, is_any = overlap(a[0][found[0]], a[1][found[0]], b[0][found[1]], b[1][found[1]])
    assert is_any.all()

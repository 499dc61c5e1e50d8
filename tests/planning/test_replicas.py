"""Replicas: equal regions on several ranks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from anyshard.errors import InvalidAppState, LimitExceeded
from anyshard.planning.replicas import find_replicas
from anyshard.planning.unite import unite
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.tables import make_tensor_table, whole_shards
from tests.planning.groups import Holding, groups, make_group

MATRIX = make_tensor_table(["a/w"], ["uint8"], [(4, 4)], {})


def hold_matrix(*holdings: list[tuple[tuple[int, int], tuple[int, int]]]) -> list[RankTable]:
    """Ranks that hold these regions of a 4 x 4 matrix."""
    return make_group(MATRIX, [[(0, region) for region in held] for held in holdings])


TOP, BOTTOM, LEFT, WHOLE = ((0, 0), (2, 4)), ((2, 0), (2, 4)), ((0, 0), (4, 2)), ((0, 0), (4, 4))


def test_equal_regions_are_one_with_all_that_hold_it() -> None:
    """Regions come in index order with table and row of each holder; those held by the same ranks have one set."""
    tensors = make_tensor_table(["a/v", "a/w"], ["uint8"] * 2, [(6,), (4, 4)], {})
    held: list[list[Holding]] = [[(1, TOP), (0, ((0,), (6,)))], [(1, BOTTOM)], [(0, ((0,), (6,))), (1, TOP), (1, BOTTOM)]]
    replicas = find_replicas(unite(make_group(tensors, held)))
    assert [0, 1, 1] == replicas.regions.tensor.tolist()
    assert [[0, 0], [0, 0], [2, 0]] == replicas.regions.offsets.tolist()
    assert [0, 2, 4, 6] == replicas.first.tolist()
    assert ([0, 2, 0, 2, 1, 2], [1, 0, 0, 1, 0, 2]) == (replicas.table.tolist(), replicas.row.tolist())
    assert replicas.set_of[0] == replicas.set_of[1] != replicas.set_of[2]


@pytest.mark.slow
@given(groups())
def test_sets_are_equal_exactly_if_their_holders_are(tables: list[RankTable]) -> None:
    """The number of a region's set says who holds it, no more and no less."""
    replicas = find_replicas(unite(tables))
    holders = [tuple(replicas.tables_of(region).tolist()) for region in range(len(replicas.regions))]
    pairs = set(zip(holders, replicas.set_of.tolist(), strict=True))
    assert len(pairs) == len({holder for holder, _ in pairs}) == len({number for _, number in pairs})


def test_a_tensor_on_one_rank_that_is_two_on_another_is_refused() -> None:
    """Nobody can tell which of two tensors to store for a name that ties them elsewhere."""
    tied = make_tensor_table(["a/head", "a/tok"], ["uint8"] * 2, [(4,)] * 2, {"a/tok": "a/head"})
    loose = make_tensor_table(["a/head", "a/tok"], ["uint8"] * 2, [(4,)] * 2, {})
    tables = [make_rank_table(whole_shards(tensors), ("a",)) for tensors in (tied, loose)]
    with pytest.raises(InvalidAppState, match=r"a/head and a/tok: expected them to be one .* found two on rank 1"):
        find_replicas(unite(tables))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (hold_matrix([TOP], [WHOLE]), "regions that overlap, \\(2, 4\\) at \\(0, 0\\) on rank 0 and \\(4, 4\\) at .* on rank 1"),
        (hold_matrix([TOP], [LEFT], [BOTTOM]), "regions that overlap, \\(2, 4\\) at \\(0, 0\\) on rank 0 and .* on rank 1"),
        (
            hold_matrix([TOP, BOTTOM], [((1, 0), (2, 4))]),
            "overlap at \\(1, 0\\) of lengths \\(1, 4\\) \\(\\(2, 4\\) at \\(0, 0\\) on rank 0 and .* at \\(1, 0\\) on rank 1",
        ),
        (hold_matrix([TOP], [TOP]), "hole at \\(2, 0\\) of lengths \\(2, 4\\) \\(it is known to ranks 0, 1\\)"),
        (hold_matrix([((0, 0), (0, 4))], []), "hole at \\(0, 0\\) of lengths \\(4, 4\\)"),
        (hold_matrix([WHOLE], [((3, 0), (2, 4))]), "a region outside of it, \\(2, 4\\) at \\(3, 0\\) on rank 1"),
        (hold_matrix([WHOLE], [((-1, 0), (1, 4))]), "a region outside of it, \\(1, 4\\) at \\(-1, 0\\) on rank 1"),
    ],
)
def test_regions_must_tile_the_tensor(tables: list[RankTable], message: str) -> None:
    """Overlaps of unequal regions, holes and regions outside are named with address, regions and ranks."""
    with pytest.raises(InvalidAppState, match=f"a/w \\(4, 4\\): expected regions .*{message}.*Nothing was written"):
        find_replicas(unite(tables))


def test_too_many_elements_are_refused() -> None:
    """The places of elements on one line cannot wrap."""
    tensors = make_tensor_table([f"a/{i}" for i in range(8)], ["int8"] * 8, [(1 << 57,)] * 8, {})
    with pytest.raises(LimitExceeded, match="fewer than 2\\^58 elements in all"):
        find_replicas(unite([make_rank_table(whole_shards(tensors), ("a",))]))


def test_nothing_held_is_nothing() -> None:
    """Ranks without a single tensor have no regions."""
    empty = make_tensor_table([], [], [], {})
    replicas = find_replicas(unite([make_rank_table(whole_shards(empty), ())]))
    assert (0, [0]) == (len(replicas.regions), replicas.first.tolist())
    assert np.int64 == replicas.set_of.dtype

"""Replica sets in plans: every rank knows which of its rows others hold too, under one name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from anyshard.planning.group_plan import plan_group
from anyshard.planning.rank_plan import RankPlan
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.tables import make_tensor_table, whole_shards
from tests.planning.groups import Holding, groups, hand_out, make_group, make_wide_tensors, replicate, shard_rows

NO_LIMIT = 1 << 40


def plan_sets(tables: list[RankTable]) -> list[list[int]]:
    """The sets of all rows of all ranks, as the ranks get them."""
    return [part.replica_set.tolist() for part in plan_parts(tables)]


def plan_parts(tables: list[RankTable]) -> list[RankPlan]:
    """The plans of all ranks, as they get them."""
    return hand_out(plan_group(tables, max_blob_nbytes=NO_LIMIT), tables)


def test_ranks_that_hold_everything_are_one_set() -> None:
    """DDP: all rows with elements are in one set of all ranks, rows without elements in none."""
    tables = replicate(make_wide_tensors([(4,), (0,), ()]), 3)
    plan = plan_group(tables, max_blob_nbytes=NO_LIMIT)
    assert ([[0, -1, 0]] * 3, [3]) == ([plan.replica_sets(rank).tolist() for rank in range(3)], plan.num_holders.tolist())


def test_shards_on_several_ranks_are_a_set_each() -> None:
    """HSDP: the ranks that hold the same shards are a set, the others another."""
    plan = plan_group(shard_rows(make_wide_tensors([(4, 2), (8,)]), 2, 2), max_blob_nbytes=NO_LIMIT)
    assert [[0, 0], [1, 1], [0, 0], [1, 1]] == [plan.replica_sets(rank).tolist() for rank in range(4)]
    assert [2, 2] == plan.num_holders.tolist()


def test_what_one_rank_holds_is_in_no_set() -> None:
    """TP: halves of a weight are nobody else's, the norm beside them is everybody's."""
    tensors = make_tensor_table(["a/norm", "a/w"], ["float32"] * 2, [(4,), (4, 2)], {})
    halves: list[list[Holding]] = [[(0, ((0,), (4,))), (1, ((2 * rank, 0), (2, 2)))] for rank in range(2)]
    assert [[2, -1], [2, -1]] == plan_sets(make_group(tensors, halves))


def test_stages_share_what_both_have() -> None:
    """PP: the rows of a stage are its own; an embedding on the first and the last is a set of these two."""
    tensors = make_tensor_table(["a/emb", "a/l0", "a/l1", "a/l2"], ["float32"] * 4, [(4,)] * 4, {})
    held: list[list[Holding]] = [[(t, ((0,), (4,))) for t in stage] for stage in ([0, 1], [2], [3, 0])]
    assert [[3, -1], [-1], [-1, 3]] == plan_sets(make_group(tensors, held))


def test_one_rank_is_in_no_set() -> None:
    """A group of one has no replicas."""
    assert [[-1, -1]] == plan_sets(replicate(make_wide_tensors([(4,), (2,)]), 1))


@pytest.mark.slow
@given(groups())
def test_equal_numbers_mean_equal_holders(tables: list[RankTable]) -> None:
    """Two rows on any ranks have the same number exactly if the same ranks, two or more of them, hold their regions."""
    holders: dict[object, list[int]] = {}
    rows = []
    plan = plan_group(tables, max_blob_nbytes=NO_LIMIT)
    for rank, part in enumerate(hand_out(plan, tables)):
        shards = part.held.shards
        for row, number in enumerate(part.replica_set.tolist()):
            region = int(shards.tensor[row]), shards.region(row)
            is_full = all(shards.region(row)[1])
            holders.setdefault(region, []).append(rank)
            rows.append((region, number, is_full))
    pairs = {(number, tuple(holders[region]) if is_full and len(holders[region]) > 1 else ()) for region, number, is_full in rows}
    assert len(pairs) == len({number for number, _ in pairs}) == len({ranks for _, ranks in pairs})
    assert all(len(ranks) == (plan.num_holders[number] if number >= 0 else 0) for number, ranks in pairs)


def test_a_rank_learns_what_others_know_of_its_rows() -> None:
    """A tensor that others tie or call a buffer has the same name and kind on all ranks, also where it is not written."""
    tied = make_tensor_table(["a/head", "a/tok"], ["uint8"] * 2, [(4,)] * 2, {"a/tok": "a/head"})
    loose = make_tensor_table(["a/tok"], ["uint8"], [(4,)], {})
    tables = [
        make_rank_table(whole_shards(tied), ("a",), buffers=frozenset({"a/head"})),
        make_rank_table(whole_shards(loose), ("a",)),
    ]
    for part in plan_parts(tables):
        shards = part.held.shards
        assert (["a/head"], [0]) == ([shards.tensors.addresses[t] for t in shards.tensor], part.replica_set.tolist())
        assert part.held.is_buffer[shards.tensor].all()


def test_the_sets_of_equal_tables_are_those_of_one() -> None:
    """Ranks whose tables are one object get what they would get with tables of their own."""
    tables = shard_rows(make_wide_tensors([(6,), (4, 2)]), 2, 3)
    shared = [tables[rank % 2] for rank in range(6)]
    for one, other in zip(plan_parts(tables), plan_parts(shared), strict=True):
        assert np.array_equal(one.replica_set, other.replica_set)

"""The plan of a process group: exact tables, the same as for one rank, every byte once, any layout to any layout."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.errors import InvalidAppState
from anyshard.planning import share as sharing
from anyshard.planning.cover import check_cover
from anyshard.planning.group_plan import NO_RANK, GroupPlan, plan_group
from anyshard.planning.match import match_shards
from anyshard.planning.pack import make_index, order_blobs, plan_save
from anyshard.planning.reads import plan_reads
from anyshard.records.load_plan import ReadLimits
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.tables import NO_BLOB, Index, ShardTable, TensorTable, make_tensor_table, whole_shards
from tests.planning.groups import SECTIONS, describe, groups, make_group, make_wide_tensors, replicate, shard_rows, write
from tests.planning.simulated import load, make_shards, part, partitions, tensor_tables

MIB = 1 << 20
NO_LIMIT = 1 << 40


def list_blobs(plan: GroupPlan) -> list[tuple[str, int, int]]:
    """Section, rank and k of all blobs."""
    columns = (plan.blobs.section, plan.blobs.rank, plan.blobs.k)
    return [(plan.sections[section], rank, k) for section, rank, k in zip(*(c.tolist() for c in columns), strict=True)]


def index_columns(index: Index) -> list[list[int]]:
    """All columns of an index as plain lists."""
    shards = index.shards
    return [column.tolist() for column in (shards.tensor, shards.offsets, shards.lengths, index.blob, index.slot)]


def test_replicas_are_shared_out() -> None:
    """Two replicas of three tensors: one is cut in two, an empty one has no writer, and every rank has a blob per section."""
    addresses, shapes = ["a/u", "a/v", "b/empty", "b/w"], [(4096, 1024), (4096, 1024), (0, 3), (4096, 1024)]
    tables = replicate(make_tensor_table(addresses, ["uint8"] * 4, shapes, {}), 2)
    plan = plan_group(tables, max_blob_nbytes=NO_LIMIT)
    assert [
        ("a/u", (0, 0), (4096, 1024), 0),
        ("a/v", (0, 0), (2048, 1024), 0),
        ("a/v", (2048, 0), (2048, 1024), 1),
        ("b/empty", (0, 0), (0, 3), NO_RANK),
        ("b/w", (0, 0), (4096, 1024), 1),
    ] == describe(plan)
    assert [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("b", 1, 0)] == list_blobs(plan)
    assert ([0, 0, 1, NO_BLOB, 3], [0, 1, 0, NO_BLOB, 0]) == (plan.index.blob.tolist(), plan.index.slot.tolist())
    assert ([0, 1, 1, -1, 3], [0, 0, 2 * MIB, 0, 0]) == (plan.local_row.tolist(), plan.start.tolist())
    assert [6 * MIB, 6 * MIB] == plan.count_bytes().tolist()


def test_sections_of_stages() -> None:
    """The coordinator has a blob in each section, other ranks in their own, and the rows that they write."""
    first = make_tensor_table(["m/a"], ["uint8"], [(4,)], {})
    second = make_tensor_table(["m/b", "o/b"], ["uint8"] * 2, [(4,), (2,)], {})
    tables = [
        make_rank_table(whole_shards(first), ("z", "m")),
        make_rank_table(whole_shards(second), ("o", "m")),
        make_rank_table(whole_shards(first), ("m", "y")),
    ]
    plan = plan_group(tables, max_blob_nbytes=NO_LIMIT)
    assert ("z", "m", "o", "y") == plan.sections
    expected = [("z", 0, 0), ("m", 0, 0), ("m", 1, 0), ("m", 2, 0), ("o", 0, 0), ("o", 1, 0), ("y", 0, 0), ("y", 2, 0)]
    assert expected == list_blobs(plan)
    assert [("m/a", (0,), (4,), 0), ("m/b", (0,), (4,), 1), ("o/b", (0,), (2,), 1)] == describe(plan)
    parts = plan.split()
    assert [("o", 0), ("m", 0)] == [(blob.section, blob.k) for blob in parts[1].plan.blobs][::-1]
    assert [["z", "m", "o", "y"], ["m", "o"], ["m", "y"]] == [[blob.section for blob in p.plan.blobs] for p in parts]


def test_a_tie_can_bring_a_rank_into_another_section() -> None:
    """A tensor is stored under its smallest name, also by a rank that does not know that name: it gets a blob there."""
    tied = make_tensor_table(["a/w", "b/w"], ["uint8"] * 2, [(2,)] * 2, {"b/w": "a/w"})
    tables = make_group(tied, [[(0, ((0,), (1,)))]])
    own = make_tensor_table(["b/w"], ["uint8"], [(2,)], {})
    tables.append(make_rank_table(make_shards(own, [(0, ((1,), (1,)))]), ("b",)))
    plan = plan_group(tables, max_blob_nbytes=NO_LIMIT)
    assert [("a/w", (0,), (1,), 0), ("a/w", (1,), (1,), 1)] == describe(plan)
    assert [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("b", 1, 0)] == list_blobs(plan)
    stored = write(plan, tables, cell_nbytes=64)
    assert stored.bits[0].tobytes() == bytes(stored.blobs[number][64] for number in (0, 1))


@given(tensor_tables(), st.integers(1, 2000))
def test_one_rank_is_planned_as_alone(tensors: TensorTable, max_blob_nbytes: int) -> None:
    """The plan of a group of one is the plan of a single process: same blobs, same index."""
    own = whole_shards(tensors)
    alone = plan_save(own, SECTIONS, rank=0, max_blob_nbytes=max_blob_nbytes)
    plan = plan_group([make_rank_table(own, SECTIONS)], max_blob_nbytes=max_blob_nbytes)
    assert index_columns(make_index([alone], tensors)) == index_columns(plan.index)
    assert [(blob.section, blob.rank, blob.k) for blob in order_blobs([alone])] == list_blobs(plan)


@settings(max_examples=70)
@given(groups(), st.integers(1, 2000), st.sampled_from([1, 64, MIB]))
def test_the_parts_of_a_plan_make_its_index(tables: list[RankTable], max_blob_nbytes: int, minimum: int) -> None:
    """What the ranks get says the same as the index, which holds every element once and blobs of bounded length."""
    with mock.patch.object(sharing, "MIN_SHARE_NBYTES", minimum):
        plan = plan_group(tables, max_blob_nbytes=max_blob_nbytes)
    plans = [part.plan for part in plan.split()]
    assert index_columns(make_index(plans, plan.tensors)) == index_columns(plan.index)
    assert list_blobs(plan) == [(blob.section, blob.rank, blob.k) for blob in order_blobs(plans)]
    assert () == check_cover(plan.index.shards)
    for rank, mine in enumerate(plans):
        alone = plan_save(mine.shards, SECTIONS, rank=rank, max_blob_nbytes=max_blob_nbytes)
        rows = [blob.rows.tolist() for blob in mine.blobs]
        assert [blob.rows.tolist() for blob in alone.blobs] == rows


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data(), groups())
def test_the_plan_depends_on_what_is_held_only(data: st.DataObject, tables: list[RankTable]) -> None:
    """The order of rows within a rank, and whether equal tables are one object, change nothing but the rows to read from."""
    shuffled = []
    for table in tables:
        shards = table.shards
        order = np.array(data.draw(st.permutations(range(len(shards)))), dtype=np.int64)
        rows = ShardTable(shards.tensors, shards.tensor[order], shards.offsets[order], shards.lengths[order])
        shuffled.append(replace(table, shards=rows))
    with mock.patch.object(sharing, "MIN_SHARE_NBYTES", 16):
        one, other = (plan_group(each, max_blob_nbytes=500) for each in (tables, shuffled))
    assert index_columns(one.index) == index_columns(other.index)
    assert (one.rank.tolist(), one.start.tolist()) == (other.rank.tolist(), other.start.tolist())
    for own, plan in ((tables, one), (shuffled, other)):
        check_local_rows(own, plan)


def check_local_rows(tables: list[RankTable], plan: GroupPlan) -> None:
    """Each row's bytes lie in the shard of its rank that it names."""
    for i in np.flatnonzero(plan.rank != NO_RANK).tolist():
        shards = tables[plan.rank[i]].shards
        assert shards.tensors.addresses[shards.tensor[plan.local_row[i]]] == plan.tensors.addresses[plan.index.shards.tensor[i]]
        (offsets, lengths), (outer, outer_lengths) = plan.index.shards.region(i), shards.region(int(plan.local_row[i]))
        assert all(o <= p and p + n <= o + m for o, p, n, m in zip(outer, offsets, lengths, outer_lengths, strict=True))


def test_replicas_may_be_one_object() -> None:
    """Ranks whose tables are one object are planned as if each had its own."""
    tensors = make_wide_tensors([(300, 4096), (5, 7), (0,), (1000, 4096)])
    tables = replicate(tensors, 5)
    one, other = (plan_group(each, max_blob_nbytes=NO_LIMIT) for each in (tables, tables[:1] * 5))
    assert index_columns(one.index) == index_columns(other.index)
    assert [one.rank.tolist(), one.local_row.tolist()] == [other.rank.tolist(), other.local_row.tolist()]


@pytest.mark.slow
@settings(max_examples=80)
@given(st.data(), groups(), st.sampled_from([1, 16, MIB]), st.sampled_from([200, 4096, NO_LIMIT]))
def test_any_layout_to_any_layout(data: st.DataObject, tables: list[RankTable], minimum: int, max_blob_nbytes: int) -> None:
    """Ranks write from their own shards what they were handed; ranks of any other layout get back all bits of theirs."""
    with mock.patch.multiple(sharing, MIN_SHARE_NBYTES=minimum, _TOLERANCE=4):
        plan = plan_group(tables, max_blob_nbytes=max_blob_nbytes)
    stored = write(plan, tables, cell_nbytes=64)
    num_ranks = data.draw(st.integers(1, 4))
    held: list[list[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]] = [[] for _ in range(num_ranks)]
    for tensor in range(len(stored.tensors)):
        for region in data.draw(partitions(stored.tensors.shape(tensor))):
            for rank in data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                held[rank].append((tensor, region))
    for own in held:
        wanted = make_shards(stored.tensors, own)
        reads = plan_reads(match_shards(wanted, stored.index), stored.layouts, limits=ReadLimits(1024, 64))
        assert () == reads.uncovered
        found, writes = load(stored, wanted, reads, is_strided=data.draw(st.booleans()))
        for row, (got, count) in enumerate(zip(found, writes, strict=True)):
            assert part(stored.bits[wanted.tensor[row]], wanted.region(row)).tobytes() == got.tobytes()
            assert (count == 1).all()


def test_sections_are_cut_into_blobs() -> None:
    """A rank's share of a section goes on in the next blob where the extents would pass the limit."""
    tables = shard_rows(make_wide_tensors([(8, 16)] * 3, dtype="uint8"), 2, 1)
    plan = plan_group(tables, max_blob_nbytes=200)
    assert [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("a", 1, 1), ("b", 0, 0), ("b", 1, 0)] == list_blobs(plan)
    assert ([0, 2, 0, 2, 1, 3], [0, 0, 1, 1, 0, 0]) == (plan.index.blob.tolist(), plan.index.slot.tolist())


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    """No plan is made of tables that differ in a shape or leave a hole."""
    tables = shard_rows(make_wide_tensors([(8, 2)]), 2, 1)
    with pytest.raises(InvalidAppState, match="a/t00 \\(8, 2\\): .* hole at \\(4, 0\\)"):
        plan_group([tables[0], tables[0]], max_blob_nbytes=NO_LIMIT)
    with pytest.raises(InvalidAppState, match="a/t00: float32 \\(8, 2\\) on ranks 0, 1, float32 \\(4, 2\\) on rank 2"):
        plan_group([*tables, *replicate(make_wide_tensors([(4, 2)]), 1)], max_blob_nbytes=NO_LIMIT)


def test_nothing_to_save_is_a_plan() -> None:
    """Ranks without tensors, or with empty and 0-d ones only, get their blobs for values."""
    empty = make_tensor_table([], [], [], {})
    plan = plan_group([make_rank_table(whole_shards(empty), ("x",))] * 2, max_blob_nbytes=NO_LIMIT)
    assert (0, [("x", 0, 0), ("x", 1, 0)]) == (len(plan.rank), list_blobs(plan))
    scalars = make_tensor_table(["a/e", "a/s"], ["int64"] * 2, [(0,), ()], {})
    plan = plan_group(replicate(scalars, 2), max_blob_nbytes=NO_LIMIT)
    assert [("a/e", (0,), (0,), NO_RANK), ("a/s", (), (), 0)] == describe(plan)


@pytest.mark.slow
def test_thousands_of_replicas_have_few_rows() -> None:
    """4,096 ranks that each send their own table of 1,000 tensors: no more rows than tensors and ranks, evenly shared."""
    rng = np.random.default_rng(0)
    shapes = [(int(rows), int(columns)) for rows, columns in rng.integers(500, 4000, (1000, 2))]
    first, second = (make_rank_table(whole_shards(make_wide_tensors(shapes)), SECTIONS) for _ in range(2))
    tables = [replace(table) for table in [first, second] * 2048]
    plan = plan_group(tables, max_blob_nbytes=NO_LIMIT)
    assert len(plan.rank) <= 1000 + 4096
    loads = plan.count_bytes()
    assert loads.max() <= 1.05 * loads.mean()

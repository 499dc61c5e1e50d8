"""Sharing: even work over replicas, few pieces, rows kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.planning import share as sharing
from anyshard.planning.group_plan import plan_group
from anyshard.planning.replicas import find_replicas
from anyshard.planning.share import Pieces, level_out, share
from anyshard.planning.unite import unite
from anyshard.records.rank_table import RankTable
from anyshard.records.tables import make_tensor_table
from tests.planning.groups import groups, make_group, make_wide_tensors, replicate, shard_rows

KIB, MIB = 1 << 10, 1 << 20


def list_pieces(tables: Sequence[RankTable]) -> list[tuple[int, int, int, int]]:
    """Region, rank, first row and rows of each piece."""
    united = unite(tables)
    pieces = share(united, find_replicas(united))
    columns = (pieces.region, pieces.rank, pieces.start, pieces.count)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def list_loads(tables: Sequence[RankTable]) -> list[int]:
    """Bytes that each rank writes."""
    return plan_group(tables, max_blob_nbytes=1 << 40).count_bytes().tolist()


@pytest.mark.parametrize(
    ("loads", "total", "shares"),
    [
        ([0, 0, 0, 0], 8, [2, 2, 2, 2]),
        ([5, 0, 1], 3, [0, 2, 1]),
        ([5, 0, 1], 12, [1, 6, 5]),
        ([0, 9, 0], 4, [2, 0, 2]),
        ([7], 3, [3]),
        ([0, 0], 1, [1, 0]),
    ],
)
def test_shares_lift_the_least_loaded_to_one_level(loads: list[int], total: int, shares: list[int]) -> None:
    """Shares in MiB fill up from the lowest load, first ranks first."""
    assert [share * MIB for share in shares] == level_out(np.array(loads) * MIB, total * MIB).tolist()


def test_no_share_is_below_the_minimum() -> None:
    """What is less than 1 MiB for each goes to fewer ranks, down to one; a rank that lacks little is left out."""
    assert [5 * MIB // 4] * 2 + [0] == level_out(np.zeros(3, dtype=np.int64), 5 * MIB // 2).tolist()
    assert [MIB + 1, MIB + 1, MIB] == level_out(np.zeros(3, dtype=np.int64), 3 * MIB + 2).tolist()
    assert [KIB, 0, 0] == level_out(np.zeros(3, dtype=np.int64), KIB).tolist()
    assert [3 * MIB, 0] == level_out(np.array([0, 3 * MIB - KIB]), 3 * MIB).tolist()


def test_a_tensor_is_cut_at_rows() -> None:
    """Borders move to the nearest row: 10 rows over 4 ranks are 3, 2, 3, 2."""
    tables = replicate(make_wide_tensors([(1, 10, MIB)], dtype="uint8"), 4)
    assert [(0, 0, 0, 3), (0, 1, 3, 2), (0, 2, 5, 3), (0, 3, 8, 2)] == list_pieces(tables)


def test_tensors_lie_end_to_end() -> None:
    """A border may fall within any tensor: three of 4 MiB over two ranks are cut once, in the middle of the second."""
    tables = replicate(make_wide_tensors([(4096,)] * 3, dtype="uint8"), 2)
    assert [(0, 0, 0, 4096), (1, 0, 0, 4096), (2, 0, 0, 4096)] == list_pieces(tables)
    tables = replicate(make_wide_tensors([(4096, KIB)] * 3, dtype="uint8"), 2)
    assert [(0, 0, 0, 4096), (1, 0, 0, 2048), (1, 1, 2048, 2048), (2, 1, 0, 4096)] == list_pieces(tables)


def test_borders_near_the_end_of_a_tensor_move_there() -> None:
    """No sliver is cut off: a border less than 1/64 of a share from the next tensor is put between the two."""
    tables = replicate(make_wide_tensors([(8000, KIB), (8192 + 192, KIB)], dtype="uint8"), 2)
    assert [(0, 0, 0, 8192), (1, 1, 0, 8192)] == list_pieces(replicate(make_wide_tensors([(8192, KIB)] * 2, dtype="uint8"), 2))
    assert [(0, 0, 0, 8000), (1, 0, 0, 192), (1, 1, 192, 8192)] == list_pieces(tables)
    tables = replicate(make_wide_tensors([(8100, KIB), (8284, KIB)], dtype="uint8"), 2)
    assert [(0, 0, 0, 8100), (1, 1, 0, 8284)] == list_pieces(tables)


def test_small_tensors_stay_whole() -> None:
    """Tensors below 1/64 of a share are not cut, and come in the order of their addresses; the others may be."""
    tables = replicate(make_wide_tensors([(31, KIB)] * 99, dtype="uint8"), 2)
    assert [(i, int(i > 49), 0, 31) for i in range(99)] == list_pieces(tables)
    tables = replicate(make_wide_tensors([(900, KIB)] * 3, dtype="uint8"), 2)
    assert [(0, 0, 0, 900), (1, 0, 0, 450), (1, 1, 450, 450), (2, 1, 0, 900)] == list_pieces(tables)


def test_coarse_tensors_go_first_and_fine_ones_even_them_out() -> None:
    """Experts of 8 MiB cannot be cut evenly over two ranks; the rows of another tensor make up for it."""
    tables = replicate(make_wide_tensors([(3, 8 * KIB, KIB), (16 * KIB, KIB)], dtype="uint8"), 2)
    assert [(0, 0, 0, 2), (0, 1, 2, 1), (1, 0, 0, 4096), (1, 1, 4096, 12288)] == list_pieces(tables)
    assert [20 * MIB] * 2 == list_loads(tables)


def test_replicated_tensors_even_out_what_is_sharded_unevenly() -> None:
    """Nine rows over four ranks leave the last one without; it writes more of what all hold."""
    tensors = make_wide_tensors([(9, MIB), (15 * KIB, KIB)], dtype="uint8")
    chunks = [(0, 3), (3, 3), (6, 3), (9, 0)]
    tables = make_group(tensors, [[(0, ((o, 0), (n, MIB))), (1, ((0, 0), (15 * KIB, KIB)))] for o, n in chunks])
    assert [6 * MIB] * 4 == list_loads(tables)


def test_buffers_are_written_by_the_first_rank_that_holds_them() -> None:
    """A buffer may differ between replicas, so it is never a patchwork of several."""
    tensors = make_tensor_table(["a/buffer", "a/w"], ["uint8"] * 2, [(64 * KIB, 100), (64 * KIB, 100)], {})
    whole = ((0, 0), (64 * KIB, 100))
    tables = make_group(tensors, [[(1, whole)], [(0, whole), (1, whole)], [(0, whole)]], buffers=frozenset({"a/buffer"}))
    assert [(0, 1, 0, 64 * KIB), (1, 0, 0, 64 * KIB)] == list_pieces(tables)


ODD = [(1031, 1021), (517, 1999), (2053, 511), (997,), (999, 1001, 3), (7, 101, 13), (4099, 257), (3001, 331)]


@pytest.mark.parametrize(
    ("name", "tables", "num_regions"),
    [
        ("DDP 4", replicate(make_wide_tensors(ODD), 4), 8),
        ("HSDP 2x2", shard_rows(make_wide_tensors(ODD), 2, 2), 16),
        ("FSDP 4", shard_rows(make_wide_tensors(ODD), 4, 1), 32),
        ("DDP 4, bf16", replicate(make_wide_tensors(ODD, dtype="bfloat16"), 4), 8),
    ],
)
def test_ranks_write_equally_much(name: str, tables: list[RankTable], num_regions: int) -> None:
    """No rank writes 5 % more than the mean, with no more rows than regions and ranks."""
    loads = list_loads(tables)
    assert max(loads) <= 1.05 * np.mean(loads), name
    pieces = list_pieces(tables)
    assert num_regions == len({piece[0] for piece in pieces})
    assert len(pieces) <= num_regions + len(tables)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(512, 2048), st.integers(512, 2048)), min_size=1, max_size=8),
    st.lists(st.integers(1, 300 * KIB), max_size=12),
    st.sampled_from([(1, 2), (1, 4), (2, 2), (2, 3), (1, 6)]),
)
def test_any_large_tensors_are_shared_evenly(fine: list[tuple[int, int]], small: list[int], mesh: tuple[int, int]) -> None:
    """Matrices of enough bytes and any small tensors beside them: largest <= 1.05 x mean of the ranks of a replica set."""
    num_shards, num_replicas = mesh
    shapes = [*fine, *((n,) for n in small)]
    repeats = num_shards * num_replicas * 8  # 1 MiB at least: 8 MiB for each rank
    tables = shard_rows(make_wide_tensors(shapes + fine[:1] * repeats), num_shards, num_replicas)
    loads = np.array(list_loads(tables)).reshape(num_replicas, num_shards)
    assert (loads.max(axis=0) <= 1.05 * loads.mean(axis=0)).all()
    num_regions = len(find_replicas(unite(tables)).regions)
    assert len(list_pieces(tables)) <= num_regions + len(tables)


@settings(max_examples=60)
@given(groups(), st.sampled_from([1, 16, 200, MIB]), st.sampled_from([1, 4, 64]))
def test_every_row_of_every_region_has_one_writer(tables: list[RankTable], minimum: int, tolerance: int) -> None:
    """Pieces of a region follow each other without gap, by ranks that hold it, with few cuts."""
    united = unite(tables)
    replicas = find_replicas(united)
    with mock.patch.multiple(sharing, MIN_SHARE_NBYTES=minimum, _TOLERANCE=tolerance):
        pieces = share(united, replicas)
    check_pieces(pieces, replicas.regions.lengths)
    for region, rank in zip(pieces.region, pieces.rank, strict=True):
        assert rank in united.ranks_of(replicas.tables_of(int(region)))
    num_lanes = 2 * len(np.unique(replicas.set_of))
    assert len(pieces.region) <= len(replicas.regions) + num_lanes * (len(tables) - 1)


def check_pieces(pieces: Pieces, lengths: np.ndarray) -> None:
    """The pieces are all rows of all regions, in order, each once."""
    assert list(range(len(lengths))) == sorted(set(pieces.region.tolist()))
    for region, length in enumerate(lengths):
        own = pieces.region == region
        start, count = pieces.start[own], pieces.count[own]
        num_rows = next((n for n in length.tolist() if n > 1), 1)
        assert [0, *(start + count).tolist()] == [*start.tolist(), num_rows]
        assert (count > 0).all()

"""The plan of one rank as a message: whole round trips, small messages, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.errors import AnyshardError, UnsupportedFormat
from anyshard.planning import share as sharing
from anyshard.planning.group_plan import plan_group
from anyshard.planning.rank_plan import RankPlan, decode_rank_plan, encode_rank_plan
from anyshard.records.handles import ArraySource, RangeSource
from anyshard.records.packed import pack_ints, pack_message, unpack_message
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.tables import make_tensor_table, whole_shards
from tests.planning.groups import groups, make_wide_tensors, replicate


def list_rows(part: RankPlan) -> list[tuple[str, int, str, object]]:
    """Section, k, address and region of every slot."""
    shards = part.plan.shards
    return [
        (blob.section, blob.k, shards.tensors.addresses[shards.tensor[row]], shards.region(row))
        for blob in part.plan.blobs
        for row in blob.rows.tolist()
    ]


def list_held(part: RankPlan) -> list[tuple[str, object, bool]]:
    """Address and region of each of the rank's own rows, and whether it is a buffer."""
    shards, is_buffer = part.held.shards, part.held.is_buffer
    tensors = shards.tensor.tolist()
    return [(shards.tensors.addresses[t], shards.region(row), bool(is_buffer[t])) for row, t in enumerate(tensors)]


@settings(max_examples=50)
@given(groups(), st.integers(1, 2000))
def test_a_plan_comes_back_whole(tables: list[RankTable], max_blob_nbytes: int) -> None:
    """Every rank gets the slots, regions and byte ranges that the coordinator planned for it."""
    with mock.patch.multiple(sharing, MIN_SHARE_NBYTES=16, _TOLERANCE=4):
        parts = plan_group(tables, max_blob_nbytes=max_blob_nbytes).split()
    for rank, (own, part) in enumerate(zip(tables, parts, strict=True)):
        back = decode_rank_plan(encode_rank_plan(part, rank=rank), own)
        assert list_rows(part) == list_rows(back)
        assert [(blob.section, blob.rank, blob.k) for blob in part.plan.blobs] == [
            (blob.section, blob.rank, blob.k) for blob in back.plan.blobs
        ]
        for name in ("local_row", "start", "nbytes", "replica_set"):
            assert getattr(part, name).tolist() == getattr(back, name).tolist()
        assert list_held(part) == list_held(back)


def test_ties_of_other_ranks_come_with_the_plan() -> None:
    """A rank stores a tensor under the group's name and knows all names that are tied to it, also those it lacks."""
    first = make_tensor_table(["a/head", "a/tok", "a/y"], ["uint8"] * 3, [(4,), (4,), (9,)], {"a/tok": "a/head"})
    second = make_tensor_table(["a/tok", "a/x"], ["uint8"] * 2, [(4,), (3,)], {})
    tables = [make_rank_table(whole_shards(tensors), ("a",)) for tensors in (second, first)]
    part = plan_group(tables, max_blob_nbytes=999).split()[0]
    back = decode_rank_plan(encode_rank_plan(part, rank=0), tables[0])
    assert [("a", 0, "a/head", ((0,), (4,))), ("a", 0, "a/x", ((0,), (3,)))] == list_rows(back)
    assert [0, 1] == back.local_row.tolist()
    assert (("a/head", "a/tok", "a/x"), [-1, 0, -1]) == (
        back.plan.shards.tensors.addresses,
        back.plan.shards.tensors.alias_of.tolist(),
    )


def test_known_ties_need_no_new_table() -> None:
    """Where the group ties what the rank ties, the rank's own table is used as it is."""
    tensors = make_tensor_table(["a/head", "a/tok"], ["uint8"] * 2, [(4,)] * 2, {"a/tok": "a/head"})
    own = make_rank_table(whole_shards(tensors), ("a",))
    part = plan_group([own], max_blob_nbytes=999).split()[0]
    assert tensors is decode_rank_plan(encode_rank_plan(part, rank=0), own).plan.shards.tensors


def test_sources_are_whole_or_ranges() -> None:
    """A shard that a rank writes whole keeps its source; of one that is shared out it reads its bytes only."""
    tables = replicate(make_wide_tensors([(4096, 1024), (2048, 1024)], dtype="uint8"), 2)
    part = plan_group(tables, max_blob_nbytes=1 << 40).split()[1]
    bits = [np.zeros((4096, 1024), dtype=np.uint8), np.ones((2048, 1024), dtype=np.uint8)]
    bits[0][3072:] = 7
    sources = [ArraySource(array) for array in bits]
    picked = part.pick_sources(sources)
    assert isinstance(picked[0], RangeSource)
    assert sources[1] is picked[1]
    out = bytearray(picked[0].nbytes)
    picked[0].read_into(0, memoryview(out))
    assert bytes([7]) * (1024 * 1024) == bytes(out)


OWN = make_rank_table(whole_shards(make_tensor_table(["a/v", "a/w"], ["float32"] * 2, [(3,), (4, 2)], {})), ("a",))


def make_message(**changes: Any) -> bytes:
    """A plan over `OWN`: the last two rows of the matrix, then the vector."""
    fields: dict[str, Any] = {
        "rank": 1,
        "blobs": [("a", 0, 1), ("a", 1, 1)],
        "ties": {},
        "local_row": [1, 0],
        "start": [16, 0],
        "nbytes": [16, 12],
        "replica_set": [-1, 3],
        "is_buffer": [0, 1],
    }
    fields |= changes
    names = ("local_row", "start", "nbytes", "replica_set", "is_buffer")
    columns = [pack_ints(np.array(fields.pop(name), dtype=np.int64)) for name in names]
    return pack_message(msgspec.msgpack.encode([*fields.values(), *columns]))


def test_the_message_says_what_it_says() -> None:
    """The message that the refusals below are made from is a plan."""
    back = decode_rank_plan(make_message(), OWN)
    assert [("a", 0, "a/w", ((2, 0), (2, 2))), ("a", 1, "a/v", ((0,), (3,)))] == list_rows(back)
    assert ([-1, 3], [False, True]) == (back.replica_set.tolist(), back.held.is_buffer.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_row": [2, 0]}, "rows of a table of 2"),
        ({"local_row": [-1, 0]}, "rows of a table of 2"),
        ({"start": [24, 0]}, "parts of shards"),
        ({"start": [-8, 0]}, "parts of shards"),
        ({"nbytes": [0, 12]}, "parts of shards"),
        ({"nbytes": [(1 << 63) - 1, 12]}, "parts of shards"),
        ({"start": [4, 0]}, "whole rows"),
        ({"nbytes": [12, 12]}, "whole rows"),
        ({"blobs": [("a", 0, 3), ("a", 1, -1)]}, "blobs of 0 or more rows"),
        ({"blobs": [("a", 0, 1)]}, "expected 1 numbers"),
        ({"replica_set": [0]}, "expected 2 numbers"),
        ({"is_buffer": [0, 0, 0]}, "expected 2 numbers"),
        ({"ties": {"a/x": "a/y"}}, "ties to tensors of this rank"),
        ({"rank": "1"}, "a record Part"),
    ],
)
def test_plans_that_are_not_parts_of_shards_are_refused(changes: dict[str, Any], message: str) -> None:
    """Nothing that is handed out can make a rank read outside of its shards."""
    with pytest.raises(UnsupportedFormat, match=f"save plan of a rank: expected .*{message.removeprefix('expected ')}"):
        decode_rank_plan(make_message(**changes), OWN)


@given(st.data())
def test_damaged_plans_are_errors_of_ours_or_plans(data: st.DataObject) -> None:
    """Whatever byte changes, decoding ends in byte ranges within the rank's shards or an error of the package."""
    raw = bytearray(unpack_message(make_message(), what="x"))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = decode_rank_plan(pack_message(bytes(raw)), OWN)
    except AnyshardError:
        return
    for row, start, nbytes in zip(back.local_row, back.start, back.nbytes, strict=True):
        assert 0 <= start < start + nbytes <= (12, 32)[row]

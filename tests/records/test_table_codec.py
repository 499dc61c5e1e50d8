"""The table of a rank as messages: whole round trips, fingerprints, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from anyshard.errors import AnyshardError, LimitExceeded, UnsupportedFormat
from anyshard.records import packed
from anyshard.records.packed import pack_ints, pack_message, unpack_ints, unpack_message
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.table_codec import decode_tables, encode_table, fingerprint
from anyshard.records.tables import ShardTable, TensorTable, make_tensor_table, whole_shards
from tests.planning.simulated import make_shards, partitions, tensor_tables


def make_table(**changes: Any) -> RankTable:
    """A matrix in two regions with a tied name, a scalar buffer and an empty tensor, in two sections."""
    addresses = ["model/empty", "model/head", "model/tok", "stats/count"]
    shapes: list[tuple[int, ...]] = [(0, 3), (4, 6), (4, 6), ()]
    dtypes = ["float32", "bfloat16", "bfloat16", "int64"]
    tensors = make_tensor_table(addresses, dtypes, shapes, {"model/tok": "model/head"})
    shards = make_shards(tensors, [(0, ((0, 0), (0, 3))), (1, ((0, 0), (1, 6))), (1, ((2, 0), (2, 6))), (3, ((), ()))])
    table = make_rank_table(shards, ("stats", "model"), buffers=frozenset({"stats/count"}))
    return replace(table, **changes)


def round_trip(table: RankTable) -> RankTable:
    """The table as another rank gets it."""
    encoded = encode_table(table)
    return decode_tables([encoded.rows], [encoded.vocabulary])[0]


def assert_same(expected: RankTable, actual: RankTable) -> None:
    """Both tables are equal in every column."""
    assert expected.sections == actual.sections
    assert expected.is_buffer.tolist() == actual.is_buffer.tolist()
    ours, theirs = expected.shards.tensors, actual.shards.tensors
    assert (ours.addresses, ours.dtypes) == (theirs.addresses, theirs.dtypes)
    for name in ("ndims", "shapes", "alias_of"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    for name in ("tensor", "offsets", "lengths"):
        assert getattr(expected.shards, name).tolist() == getattr(actual.shards, name).tolist()
        assert np.int64 == getattr(actual.shards, name).dtype


def test_a_table_comes_back_whole() -> None:
    """Ties, buffers, scalars, empty tensors, several regions and the order of sections survive."""
    assert_same(make_table(), round_trip(make_table()))


@given(st.data(), tensor_tables())
def test_any_table_comes_back_whole(data: st.DataObject, tensors: TensorTable) -> None:
    """Whatever the regions and their order, the decoded table is equal."""
    regions = [(t, region) for t in range(len(tensors)) for region in data.draw(partitions(tensors.shape(t)))]
    table = make_rank_table(make_shards(tensors, data.draw(st.permutations(regions))), ("a", "b"))
    assert_same(table, round_trip(table))


def test_equal_messages_become_one_object() -> None:
    """Replicas share their table, and ranks with other regions of the same tensors share the vocabulary."""
    one, other = make_table(), make_table(shards=whole_shards(make_table().shards.tensors))
    encoded = [encode_table(table) for table in (one, other, make_table())]
    assert 1 == len({each.vocabulary for each in encoded}) == len({each.digest for each in encoded})
    first, second, third = decode_tables([each.rows for each in encoded], [encoded[0].vocabulary])
    assert first is third
    assert first is not second
    assert first.shards.tensors is second.shards.tensors


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], b"\1"), ([-128, 127], b"\1\x80\x7f"), ([128], b"\2\x80\0"), ([1 << 31], b"\x08\0\0\0\x80\0\0\0\0")],
)
def test_integers_take_the_narrowest_form(values: list[int], expected: bytes) -> None:
    """A column is one byte for the width, then little-endian numbers that are as short as the longest allows."""
    assert expected == pack_ints(np.array(values, dtype=np.int64))
    assert values == unpack_ints(expected, len(values), what="x").tolist()


@pytest.mark.parametrize("data", [b"", b"\1", b"\1\0\0", b"\3\0\0\0", b"\2\0"])
def test_integers_of_another_number_are_refused(data: bytes) -> None:
    """A column that is not exactly the announced numbers is not read."""
    with pytest.raises(UnsupportedFormat, match="x: expected 1 numbers, found"):
        unpack_ints(data, 1, what="x")


# Fingerprints ----------------------------------------------------------------------------------------------------------


def find_fingerprint(table: RankTable, *, world_size: int = 4, options: Mapping[str, int] | None = None) -> str:
    """A fingerprint with the usual context."""
    return fingerprint(table, world_size=world_size, options={"max_blob_nbytes": 9} if options is None else options)


def with_tensors(**changes: Any) -> RankTable:
    """The table with other columns of tensors."""
    table = make_table()
    return replace(table, shards=replace(table.shards, tensors=replace(table.shards.tensors, **changes)))


def with_rows(**changes: Any) -> RankTable:
    """The table with other columns of rows."""
    table = make_table()
    return replace(table, shards=replace(table.shards, **changes))


CHANGES = {
    "address": lambda: with_tensors(addresses=("model/empty", "model/head", "model/tok", "stats/total")),
    "dtype": lambda: with_tensors(dtypes=("float32", "float16", "float16", "int64")),
    "shape": lambda: with_tensors(shapes=np.array([[0, 3], [5, 6], [5, 6], [1, 1]])),
    "ndim": lambda: with_tensors(ndims=np.array([2, 2, 2, 1], dtype=np.int8)),
    "tie": lambda: with_tensors(alias_of=np.full(4, -1)),
    "offset": lambda: with_rows(offsets=np.array([[0, 0], [0, 0], [1, 0], [0, 0]])),
    "length": lambda: with_rows(lengths=np.array([[0, 3], [2, 6], [2, 6], [1, 1]])),
    "order of rows": lambda: with_rows(offsets=make_table().shards.offsets[[0, 2, 1, 3]]),
    "order of sections": lambda: make_table(sections=("model", "stats")),
    "buffer": lambda: make_table(is_buffer=np.zeros(4, dtype=bool)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_structure_changes_the_fingerprint(change: str) -> None:
    """What the plan depends on is covered; tables made anew with the same content have the same fingerprint."""
    assert find_fingerprint(make_table()) != find_fingerprint(CHANGES[change]())
    assert find_fingerprint(CHANGES[change]()) == find_fingerprint(CHANGES[change]())


def test_the_fingerprint_covers_what_is_around_the_table() -> None:
    """Another number of ranks or another option is another plan; the order in which options are given is none."""
    around = [(4, {"x": 1, "y": 2}), (5, {"x": 1, "y": 2}), (4, {"x": 1, "y": 3}), (4, {"x": 1})]
    found = {find_fingerprint(make_table(), world_size=size, options=options) for size, options in around}
    assert 4 == len(found)
    assert find_fingerprint(make_table(), options={"y": 2, "x": 1}) in found


# Refusals --------------------------------------------------------------------------------------------------------------

BIG = 1 << 32
BAD_TABLES = {
    "a product that would wrap": (
        "fewer than 2\\^62 bytes",
        lambda: with_tensors(shapes=np.array([[0, 3], [BIG, BIG], [BIG, BIG], [1, 1]])),
    ),
    "a sum that would wrap": (
        "offset \\+ length within the shape",
        lambda: with_rows(offsets=np.array([[0, 0], [(1 << 63) - 1, 0], [2, 0], [0, 0]])),
    ),
    "a region outside": ("offset \\+ length within", lambda: with_rows(offsets=np.array([[0, 0], [4, 0], [2, 0], [0, 0]]))),
    "a negative length": ("no negative", lambda: with_rows(lengths=np.array([[0, 3], [-1, 6], [2, 6], [1, 1]]))),
    "a length beyond ndim": ("beyond ndim", lambda: with_rows(lengths=np.array([[0, 3], [1, 6], [2, 6], [1, 0]]))),
    "an unknown tensor": ("one of 4 tensors", lambda: with_rows(tensor=np.array([0, 1, 4, 3]))),
    "a row of an alias": ("no row of an alias", lambda: with_rows(tensor=np.array([0, 1, 2, 3]))),
    "a tie to an alias": ("a tie to a stored tensor", lambda: with_tensors(alias_of=np.array([-1, 2, 1, -1]))),
    "a tie to another shape": ("a tie to a stored tensor", lambda: with_tensors(alias_of=np.array([-1, -1, 0, -1]))),
    "a tie to nothing": ("a tie to one of the tensors", lambda: with_tensors(alias_of=np.array([-1, -1, 4, -1]))),
    "too many dims": ("ndim from 0 to 2", lambda: with_tensors(ndims=np.array([2, 2, 3, 0], dtype=np.int8))),
    "a shape beyond ndim": ("beyond ndim", lambda: with_tensors(ndims=np.array([2, 1, 1, 0], dtype=np.int8))),
    "unsorted addresses": (
        "sorted addresses, found model/head before model/empty",
        lambda: with_tensors(addresses=("model/head", "model/empty", "model/tok", "stats/count")),
    ),
    "another section": ("addresses in the sections model, found stats/count", lambda: make_table(sections=("model",))),
    "an unknown dtype": ("unknown dtype 'float3'", lambda: with_tensors(dtypes=("float3", "int8", "int8", "int64"))),
    "too few dtypes": ("as many dtypes as addresses", lambda: with_tensors(dtypes=("int8",))),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_break_a_rule_are_refused(name: str) -> None:
    """Nothing that another rank sends can make a check wrap or a plan point outside of it."""
    message, make = BAD_TABLES[name]
    with pytest.raises(UnsupportedFormat, match=message):
        round_trip(make())


def test_rows_need_their_vocabulary() -> None:
    """Rows whose vocabulary did not come are refused with its digest."""
    encoded = encode_table(make_table())
    with pytest.raises(UnsupportedFormat, match=f"one of 0 vocabularies, found version 1, vocabulary {encoded.digest}"):
        decode_tables([encoded.rows], [])


@pytest.mark.parametrize(
    "message", [b"", b"abc", pack_message(b"\x90"), pack_message(b"\xc1"), encode_table(make_table()).rows[:-3]]
)
def test_other_messages_are_refused(message: bytes) -> None:
    """What is no table in this release's form says that all ranks must run the same release."""
    with pytest.raises(UnsupportedFormat, match="all ranks must run the same release"):
        decode_tables([message], [])


def test_no_message_unfolds_to_any_size() -> None:
    """A frame has to say how long it is, and no more than a message may be; neither is unfolded to find out."""
    endless = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(UnsupportedFormat, match="x: expected a zstd frame that says how long it is"):
        unpack_message(endless, what="x")
    with mock.patch.object(packed, "MAX_MESSAGE_NBYTES", 999), pytest.raises(LimitExceeded, match="x: .* 999 bytes, found 1000"):
        unpack_message(pack_message(bytes(1000)), what="x")


@given(st.data(), st.booleans())
def test_damaged_messages_are_errors_of_ours_or_tables(data: st.DataObject, is_rows: bool) -> None:
    """Whatever byte of a message changes, decoding ends in a lawful table or an error of the package."""
    encoded = encode_table(make_table())
    message = encoded.rows if is_rows else encoded.vocabulary
    raw = bytearray(unpack_message(message, what="x"))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = pack_message(bytes(raw))
    try:
        rows, more = ([damaged], []) if is_rows else ([encoded.rows], [damaged])
        table = decode_tables(rows, [encoded.vocabulary, *more])[0]
    except AnyshardError:
        return
    assert len(table.shards) == len(make_table().shards)


def test_rows_are_not_the_shards_of_anyone_else() -> None:
    """A decoded table is the receiver's own: writing into what was sent changes nothing."""
    table = make_table()
    back = round_trip(table)
    table.shards.offsets[:] = 7
    assert isinstance(back.shards, ShardTable)
    assert [[0, 0], [0, 0], [2, 0], [0, 0]] == back.shards.offsets.tolist()

"""Digests of replicas as messages: whole round trips, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.errors import UnsupportedFormat
from anyshard.records.packed import pack_message
from anyshard.records.replica_digests import (
    SetDigest,
    decode_row_digests,
    decode_set_digests,
    encode_row_digests,
    encode_set_digests,
)

DIGEST = st.binary(min_size=8, max_size=8)
BUFFERS = st.lists(st.binary(min_size=4, max_size=4), max_size=3).map(tuple)
SETS = st.dictionaries(st.integers(0, 1 << 40), st.builds(SetDigest, DIGEST | st.just(b""), BUFFERS))
ROWS = st.dictionaries(st.integers(0, 99), st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), DIGEST))


@given(SETS)
def test_set_digests_come_back(digests: dict[int, SetDigest]) -> None:
    """Digests of sets, with and without buffers, survive the message."""
    assert digests == decode_set_digests(encode_set_digests(digests))


@given(ROWS)
def test_row_digests_come_back(digests: dict[int, dict[str, bytes]]) -> None:
    """Digests of addresses survive the message."""
    assert digests == decode_row_digests(encode_row_digests(digests))


@pytest.mark.parametrize("record", [{0: (b"short", b"")}, {0: (b"", b"12345")}, {0: (b"",)}, {"0": (b"", b"")}, [], {0: b""}])
def test_other_set_digests_are_refused(record: object) -> None:
    """Digests of other lengths and other records are not taken for ours."""
    with pytest.raises(UnsupportedFormat, match="digests of replica sets: expected"):
        decode_set_digests(msgspec.msgpack.encode(record))


@pytest.mark.parametrize("record", [{0: {"w": b"short"}}, {0: {1: b"12345678"}}, {0: []}, 7])
def test_other_row_digests_are_refused(record: object) -> None:
    """The same holds for the digests of addresses."""
    with pytest.raises(UnsupportedFormat, match="digests of replicas: expected"):
        decode_row_digests(pack_message(msgspec.msgpack.encode(record)))


def test_damaged_messages_are_refused() -> None:
    """Bytes that are no message are an error of ours."""
    with pytest.raises(UnsupportedFormat, match="digests of replicas: expected a whole zstd frame"):
        decode_row_digests(b"\x80")

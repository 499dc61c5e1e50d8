"""Bytes shared under their digest: one rank stores them, anyone fetches them, and they are what they were."""

from __future__ import annotations

import pytest

from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.protocol import MAX_VALUE_NBYTES
from anyshard.errors import RankMissing
from tests.coord.conftest import Connect
from tests.coord.test_group import CountingStore
from tests.coord.thread_ranks import LONG, SHORT, failures, make_groups, run_group, run_ranks, save

DIGEST = "0123456789abcdef" * 2
BIG = bytes(range(256)) * (2 * MAX_VALUE_NBYTES // 256) + b"end"


@pytest.mark.slow
@pytest.mark.parametrize("payload", [b"", b"x", BIG], ids=["empty", "short", "long"])
def test_what_one_rank_shares_all_can_fetch(connect: Connect, payload: bytes) -> None:
    """The digest, known from a message, leads to the bytes, on the rank that stores them too."""

    def act(group: Group) -> bytes:
        with group.agree("save 1", patience=LONG) as agreement:
            if group.is_coordinator:
                agreement.announce("digest", agreement.share(payload).encode())
            fetched = agreement.fetch(agreement.hear("digest").decode())
            agreement.decide()
            return fetched

    assert [payload] * 3 == run_group(make_groups(3, connect), act)


def share_and_gather(group: Group, payload: bytes) -> list[bytes]:
    """Every rank shares; the coordinator fetches what it is told of, the others nothing."""
    with group.agree("save 1", patience=LONG) as agreement:
        agreement.post("digest", agreement.share(payload).encode())
        found = []
        if group.is_coordinator:
            found = [agreement.fetch(digest.decode()) for digest in agreement.collect("digest")]
        agreement.decide()
        return found


def test_contents_keep_apart(connect: Connect) -> None:
    """Ranks may share different bytes, some of them the same."""
    payloads = [b"a", b"b", b"a"]
    groups = make_groups(3, connect)
    assert payloads == run_ranks([lambda group=group: share_and_gather(group, payloads[group.rank]) for group in groups])[0]


def test_equal_bytes_are_stored_once() -> None:
    """Eight ranks with the same megabyte send it once, and none of it comes back to those who came second."""
    store = CountingStore()
    payload = bytes(1 << 20)
    assert [payload] * 8 == run_group(make_groups(8, store.clone), lambda group: share_and_gather(group, payload))[0]
    assert len(payload) < store.counts["nbytes"] < len(payload) + 50_000
    keys = store.keys()
    assert ["claim", "content"] == [part for key in keys for part in ("claim", "content") if f"/{part}." in key]


def test_sharing_again_says_the_same() -> None:
    """The digest is XXH3-128 in hex, and a rank may share the same bytes twice in one operation."""
    with make_lone_group().agree("save 1") as agreement:
        digests = agreement.share(b"x"), agreement.share(b"x")
        agreement.decide()
    assert ("5c7401c0ec22eeeeeaf06c6480b2cd11",) * 2 == digests


@pytest.mark.slow
def test_the_claimer_is_named_if_its_bytes_never_come(connect: Connect) -> None:
    """A rank that ends between its claim and its bytes is the one that is missing, for every rank that asks for them."""
    groups = make_groups(3, connect)
    run_group(groups, save)

    def act(group: Group) -> bytes | None:
        agreement = group.agree("save 2", patience=SHORT)
        if group.rank == 2:
            agreement._terms.store.set(agreement._terms.keys.claim(DIGEST), b"2")
            return None
        with agreement:
            return agreement.fetch(DIGEST)

    results = run_group(groups, act)[:2]
    assert [{2: "fetch: RankMissing: not heard of within 0.4 s"}] * 2 == failures(results)
    assert [RankMissing] * 2 == [type(result) for result in results]


def test_damaged_bytes_are_an_error_everywhere() -> None:
    """Bytes that do not have their digest are not handed on; the rank that sees it gives up for all."""

    def act(group: Group) -> bytes:
        with group.agree("save 1", patience=LONG) as agreement:
            if group.is_coordinator:
                agreement._write(agreement._terms.keys.content(DIGEST), b"other bytes")
                return agreement.collect("durable")[0]
            return agreement.fetch(DIGEST)

    results = run_group(make_groups(2, MemoryKeyValueStore().clone), act)
    assert [[1]] * 2 == [list(found) for found in failures(results)]
    assert f"fetch: OperationFailed: expected bytes with the digest {DIGEST}, found 11 with " in str(results[0])

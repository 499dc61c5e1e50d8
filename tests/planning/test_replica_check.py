"""Replica check: what counts as equal, and who is named where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from anyshard.planning.replica_check import ReplicaDifference, SetFindings, compare_sets, explain
from anyshard.records.replica_digests import SetDigest

A, B = SetDigest(b"a" * 8), SetDigest(b"b" * 8)


def compare(posts: list[dict[int, SetDigest]], *num_holders: int) -> SetFindings:
    """The findings for sets of this many ranks."""
    return compare_sets(posts, num_holders=np.array(num_holders, dtype=np.int64))


def test_equal_digests_are_no_finding() -> None:
    """Ranks that post the same of each set agree; a set of one rank needs no post."""
    assert SetFindings((), 0) == compare([{0: A, 2: B}, {0: A}, {2: B}], 2, 0, 2)


def test_differing_sets_are_named() -> None:
    """Each set in which any rank differs is found, lowest first."""
    assert SetFindings((1, 2), 0) == compare([{2: A, 1: A, 0: A}, {2: A, 1: B, 0: A}, {2: B}], 2, 2, 3)


@pytest.mark.parametrize("posts", [[{0: A}, {}], [{}, {}], [{0: A}, {0: A}, {0: A}]])
def test_a_missing_or_surplus_post_is_a_difference(posts: list[dict[int, SetDigest]]) -> None:
    """A set counts as equal only if exactly the ranks that hold it posted it."""
    assert (0,) == compare(posts, 2).differing


def test_a_post_of_an_unknown_set_is_a_difference() -> None:
    """Sets that the plan does not have, or that only one rank holds, are not passed over."""
    assert (0, 7) == compare([{7: A, 0: A}, {7: A, 0: A}], 0).differing


def test_differing_buffers_are_counted() -> None:
    """Buffers that differ are no difference of their set; each counts once, however many ranks differ."""
    posts = [{0: SetDigest(b"a" * 8, (x, b"same", y))} for x, y in ((b"1111", b"4444"), (b"2222", b"4444"), (b"3333", b"5555"))]
    assert SetFindings((), 2) == compare(posts, 3)


def test_unlike_numbers_of_buffers_are_a_difference() -> None:
    """Ranks that do not digest the same buffers differ as a set."""
    assert (0,) == compare([{0: SetDigest(b"", (b"1111",))}, {0: SetDigest(b"")}], 2).differing


def test_differences_name_address_and_ranks() -> None:
    """Each tensor whose digests differ within a set is named, with the ranks that agree side by side, lowest first."""
    posts = [{0: {"m/w": digest, "m/b": b"same"}} for digest in (b"x", b"x", b"y", b"z")]
    found = explain(posts)
    assert (ReplicaDifference("m/w", ((0, 1), (2,), (3,))),) == found
    assert "m/w: ranks 0, 1 against rank 2 against rank 3" == str(found[0])


def test_shards_are_compared_within_their_set() -> None:
    """Ranks that hold other shards of the same tensor are not compared with each other (HSDP)."""
    posts = [{0: {"w": b"x"}}, {1: {"w": b"y"}}, {0: {"w": b"x"}}, {1: {"w": b"!"}}]
    assert ["w: rank 1 against rank 3"] == [str(found) for found in explain(posts)]


def test_a_missing_address_is_a_difference() -> None:
    """A rank in a set that says nothing of an address differs from those that do."""
    assert ["w: rank 0 against rank 1"] == [str(found) for found in explain([{0: {"w": b"x"}}, {0: {}}, {}])]


def test_addresses_are_shown_in_print() -> None:
    """Control characters of an address are escaped, and differences come by address."""
    posts = [{0: {"b\n": b"x", "a": b"x"}}, {0: {"b\n": b"y", "a": b"y"}}]
    assert ["a: rank 0 against rank 1", "b\\n: rank 0 against rank 1"] == [str(found) for found in explain(posts)]

"""Replica check: whether ranks that hold the same regions hold the same bytes, and if not, which tensors differ between whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyshard.planning.unite import show_ranks
from anyshard.records.addresses import show
from anyshard.records.replica_digests import RowDigests, SetDigest
from anyshard.records.tables import IntColumn


@dataclass(frozen=True, slots=True)
class SetFindings:
    """The replica sets whose ranks differ, and how many modules' buffers do, which is no fault."""

    differing: tuple[int, ...]
    num_differing_buffers: int


def compare_sets(posts: Sequence[Mapping[int, SetDigest]], *, num_holders: IntColumn) -> SetFindings:
    """A replica set is found equal only if all of its ranks posted the same digest of it.

    `posts[r]` is what rank r posted; `num_holders` is that of the `GroupPlan`. A set that fewer or more ranks posted than hold
    it counts as differing.
    """
    posted: dict[int, list[SetDigest]] = {number: [] for number, count in enumerate(num_holders.tolist()) if count}
    for post in posts:
        for number, digest in post.items():
            posted.setdefault(number, []).append(digest)
    expected = dict(enumerate(num_holders.tolist()))
    differing = tuple(number for number, found in sorted(posted.items()) if not _agree(found, expected.get(number, 0)))
    return SetFindings(differing, sum(map(_count_differing, posted.values())))


def _agree(found: Sequence[SetDigest], num_holders: int) -> bool:
    return len(found) == num_holders and len({(digest.main, len(digest.buffers)) for digest in found}) == 1


def _count_differing(found: Sequence[SetDigest]) -> int:
    """Buffers that not all ranks have alike; ranks with unlike numbers of buffers differ as a set."""
    return sum(len(set(same)) > 1 for same in zip(*(digest.buffers for digest in found), strict=False))


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A tensor, or a part of one, of which ranks hold unlike bytes: `ranks` has a group of ranks for each of them."""

    address: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{show(self.address)}: {' against '.join(map(show_ranks, self.ranks))}"


def explain(posts: Sequence[RowDigests]) -> tuple[ReplicaDifference, ...]:
    """All differences within replica sets, by address: `posts[r]` is what rank r found of the sets that it is in.

    A rank in a set without a digest of an address that others have differs from them. Only a rank that has digested nothing of
    a set makes this come out empty after `compare_sets` found a difference.
    """
    classes: dict[tuple[str, int], dict[bytes, list[int]]] = {}
    for number in sorted({number for post in posts for number in post}):
        holders = [rank for rank, post in enumerate(posts) if number in post]
        for address in {address for rank in holders for address in posts[rank][number]}:
            of_address = classes.setdefault((address, number), {})
            for rank in holders:
                of_address.setdefault(posts[rank][number].get(address, b""), []).append(rank)
    return tuple(
        ReplicaDifference(address, tuple(tuple(ranks) for ranks in of_address.values()))
        for (address, _), of_address in sorted(classes.items())
        if len(of_address) > 1
    )

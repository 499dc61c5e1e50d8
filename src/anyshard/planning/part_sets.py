"""Part sets: which parts of the value trees the same ranks have, so that these compare them by one digest at every save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from anyshard.planning.replicas import NO_SET
from anyshard.records.replica_digests import SetDigest
from anyshard.records.tables import IntColumn
from anyshard.records.value_parts import PartList, Path


@dataclass(frozen=True, slots=True)
class PartSets:
    """Which parts the same ranks have: for each rank the set of each of its parts, in their order, `NO_SET` if it alone has one.

    `num_holders` counts the ranks of each set.
    """

    of_rank: tuple[IntColumn, ...]
    num_holders: IntColumn


def find_part_sets(lists: Sequence[PartList]) -> PartSets:
    """The sets of parts that several ranks have, which they compare by one digest for each set."""
    distinct = list({id(parts): parts for parts in lists}.values())
    count = Counter(map(id, lists))
    holders: dict[tuple[str, Path], list[int]] = {}
    for number, parts in enumerate(distinct):
        for key in _list_keys(parts):
            holders.setdefault(key, []).append(number)
    held_by = {key: tuple(numbers) for key, numbers in holders.items()}
    sizes = {numbers: sum(count[id(distinct[number])] for number in numbers) for numbers in dict.fromkeys(held_by.values())}
    sets = {numbers: place for place, numbers in enumerate(numbers for numbers, size in sizes.items() if size > 1)}
    set_of = {key: sets.get(numbers, NO_SET) for key, numbers in held_by.items()}
    columns = {id(parts): np.array([set_of[key] for key in _list_keys(parts)], dtype=np.int64) for parts in distinct}
    num_holders = np.array([sizes[numbers] for numbers in sets], dtype=np.int64)
    return PartSets(tuple(columns[id(parts)] for parts in lists), num_holders)


def join_part_sets(one: PartSets, other: PartSets) -> PartSets:
    """The sets of both, for ranks whose parts in `one` come before those in `other`."""
    offset = len(one.num_holders)
    columns = (
        np.concatenate([first, np.where(second == NO_SET, NO_SET, second + offset)])
        for first, second in zip(one.of_rank, other.of_rank, strict=True)
    )
    return PartSets(tuple(columns), np.concatenate([one.num_holders, other.num_holders]))


def digest_part_sets(parts: PartList, part_set: IntColumn) -> dict[int, SetDigest]:
    """One digest of the parts in each set that a rank is in, equal for equal values."""
    digests: dict[int, xxhash.xxh3_64] = {}
    own = [digest for found in parts.parts.values() for digest in found.values()]
    for number, digest in zip(part_set.tolist(), own, strict=True):
        if number != NO_SET:
            digests.setdefault(number, xxhash.xxh3_64()).update(digest)
    return {number: SetDigest(digest.digest()) for number, digest in digests.items()}


def _list_keys(parts: PartList) -> Iterator[tuple[str, Path]]:
    return ((section, path) for section, found in parts.parts.items() for path in found)

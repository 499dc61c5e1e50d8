"""Which rank writes which parts of the value trees, and which parts differ between ranks. No values here, only their digests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import msgspec

from anyshard.errors import InvalidAppState
from anyshard.planning.unite import show_ranks
from anyshard.records.addresses import show
from anyshard.records.packed import pack_message, read_record, unpack_message
from anyshard.records.value_parts import EMPTY_DICT_DIGEST, PartList, Path, part_address

_SHOWN = 8  # ranks of a class, and classes, in a message
_WHAT = "owned parts"


@dataclass(frozen=True, slots=True)
class Owners:
    """Who writes what: rank 0 its whole trees, every other rank the parts in `of_rank`, by section, that no lower rank has.

    `also` are by section the ranks other than 0 that write something, in order.
    """

    of_rank: tuple[Mapping[str, tuple[Path, ...]], ...]
    also: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PartDifference:
    """A part that is not equal on all ranks that have it: the ranks by equal values, those of the lowest rank first."""

    address: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        classes = [show_ranks(ranks) for ranks in self.ranks[:_SHOWN]]
        more = f", and {len(self.ranks) - _SHOWN} more values" if len(self.ranks) > _SHOWN else ""
        return f"{show(self.address)}: one value on {', another on '.join(classes)}{more}"


def assign_owners(lists: Sequence[PartList]) -> Owners:
    """Give every part to the lowest rank that has it. A list that is the same object as an earlier one is not looked at again.

    Raises `InvalidAppState` where one rank has a value and another a dict with keys; an empty dict goes with both.
    """
    trees: dict[str, _Union] = {}
    of_rank: list[Mapping[str, tuple[Path, ...]]] = []
    also: dict[str, list[int]] = {}
    seen: set[int] = set()
    for rank, parts in enumerate(lists):
        new = {} if id(parts) in seen else _add_list(trees, rank, parts)
        seen.add(id(parts))
        of_rank.append(new if rank else {})
        for section in new if rank else ():
            also.setdefault(section, []).append(rank)
    return Owners(tuple(of_rank), {section: tuple(ranks) for section, ranks in also.items()})


def _add_list(trees: dict[str, _Union], rank: int, parts: PartList) -> dict[str, tuple[Path, ...]]:
    new = {section: trees.setdefault(section, _Union(section)).add(rank, found) for section, found in parts.parts.items()}
    return {section: paths for section, paths in new.items() if paths}


@final
class _Union:
    """The parts of one section on the ranks up to now, and the first rank that has each, or has a dict with keys at a path."""

    def __init__(self, section: str) -> None:
        self._section = section
        self._owners: dict[Path, tuple[int, bytes]] = {}
        self._branches: dict[Path, int] = {}

    def add(self, rank: int, parts: Mapping[Path, bytes]) -> tuple[Path, ...]:
        """The parts of a rank that no rank before it has."""
        new = [path for path in parts if path not in self._owners]
        for path in new:
            for end in range(len(path)):
                self._check_branch(rank, path[:end])
        return tuple(path for path in new if self._take(rank, path, parts[path]))

    def _check_branch(self, rank: int, path: Path) -> None:
        owner, digest = self._owners.get(path, (rank, EMPTY_DICT_DIGEST))
        if digest != EMPTY_DICT_DIGEST:
            raise self._refuse(path, value=owner, keys=rank)
        self._branches.setdefault(path, rank)

    def _take(self, rank: int, path: Path, digest: bytes) -> bool:
        if path in self._branches:
            if digest != EMPTY_DICT_DIGEST:
                raise self._refuse(path, value=rank, keys=self._branches[path])
            return False  # the keys that another rank has there say all that an empty dict would
        self._owners[path] = rank, digest
        return True

    def _refuse(self, path: Path, *, value: int, keys: int) -> InvalidAppState:
        return InvalidAppState(
            f"{show(part_address(self._section, path))}: expected one kind of value on all ranks, found a dict with keys on rank "
            f"{keys} and another value on rank {value}; give them different names, or wrap each in anyshard.PerRank"
        )


def compare_parts(lists: Sequence[PartList]) -> tuple[PartDifference, ...]:
    """All parts that ranks have in common but that are not equal, by address."""
    distinct = {id(parts): parts for parts in lists}
    first: dict[str, dict[Path, bytes]] = {}
    differing = {
        (section, path)
        for parts in distinct.values()
        for section, found in parts.parts.items()
        for path in _list_differing(first.setdefault(section, {}), found)
    }
    return tuple(_classify(lists, section, path) for section, path in sorted(differing))


def _list_differing(first: dict[Path, bytes], found: Mapping[Path, bytes]) -> Iterator[Path]:
    """The paths whose digest is not the one that was met first; those that are new are noted."""
    return (path for path, digest in found.items() if first.setdefault(path, digest) != digest)


def _classify(lists: Sequence[PartList], section: str, path: Path) -> PartDifference:
    classes: dict[bytes, list[int]] = {}
    for rank, parts in enumerate(lists):
        digest = parts.parts.get(section, {}).get(path)
        if digest is not None:
            classes.setdefault(digest, []).append(rank)
    return PartDifference(part_address(section, path), tuple(map(tuple, classes.values())))


class _Owned(msgspec.Struct, array_like=True):
    sections: dict[str, tuple[tuple[str, ...], ...]]


def encode_owned(owned: Mapping[str, Collection[Path]]) -> bytes:
    """What one rank writes, as a message to it."""
    return pack_message(msgspec.msgpack.encode(_Owned({section: tuple(paths) for section, paths in owned.items()})))


def decode_owned(data: bytes) -> Mapping[str, tuple[Path, ...]]:
    """What this rank writes; raises `UnsupportedFormat` or `LimitExceeded` for what `encode_owned` does not give."""
    return read_record(unpack_message(data, what=_WHAT), _Owned, what=_WHAT).sections

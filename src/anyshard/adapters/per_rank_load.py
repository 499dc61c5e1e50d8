"""Finds for a per-rank value of the app state which of the stored trees is this rank's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import final

from anyshard.adapters.findings import Findings
from anyshard.adapters.nested import describe_node
from anyshard.adapters.per_rank import PerRank, encode_key, explain_missing_key, find_key
from anyshard.errors import Mismatch
from anyshard.records.addresses import section_of
from anyshard.records.captured import Stored
from anyshard.records.section_values import ABSENT, pick_own_tree
from anyshard.records.values import PerRankMark, ValueRegistry


@dataclass(frozen=True, slots=True)
class Place:
    """Where a load runs: the rank in its group, the size of that, and the mesh of the app state."""

    rank: int
    world_size: int
    mesh: Mapping[str, int]


@final
class OwnTrees:
    """The stored per-rank values as one rank sees them."""

    def __init__(self, stored: Stored, findings: Findings, *, place: Place, registry: ValueRegistry) -> None:
        self._keys = stored.per_rank
        self._read = cache(stored.read_rank)
        self._findings = findings
        self._place = place
        self._registry = registry

    def find(self, wrapper: PerRank, node: object, address: str) -> object:
        """The tree to load into a per-rank value; `ABSENT`, and recorded if it is selected, where there is none."""
        if type(node) is not PerRankMark:
            shared = f"{describe_node(node)} that all ranks share; load it without anyshard.PerRank"
            self._findings.refuse(address, expected="a per-rank value", found=shared)
            return ABSENT
        place, keys = self._place, self._keys.get(node.address, {})
        key = encode_key(wrapper, rank=place.rank, world_size=place.world_size, mesh=place.mesh, registry=self._registry)
        found = find_key(key, keys, has_mesh=bool(place.mesh))
        if found is not None:
            return self._read_tree(keys[found], node.address)
        if self._findings.selection.takes_whole(address):
            self._miss(key, keys, address, is_given=wrapper.key is not None)
        return ABSENT

    def _miss(self, key: bytes, keys: Iterable[bytes], address: str, *, is_given: bool) -> None:
        """A new key is left alone if the load is not strict; without one, the ranks of the checkpoint are other ranks."""
        if is_given and not self._findings.options.strict:
            self._findings.match(address)
            self._findings.miss(address)
            return
        expected, found = explain_missing_key(key, keys, address=address, registry=self._registry)
        self._findings.differ(Mismatch.RANK, address, expected=expected, found=found)

    def _read_tree(self, rank: int, address: str) -> object:
        return pick_own_tree(self._read(rank, section_of(address)), address, rank=rank)

"""Finds for a per-rank value of the app state which of the stored trees is this rank's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import final

from anyshard.adapters.findings import Findings
from anyshard.adapters.nested import describe_node
from anyshard.adapters.per_rank import PerRank, encode_key, explain_missing_key
from anyshard.errors import CheckpointDamaged, Mismatch
from anyshard.records.addresses import section_of, show
from anyshard.records.captured import Stored
from anyshard.records.section_values import ABSENT
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
        """The tree to load into a per-rank value; `ABSENT`, with a difference if it is selected, where there is none."""
        if type(node) is not PerRankMark:
            found = f"{describe_node(node)} that all ranks share; load it without anyshard.PerRank"
            self._findings.refuse(address, expected="a per-rank value", found=found)
            return ABSENT
        place, keys = self._place, self._keys.get(node.address, {})
        key = encode_key(wrapper, rank=place.rank, world_size=place.world_size, mesh=place.mesh, registry=self._registry)
        if key in keys:
            return self._read_tree(keys[key], node.address)
        if self._findings.selection.takes_whole(address):
            expected, found = explain_missing_key(key, keys, address=address, registry=self._registry)
            self._findings.differ(Mismatch.RANK, address, expected=expected, found=found)
        return ABSENT

    def _read_tree(self, rank: int, address: str) -> object:
        trees = self._read(rank, section_of(address))
        if address not in trees:
            raise CheckpointDamaged(
                f"{show(address)}: expected a tree among the values of rank {rank}, found none; load another checkpoint"
            )
        return trees[address]

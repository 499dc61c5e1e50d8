"""What the ranks of a group agree on for one structure of their app state: who writes what. Made once, kept, used again.

Nothing here holds a tensor: a plan is tables and bytes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

import msgspec
import numpy as np
import xxhash

from anyshard.planning.group_plan import Blobs, GroupPlan, plan_group
from anyshard.planning.owners import Owners, assign_owners, decode_owned, encode_owned
from anyshard.planning.part_sets import PartSets, find_part_sets
from anyshard.planning.rank_plan import RankPlan, decode_rank_plan, encode_rank_plan
from anyshard.records.addresses import check_directories, section_of, show
from anyshard.records.captured import Captured
from anyshard.records.index import decode_index, encode_index
from anyshard.records.packed import pack_ints, unpack_ints
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.save_messages import PlanPart
from anyshard.records.table_codec import fingerprint
from anyshard.records.tables import NO_BLOB, IntColumn, ShardTable
from anyshard.records.value_parts import PartList, Path, list_parts
from anyshard.records.values import ValueRegistry

_KEPT = 4  # structures: an actor's, a critic's, ...
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Structure:
    """Everything of one rank's app state that a plan depends on: its table, the paths in its value trees, its per-rank keys."""

    table: RankTable
    parts: PartList
    keys: Mapping[str, bytes]

    def fingerprint(self, *, world_size: int, max_blob_nbytes: int) -> str:
        """Equal for structures that have the same plan."""
        values = msgspec.msgpack.encode([self.parts.structure, sorted(self.keys.items())])
        options: dict[str, int | float | str] = {"max_blob_nbytes": max_blob_nbytes, "values": xxhash.xxh3_128_hexdigest(values)}
        return fingerprint(self.table, world_size=world_size, options=options)


def describe_structure(captured: Captured, registry: ValueRegistry) -> Structure:
    """The structure of an app state that was taken apart."""
    table = make_rank_table(captured.shards, tuple(captured.trees), buffers=captured.buffers)
    keys = {address: part.key for address, part in captured.per_rank.items()}
    return Structure(table, list_parts(captured.trees, registry=registry, branches=captured.branches), keys)


@dataclass(frozen=True, slots=True)
class WholePlan:
    """What only the coordinator keeps of a plan: the records that are the same at every save of this structure.

    `num_holders` counts the ranks of each replica set, `num_part_holders` those of each part set. `also` and `keys` go into its
    payload of each section (see records/section_values.py).
    """

    sections: tuple[str, ...]
    blobs: Blobs
    index: bytes
    num_rows: int
    num_slots: int
    num_tensors: int
    nbytes: int
    num_holders: IntColumn
    num_part_holders: IntColumn
    also: Mapping[str, tuple[int, ...]]
    keys: Mapping[str, Mapping[bytes, int]]

    def keys_in(self, section: str) -> dict[str, Mapping[bytes, int]]:
        """The keys of the per-rank values of one section."""
        return {address: ranks for address, ranks in self.keys.items() if section_of(address) == section}


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """One rank's part of a plan, and on the coordinator what belongs to all. Its `id` is the same on all ranks."""

    id: str
    part: RankPlan
    owned: Mapping[str, tuple[Path, ...]]
    part_set: IntColumn
    whole: WholePlan | None = None


def plan_together(structures: Sequence[Structure], *, max_blob_nbytes: int) -> tuple[WholePlan, tuple[PlanPart, ...]]:
    """The plan of a whole group from the structures of its ranks, and the part of it that each rank is told.

    Raises `InvalidAppState` if the ranks do not fit together.
    """
    plan = plan_group([structure.table for structure in structures], max_blob_nbytes=max_blob_nbytes)
    check_directories(plan.sections)
    lists = [structure.parts for structure in structures]
    owners, sets = assign_owners(lists), find_part_sets(lists)
    whole = _make_whole(plan, owners, sets, structures)
    plan_id = secrets.token_hex(8)
    parts = zip(plan.split(), owners.of_rank, sets.of_rank, strict=True)
    return whole, tuple(
        PlanPart(plan_id, encode_rank_plan(part, rank=rank), encode_owned(owned), pack_ints(part_set))
        for rank, (part, owned, part_set) in enumerate(parts)
    )


def take_part(message: PlanPart, own: Structure, *, whole: WholePlan | None = None) -> AgreedPlan:
    """The plan as one rank keeps it."""
    num_parts = sum(map(len, own.parts.parts.values()))
    part_set = unpack_ints(message.part_set, num_parts, what="part sets of a rank")
    return AgreedPlan(message.plan, decode_rank_plan(message.rows, own.table), decode_owned(message.owned), part_set, whole)


def _make_whole(plan: GroupPlan, owners: Owners, sets: PartSets, structures: Sequence[Structure]) -> WholePlan:
    index = plan.index
    encoded = encode_index(index)
    decode_index(encoded, max_rows=index.num_rows, file="index")  # what a reader would refuse must not be committed
    num_slots = np.bincount(index.blob[index.blob != NO_BLOB], minlength=len(plan.blobs)) + (plan.blobs.k == 0)
    return WholePlan(
        sections=plan.sections,
        blobs=plan.blobs,
        index=encoded,
        num_rows=index.num_rows,
        num_slots=int(num_slots.max(initial=0)),
        num_tensors=len(plan.tensors),
        nbytes=int(plan.count_bytes().sum()),
        num_holders=plan.num_holders,
        num_part_holders=sets.num_holders,
        also=owners.also,
        keys=_join_keys(structures),
    )


def _join_keys(structures: Sequence[Structure]) -> dict[str, dict[bytes, int]]:
    """For each per-rank value the lowest rank that has it under each key."""
    joined: dict[str, dict[bytes, int]] = {}
    for rank, structure in enumerate(structures):
        for address, key in structure.keys.items():
            joined.setdefault(address, {}).setdefault(key, rank)
    return joined


@final
class PlanCache:
    """The plans of a group's last structures by fingerprint. All ranks put in and drop alike, so that all of them hit or none."""

    def __init__(self) -> None:
        self.num_hits = 0
        self._plans: dict[str, AgreedPlan] = {}
        self._last: Structure | None = None
        self._lock = threading.Lock()  # a process alone may save in several threads at once

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, fingerprint: str) -> AgreedPlan | None:
        """The plan of a structure that was saved before."""
        found = self._plans.get(fingerprint)
        self.num_hits += found is not None
        return found

    def keep(self, fingerprint: str, plan: AgreedPlan, structure: Structure) -> None:
        """Keep the plan of a committed save."""
        with self._lock:
            self._last = structure
            self._plans[fingerprint] = plan
            for oldest in list(islice(self._plans, max(len(self._plans) - _KEPT, 0))):
                del self._plans[oldest]

    def drop(self) -> None:
        """Forget all plans: the ranks do not have the same ones."""
        with self._lock:
            self._plans.clear()

    def explain_miss(self, structure: Structure) -> str:
        """Why there is no plan for a structure, for the message to those that have one."""
        if self._last is None:
            return "has no plan of an earlier save (a new process, or its earlier saves failed)"
        changed = _list_changes(self._last.table.shards, structure.table.shards) or _list_paths(self._last.parts, structure.parts)
        shown = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "")
        return f"holds another structure than at its last save: {shown or 'other options, ties, buffers or per-rank keys'}"


def _list_changes(before: ShardTable, now: ShardTable) -> list[str]:
    """Addresses that came, went, or have another dtype, shape or region than before."""
    old, new = _describe_tensors(before), _describe_tensors(now)
    signs = {True: "new", False: "changed"}
    changed = [f"{signs[address not in old]} {show(address)}" for address in new if old.get(address) != new[address]]
    return changed + [f"gone {show(address)}" for address in old if address not in new]


def _describe_tensors(shards: ShardTable) -> dict[str, object]:
    order = np.argsort(shards.tensor, kind="stable")
    rows: list[IntColumn] = np.split(order, np.searchsorted(shards.tensor[order], np.arange(1, len(shards.tensors))))
    tensors = shards.tensors
    return {
        address: (tensors.dtypes[row], tensors.shape(row), shards.offsets[own].tobytes(), shards.lengths[own].tobytes())
        for row, (address, own) in enumerate(zip(tensors.addresses, rows, strict=False))
    }


def _list_paths(before: PartList, now: PartList) -> list[str]:
    """Values that came or went."""
    old, new = ({(section, *path) for section, paths in parts.parts.items() for path in paths} for parts in (before, now))
    came, went = (sorted("/".join(path) for path in paths) for paths in (new - old, old - new))
    return [f"new {show(path)}" for path in came] + [f"gone {show(path)}" for path in went]

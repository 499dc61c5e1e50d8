"""What the ranks of a group agree on for one structure of their app state: who writes what. Made once, kept, used again.

Nothing here holds a tensor: a plan is tables and bytes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import final

import msgspec
import numpy as np
import xxhash

from anyshard.planning.group_plan import Blobs, GroupPlan, plan_group
from anyshard.planning.owners import Owners, assign_owners, decode_owned, encode_owned
from anyshard.planning.part_sets import PartSets, find_part_sets, join_part_sets
from anyshard.planning.rank_plan import RankPlan, decode_rank_plan, encode_rank_plan
from anyshard.records.addresses import check_directories, section_of, show
from anyshard.records.captured import Captured
from anyshard.records.index import decode_index, encode_index
from anyshard.records.packed import pack_ints, unpack_ints
from anyshard.records.rank_messages import LocalPlan
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.table_codec import fingerprint
from anyshard.records.tables import NO_BLOB, IntColumn, ShardTable
from anyshard.records.value_parts import (
    DIGEST_NBYTES,
    EMPTY_DICT_DIGEST,
    PartList,
    Path,
    list_own_parts,
    list_parts,
    list_paths,
    part_address,
)
from anyshard.records.values import ValueRegistry

_KEPT = 4  # app states with other sections: an actor's, a critic's, ...
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Structure:
    """Everything of one rank's app state that a plan depends on: its table, the paths in its value trees, its per-rank keys.

    `fingerprints` are those that were made of structures with the same table and paths, by what else they depend on.
    """

    table: RankTable
    parts: PartList
    keys: Mapping[str, bytes]
    fingerprints: dict[Hashable, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def own_parts(self) -> PartList:
        """The per-rank values as parts, so that ranks with equal keys compare them. Their digests are not known here."""
        return list_own_parts({address: (key, bytes(DIGEST_NBYTES)) for address, key in self.keys.items()})

    def fingerprint(self, *, world_size: int, max_blob_nbytes: int) -> str:
        """Equal for structures that have the same plan."""
        keys = sorted(self.keys.items())
        context = (tuple(keys), world_size, max_blob_nbytes)
        if context not in self.fingerprints:
            values = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([self.parts.structure, keys]))
            options: dict[str, int | float | str] = {"max_blob_nbytes": max_blob_nbytes, "values": values}
            self.fingerprints[context] = fingerprint(self.table, world_size=world_size, options=options)
        return self.fingerprints[context]


def describe_structure(captured: Captured, registry: ValueRegistry, *, world_size: int) -> Structure:
    """The structure of an app state that was taken apart. A rank alone, which compares with nobody, encodes no values for it."""
    trees, branches, constants = captured.trees, captured.branches, captured.constants
    if world_size == 1:
        parts = list_paths(trees, branches=branches, constants=constants)
    else:
        parts = list_parts(trees, registry=registry, branches=branches, constants=constants)
    table = make_rank_table(captured.shards, tuple(captured.trees), buffers=captured.buffers)
    keys = {address: part.key for address, part in captured.per_rank.items()}
    return Structure(table, parts, keys, {} if constants is None else constants.facts)


@dataclass(frozen=True, slots=True)
class GlobalPlan:
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
    """The plan as one rank keeps it: its local plan, and on the coordinator what belongs to all. Its `id` is the same on all."""

    id: str
    local: RankPlan
    owned: Mapping[str, tuple[Path, ...]]
    part_set: IntColumn
    common: GlobalPlan | None = None


def plan_together(structures: Sequence[Structure], *, max_blob_nbytes: int) -> tuple[GlobalPlan, tuple[LocalPlan, ...]]:
    """The plan of a whole group from the structures of its ranks, and the local plan of each rank.

    Raises `InvalidAppState` if the ranks do not fit together.
    """
    plan = plan_group([structure.table for structure in structures], max_blob_nbytes=max_blob_nbytes)
    check_directories(plan.sections)
    lists = [structure.parts for structure in structures]
    owners = assign_owners(lists)
    sets = join_part_sets(find_part_sets(lists), find_part_sets([structure.own_parts for structure in structures]))
    common = _make_global(plan, owners, sets, structures)
    plan_id = secrets.token_hex(8)
    parts = zip(plan.split(), owners.of_rank, sets.of_rank, strict=True)
    return common, tuple(
        LocalPlan(plan_id, encode_rank_plan(part, rank=rank), encode_owned(owned), pack_ints(part_set))
        for rank, (part, owned, part_set) in enumerate(parts)
    )


def take_plan(message: LocalPlan, own: Structure, *, common: GlobalPlan | None = None) -> AgreedPlan:
    """The plan as one rank keeps it."""
    num_parts = sum(map(len, own.parts.parts.values())) + len(own.keys)
    part_set = unpack_ints(message.part_set, num_parts, what="part sets of a rank")
    return AgreedPlan(message.plan, decode_rank_plan(message.rows, own.table), decode_owned(message.owned), part_set, common)


def _make_global(plan: GroupPlan, owners: Owners, sets: PartSets, structures: Sequence[Structure]) -> GlobalPlan:
    index = plan.index
    encoded = encode_index(index)
    decode_index(encoded, max_rows=index.num_rows, file="index")  # what a reader would refuse must not be committed
    num_slots = np.bincount(index.blob[index.blob != NO_BLOB], minlength=len(plan.blobs)) + (plan.blobs.k == 0)
    return GlobalPlan(
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


@dataclass(frozen=True, slots=True)
class _Kept:
    fingerprint: str
    plan: AgreedPlan
    structure: Structure


@final
class PlanCache:
    """The plan of a group's last save by the names of its sections. All ranks put in and drop alike: all of them hit or none.

    Of several structures with the same sections only the last one counts. With more, a rank whose structure is that of an earlier
    save by chance would go on alone when all ranks have changed.
    """

    def __init__(self) -> None:
        self.num_hits = 0
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._lock = threading.Lock()  # a process alone may save in several threads at once

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, structure: Structure, fingerprint: str) -> AgreedPlan | None:
        """The plan of the last save if that had the same structure."""
        kept = self._kept.get(structure.table.sections)
        if kept is None or kept.fingerprint != fingerprint:
            return None
        self.num_hits += 1
        return kept.plan

    def keep(self, structure: Structure, fingerprint: str, plan: AgreedPlan) -> None:
        """Keep the plan of a committed save."""
        with self._lock:
            self._kept[structure.table.sections] = _Kept(fingerprint, plan, structure)
            for oldest in list(islice(self._kept, max(len(self._kept) - _KEPT, 0))):
                del self._kept[oldest]

    def drop(self) -> None:
        """Forget all plans: the ranks do not have the same ones."""
        with self._lock:
            self._kept.clear()

    def explain_miss(self, structure: Structure) -> str:
        """Why there is no plan for a structure, for the message to those that have one."""
        kept = self._kept.get(structure.table.sections)
        if kept is None:
            names = [name for sections in self._kept for name in sections]
            if fresh := [name for name in structure.table.sections if names and name not in names]:
                return f"holds names that no app state of its earlier saves had: {', '.join(map(show, fresh[:_SHOWN]))}"
            return "has no plan of an earlier save (a new process, or its earlier saves failed)"
        last = kept.structure
        changed = _list_changes(_describe_tensors(last.table.shards), _describe_tensors(structure.table.shards))
        changed = changed or _list_changes(_describe_values(last.parts), _describe_values(structure.parts))
        shown = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "")
        return f"holds another structure than at its last save: {shown or 'other options, ties, buffers or per-rank keys'}"


def _list_changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Addresses that came, went, or stand for something else than before."""
    signs = {True: "new", False: "changed"}
    changed = [f"{signs[address not in before]} {show(address)}" for address in now if before.get(address) != now[address]]
    return changed + [f"gone {show(address)}" for address in before if address not in now]


def _describe_tensors(shards: ShardTable) -> dict[str, object]:
    """The dtype, the shape and the regions of each tensor."""
    order = np.argsort(shards.tensor, kind="stable")
    rows: list[IntColumn] = np.split(order, np.searchsorted(shards.tensor[order], np.arange(1, len(shards.tensors))))
    tensors = shards.tensors
    return {
        address: (tensors.dtypes[row], tensors.shape(row), shards.offsets[own].tobytes(), shards.lengths[own].tobytes())
        for row, (address, own) in enumerate(zip(tensors.addresses, rows, strict=False))
    }


def _describe_values(parts: PartList) -> dict[str, object]:
    """Whether each part is the empty dict."""
    return {
        part_address(section, path): digest == EMPTY_DICT_DIGEST
        for section, found in parts.parts.items()
        for path, digest in found.items()
    }

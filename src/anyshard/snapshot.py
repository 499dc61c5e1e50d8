"""Snapshots: what a save stores of an app state, as it is at one moment, and how the road of a save gets at it.

A blocking save reads the live app state, which stays as it is for as long as the call lasts. An asynchronous one has a snapshot
of its own (see staged_snapshot.py); both go the same road.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final

from anyshard.adapters.capture_cache import CaptureCache
from anyshard.agreed_plan import AgreedPlan, PlanCache, describe_structure
from anyshard.comparison import Held, Reading, hold
from anyshard.coord.group import Group
from anyshard.engine.blocks import BlockPool
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.plan_agreement import Candidate, find_candidate
from anyshard.records.addresses import section_of
from anyshard.records.captured import Captured
from anyshard.records.manifest import BlobEntry
from anyshard.records.section_values import ABSENT, SectionValues, encode_section
from anyshard.records.value_parts import pick_parts
from anyshard.records.values import ValueRegistry
from anyshard.storage.protocol import Store

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Taking:
    """What taking an app state apart needs: the group, records and plans of earlier saves, types of values, where blobs end."""

    group: Group
    captures: CaptureCache
    plans: PlanCache
    registry: ValueRegistry
    max_blob_nbytes: int

    def capture(self, app_state: Mapping[str, object]) -> Captured:
        """The app state, taken apart."""
        return self.captures.capture(app_state, registry=self.registry, rank=self.group.rank, world_size=self.group.size)

    def find_candidate(self, captured: Captured) -> Candidate:
        """Its structure, and the plan of an earlier save of it."""
        structure = describe_structure(captured, self.registry, world_size=self.group.size)
        return find_candidate(self.plans, structure, world_size=self.group.size, max_blob_nbytes=self.max_blob_nbytes)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the records and the report of a save say of the app state besides its structure."""

    mesh: Mapping[str, int]
    warnings: tuple[str, ...]
    num_tensors: int

    @classmethod
    def of(cls, captured: Captured) -> Facts:
        """Those of an app state that was taken apart."""
        return cls(captured.mesh, captured.warnings, len(captured.shards.tensors))


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank writes. `values` are the payloads of its sections."""

    plan: AgreedPlan
    values: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and values."""
        return int(self.plan.local.nbytes.sum()) + sum(map(len, self.values.values()))


class Snapshot(Protocol):
    """An app state at one moment. The road of a save calls these in this order, on one thread, each once; errors end the save.

    `check` is called now and then while one of them takes long: what it raises ends it.
    """

    def adapt(self) -> Candidate:
        """Its structure, and the plan that is known for it."""
        ...

    @property
    def facts(self) -> Facts:
        """What else there is to say of it."""
        ...

    def measure_values(self) -> int:
        """How many bytes this rank's per-rank values take; raises if one cannot be stored. All other values are listed by now."""
        ...

    def take(self, plan: AgreedPlan, check: Check) -> Pieces:
        """What this rank writes under a plan."""
        ...

    def write(self, store: Store, pieces: Pieces, *, job: WriteJob, pool: BlockPool) -> tuple[BlobEntry, ...]:
        """Make this rank's blobs durable."""
        ...

    def hold(self, reading: Reading) -> Held:
        """What other ranks may hold too."""
        ...


@final
class LiveSnapshot:
    """The snapshot of a blocking save: the app state itself."""

    def __init__(self, app_state: Mapping[str, object], taking: Taking) -> None:
        self._app_state = app_state
        self._taking = taking
        self._candidate: Candidate | None = None
        self._pieces: Pieces | None = None

    @cached_property
    def _captured(self) -> Captured:
        return self._taking.capture(self._app_state)

    def adapt(self) -> Candidate:
        """As `Snapshot`."""
        self._candidate = self._taking.find_candidate(self._captured)
        return self._candidate

    @property
    def facts(self) -> Facts:
        """As `Snapshot`."""
        return Facts.of(self._captured)

    def measure_values(self) -> int:
        """As `Snapshot`."""
        return measure_own_values(self._captured, self._taking.registry)

    def take(self, plan: AgreedPlan, check: Check) -> Pieces:
        """As `Snapshot`."""
        self._pieces = Pieces(plan, encode_values(self._captured, plan, self._taking.registry))
        return self._pieces

    def write(self, store: Store, pieces: Pieces, *, job: WriteJob, pool: BlockPool) -> tuple[BlobEntry, ...]:
        """As `Snapshot`."""
        local = pieces.plan.local
        return write_blobs(store, local.plan, sources=local.pick_sources(self._captured.sources), job=job, pool=pool)

    def hold(self, reading: Reading) -> Held:
        """As `Snapshot`; reads the app state only now, so that other ranks need not wait for that to see the blobs written."""
        assert self._candidate is not None
        assert self._pieces is not None
        structure, registry = self._candidate.structure, self._taking.registry
        return hold(self._captured, self._pieces.plan, structure=structure, registry=registry, reading=reading)


def measure_own_values(captured: Captured, registry: ValueRegistry) -> int:
    """How many bytes the per-rank values of a rank take; raises if one cannot be stored."""
    values = {address: SectionValues(per_rank={address: part.tree}) for address, part in captured.per_rank.items()}
    return sum(len(encode_section(of, section=section_of(at), registry=registry)) for at, of in values.items())


def encode_values(captured: Captured, plan: AgreedPlan, registry: ValueRegistry) -> dict[str, bytes]:
    """The payloads of the sections of which this rank writes blobs."""
    sections = [of.section for of in plan.local.plan.blobs if of.k == 0]
    constants = captured.constants
    return {
        section: encode_section(_take_values(captured, plan, section), section=section, registry=registry, constants=constants)
        for section in sections
    }


def _take_values(captured: Captured, plan: AgreedPlan, section: str) -> SectionValues:
    """What goes into this rank's payload of a section: the coordinator's whole tree, of others what nobody before them has."""
    tree = captured.trees.get(section, ABSENT)
    per_rank = {address: part.tree for address, part in captured.per_rank.items() if section_of(address) == section}
    if plan.common is not None:
        return SectionValues(tree, per_rank, plan.common.also.get(section, ()), plan.common.keys_in(section))
    owned = plan.owned.get(section, ())
    return SectionValues(pick_parts(tree, owned) if owned else ABSENT, per_rank)

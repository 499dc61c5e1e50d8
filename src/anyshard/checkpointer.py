"""The checkpointer of one process: keeps what is dear to make (warm blocks, plans, groups) and starts operations with it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from anyshard.agreed_plan import PlanCache
from anyshard.checkpoint import Checkpoint, ReadingMeans, open_checkpoint
from anyshard.coord.group import Group, make_lone_group
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Patience
from anyshard.engine.read import ReadJob
from anyshard.errors import CheckpointReplaced
from anyshard.monitor.events import Emitter, Sink
from anyshard.monitor.sinks import sinks_from_environment
from anyshard.operation import Operation
from anyshard.options import LoadOptions, SaveOptions
from anyshard.records.manifest import Parent
from anyshard.records.values import ValueRegistry
from anyshard.reports import LoadReport, SaveReport
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers.timed import TimedStore

if TYPE_CHECKING:
    from anyshard.coord.torch_dist import GroupLike

logger = logging.getLogger(__name__)

T = TypeVar("T")
Place: TypeAlias = str | os.PathLike[str] | Store

_TRIES = 5
_MAX_LOGGED = 256  # warnings that are remembered, so as not to be repeated at every save


@dataclass(slots=True)
class _Membership:
    """One group of ranks that this process is in, and what it keeps for it. Ranks agree on one thing at a time: by turns."""

    group: Group
    plans: PlanCache = field(default_factory=PlanCache)
    parent: Parent | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)


class Checkpointer:
    """Saves, loads and opens checkpoints; may be used from several threads, each call on its own."""

    def __init__(self, *, registry: ValueRegistry) -> None:
        self._registry = registry
        self._sinks = sinks_from_environment()
        self._pools: dict[tuple[int, int], BlockPool] = {}
        self._lock = threading.Lock()
        self._logged: deque[str] = deque(maxlen=_MAX_LOGGED)
        self._job: object = None
        self._memberships: dict[tuple[int, ...], _Membership] = {}

    def save(  # noqa: PLR0913 - what the public verb takes
        self,
        place: Place,
        app_state: Mapping[str, object],
        *,
        step: int | None,
        overwrite: bool,
        group: GroupLike,
        options: SaveOptions,
        sinks: Sequence[Sink],
    ) -> SaveReport:
        """See `anyshard.save`."""
        # Saving and loading need torch, opening does not: hence imports where they are used.
        from anyshard.adapters.values import torch_types
        from anyshard.saving import SaveIntent, SaveOperation, SavingMeans, find_step

        with self._taking_turn(group) as (membership, ranks):
            operating = self._operating("save", place, group=ranks, timeout_s=options.timeout_s, sinks=sinks)
            with operating as operation:
                intent = SaveIntent(find_step(operation.store, step), overwrite, options, membership.parent)
                pool = self._pool(options.byte_budget, options.block_nbytes)
                means = SavingMeans(pool, self._registry.extended(torch_types()), membership.plans)
                report = SaveOperation(operation, intent, means).run(app_state)
        self._log_warnings(report, ranks)
        return report

    def load(
        self,
        place: Place,
        app_state: Mapping[str, object],
        *,
        group: GroupLike,
        options: LoadOptions,
        sinks: Sequence[Sink],
    ) -> LoadReport:
        """See `anyshard.load`."""
        from anyshard.adapters.values import torch_types
        from anyshard.loading import LoadOperation

        with self._taking_turn(group) as (membership, ranks):
            operating = self._operating("load", place, group=ranks, timeout_s=options.timeout_s, sinks=sinks)
            with operating as operation:
                means = self._means(options, operation.events, self._registry.extended(torch_types()))
                loading = LoadOperation(operation, options, means)
                report = _read_again(lambda: loading.run(app_state))
                membership.parent = loading.parent
        self._log_warnings(report, ranks)
        return report

    def open(self, place: Place, *, options: LoadOptions, sinks: Sequence[Sink]) -> Checkpoint:
        """See `anyshard.open`."""
        operating = self._operating("open", place, group=make_lone_group(), timeout_s=options.timeout_s, sinks=sinks)
        with operating as operation:
            means = self._means(options, operation.events, self._registry)
            return _read_again(lambda: open_checkpoint(operation.store, means=means))

    @contextmanager
    def _taking_turn(self, group: GroupLike) -> Iterator[tuple[_Membership, Group]]:
        """The membership in a group and the group itself, for one operation. A process alone has not to wait for its turn."""
        membership = self._find_membership(group)
        if membership.group.size == 1:
            yield membership, make_lone_group(membership.group.ranks[0])
            return
        with membership.turn:
            yield membership, membership.group

    def _find_membership(self, group: GroupLike) -> _Membership:
        from anyshard.coord.torch_dist import find_ranks, job_token, make_group

        with self._lock:
            job = job_token()
            if job is not self._job:  # the ranks of another job are others, whatever their numbers are
                self._job, self._memberships = job, {}
            ranks = find_ranks(group)
            if ranks not in self._memberships:
                self._memberships[ranks] = _Membership(make_group(group))
            return self._memberships[ranks]

    @contextmanager
    def _operating(
        self, kind: str, place: Place, *, group: Group, timeout_s: float, sinks: Sequence[Sink]
    ) -> Iterator[Operation]:
        rank = group.ranks[group.rank]
        events = Emitter((*self._sinks, *sinks), operation=secrets.token_hex(8), rank=rank)
        store = TimedStore(open_store(place, events=events), timeout_s)
        with events.span(kind, file=store.url):
            yield Operation(store, group, events)

    def _means(self, options: LoadOptions, events: Emitter, registry: ValueRegistry) -> ReadingMeans:
        job = ReadJob(options.threads, events, Patience(options.timeout_s))
        return ReadingMeans(job, self._pool(options.byte_budget, options.block_nbytes), registry)

    def _log_warnings(self, report: SaveReport | LoadReport, group: Group) -> None:
        """Log what a report warns of, since reports are easily dropped: each thing once, and loudly by the coordinator only."""
        level = logging.WARNING if group.is_coordinator else logging.INFO
        for warning in report.warnings:
            if warning not in self._logged:
                self._logged.append(warning)
                logger.log(level, "%s: %s", report.url, warning)

    def _pool(self, byte_budget: int, block_nbytes: int) -> BlockPool:
        # Only the pool that was used last is kept: who changes sizes all the time must not collect pools.
        with self._lock:
            key = (byte_budget, block_nbytes)
            if key not in self._pools:
                self._pools = {key: BlockPool(byte_budget=byte_budget, block_nbytes=block_nbytes)}
            return self._pools[key]


def _read_again(read: Callable[[], T]) -> T:
    """What `read` returns, begun afresh while the checkpoint is saved over under it. Until it raises that, it changes nothing."""
    for _ in range(_TRIES - 1):
        with suppress(CheckpointReplaced):
            return read()
    return read()

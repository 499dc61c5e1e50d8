"""The checkpointer of one process: keeps what is dear to make (warm blocks, plans, groups) and starts operations with it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from anyshard.agreed_plan import PlanCache
from anyshard.checkpoint import Checkpoint, ReadingMeans, open_checkpoint
from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.turn import Turn
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Patience
from anyshard.engine.read import ReadJob
from anyshard.errors import CheckpointReplaced, InvalidOption
from anyshard.monitor.events import Emitter, Sink
from anyshard.monitor.sinks import sinks_from_environment
from anyshard.operation import Operation, patience_with_ranks
from anyshard.options import TIMEOUT_S, LoadOptions, SaveOptions
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
OptionsT = TypeVar("OptionsT", SaveOptions, LoadOptions)
Place: TypeAlias = str | os.PathLike[str] | Store

_TRIES = 5
_MAX_LOGGED = 256  # warnings that are remembered, so as not to be repeated at every save


@dataclass(slots=True)
class _Membership:
    """One group of ranks that this process is in, and what it keeps for it. Ranks agree on one thing at a time: by turns."""

    group: Group
    plans: PlanCache = field(default_factory=PlanCache)
    parent: Parent | None = None
    turn: Turn = field(default_factory=Turn)


class Checkpointer:
    """Saves, loads and opens checkpoints; may be used from several threads, each call on its own."""

    def __init__(self, *, registry: ValueRegistry) -> None:
        self._registry = registry
        self._sinks = sinks_from_environment()
        self._pools: dict[tuple[int, int], BlockPool] = {}
        self._lock = threading.RLock()  # a signal handler may save while this thread has it
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
        options: SaveOptions | None,
        sinks: Sequence[Sink],
    ) -> SaveReport:
        """See `anyshard.save`."""
        # Saving and loading need torch, opening does not: hence imports where they are used.
        from anyshard.adapters.values import torch_types
        from anyshard.saving import SaveIntent, SaveOperation, SavingMeans, find_step

        timeout_s = _timeout_of(options)
        with ExitStack() as stack:
            turn = self._taking_turn(f"the save to {_show(place)}", group, timeout_s=timeout_s)
            membership, ranks = stack.enter_context(turn)
            with _failing_together(ranks, timeout_s):
                chosen = _choose(SaveOptions, options)
                operation = stack.enter_context(self._operating("save", place, group=ranks, timeout_s=timeout_s, sinks=sinks))
                intent = SaveIntent(find_step(operation.store, step), overwrite, chosen, membership.parent)
                pool = self._pool(chosen.byte_budget, chosen.block_nbytes)
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
        options: LoadOptions | None,
        sinks: Sequence[Sink],
        **given: Any,
    ) -> LoadReport:
        """See `anyshard.load`; `given` are options that the call itself names, or None."""
        from anyshard.adapters.survey import check_app_state
        from anyshard.adapters.values import torch_types
        from anyshard.loading import LoadOperation

        timeout_s = _timeout_of(options)
        with ExitStack() as stack:
            turn = self._taking_turn(f"the load of {_show(place)}", group, timeout_s=timeout_s)
            membership, ranks = stack.enter_context(turn)
            with _failing_together(ranks, timeout_s):
                chosen = _choose(LoadOptions, options, **given)
                check_app_state(app_state)
                operation = stack.enter_context(self._operating("load", place, group=ranks, timeout_s=timeout_s, sinks=sinks))
                means = self._means(chosen, operation.events, self._registry.extended(torch_types()))
            loading = LoadOperation(operation, chosen, means)
            report = _read_again(lambda: loading.run(app_state))
            membership.parent = loading.parent
        self._log_warnings(report, ranks)
        return report

    def open(self, place: Place, *, options: LoadOptions | None, sinks: Sequence[Sink]) -> Checkpoint:
        """See `anyshard.open`."""
        chosen = _choose(LoadOptions, options)
        operating = self._operating("open", place, group=make_lone_group(), timeout_s=chosen.timeout_s, sinks=sinks)
        with operating as operation:
            means = self._means(chosen, operation.events, self._registry)
            return _read_again(lambda: open_checkpoint(operation.store, means=means))

    @contextmanager
    def _taking_turn(self, what: str, group: GroupLike, *, timeout_s: float) -> Iterator[tuple[_Membership, Group]]:
        """The membership in a group and the group itself, for one operation. A process alone has not to wait for its turn."""
        membership = self._find_membership(group, timeout_s)
        if membership.group.size == 1:
            yield membership, make_lone_group(membership.group.ranks[0])
            return
        with membership.turn.take(what, timeout_s):
            yield membership, membership.group

    def _find_membership(self, group: GroupLike, timeout_s: float) -> _Membership:
        from anyshard.coord.torch_dist import find_ranks, job_token, make_group

        job, ranks = job_token(), find_ranks(group)
        with self._lock:
            if job is not self._job:  # the ranks of another job are others, whatever their numbers are
                self._job, self._memberships = job, {}
            memberships = self._memberships
        if ranks not in memberships:  # not under the lock: this asks the job's store; of two threads the first one's stays
            memberships.setdefault(ranks, _Membership(make_group(group, timeout_s=timeout_s)))
        return memberships[ranks]

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
            pool = self._pools.get(key) or BlockPool(byte_budget=byte_budget, block_nbytes=block_nbytes)
            self._pools = {key: pool}
            return pool


def _show(place: Place) -> str:
    return place if isinstance(place, str) else str(getattr(place, "url", place))


@contextmanager
def _failing_together(group: Group, timeout_s: float) -> Iterator[None]:
    """For what a rank does before the ranks agree: an error of it ends the call on all of them, who would wait for it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised
        group.refuse(error, patience=patience_with_ranks(timeout_s))


def _timeout_of(options: object) -> float:
    return options.timeout_s if isinstance(options, SaveOptions | LoadOptions) else TIMEOUT_S


def _choose(kind: type[OptionsT], options: OptionsT | None, **given: Any) -> OptionsT:
    """The options of a call: `given` goes first, where it is not None."""
    if not isinstance(options, kind | None):
        raise InvalidOption(f"options: expected {kind.__name__}, found {type(options).__name__}; each verb has its own options")
    return replace(options or kind(), **{name: value for name, value in given.items() if value is not None})


def _read_again(read: Callable[[], T]) -> T:
    """What `read` returns, begun afresh while the checkpoint is saved over under it. Until it raises that, it changes nothing."""
    for _ in range(_TRIES - 1):
        with suppress(CheckpointReplaced):
            return read()
    return read()

"""The checkpointer of one process: keeps what is dear to make (warm blocks, plans, groups) and starts operations with it."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from anyshard.checkpoint import Checkpoint, ReadingMeans, open_checkpoint
from anyshard.commit.guard import Guards
from anyshard.coord.group import Group, make_lone_group
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Patience
from anyshard.engine.read import ReadJob
from anyshard.errors import CheckpointReplaced, InvalidOption
from anyshard.membership import Membership, Memberships
from anyshard.monitor.events import Emitter, Sink
from anyshard.monitor.sinks import sinks_from_environment
from anyshard.operation import Operation, patience_with_ranks
from anyshard.options import TIMEOUT_S, LoadOptions, SaveOptions
from anyshard.records.values import ValueRegistry
from anyshard.reports import LoadReport, PrepareReport, SaveReport
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers.timed import TimedStore

if TYPE_CHECKING:
    from anyshard.async_saving import Background
    from anyshard.coord.torch_dist import GroupLike
    from anyshard.pending import PendingSave
    from anyshard.planning.layouts import Layout
    from anyshard.save_intent import Lineage
    from anyshard.saving import SaveRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
OptionsT = TypeVar("OptionsT", SaveOptions, LoadOptions)
Place: TypeAlias = str | os.PathLike[str] | Store

_TRIES = 5
_MAX_LOGGED = 256  # warnings that are remembered, so as not to be repeated at every save


class Checkpointer:
    """Saves, loads and opens checkpoints; may be used from several threads, each call on its own."""

    def __init__(self, *, registry: ValueRegistry) -> None:
        self._registry = registry
        self._sinks = sinks_from_environment()
        self._pools: dict[tuple[int, int], BlockPool] = {}
        self._lock = threading.RLock()  # a signal handler may save while this thread has it
        self._logged: deque[str] = deque(maxlen=_MAX_LOGGED)
        self._memberships = Memberships()
        self._guards = Guards()
        self._waits_at_exit = False

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
        lineage: Lineage | None = None,
    ) -> SaveReport:
        """See `anyshard.save`; the `lineage` that counts is that of the coordinator."""
        # Saving and loading need torch, opening does not: hence imports where they are used.
        from anyshard.saving import SaveOperation
        from anyshard.snapshot import LiveSnapshot

        timeout_s = _timeout_of(options)
        membership = self._memberships.find(group, timeout_s)
        what = f"the save to {_show(place)}"
        membership.raise_earlier(what, timeout_s)
        with ExitStack() as stack:
            ranks = stack.enter_context(membership.take_turn(what, timeout_s))
            with _failing_together(ranks, timeout_s):
                chosen = _choose(SaveOptions, options)
                asked = _Asked(place=place, step=step, overwrite=overwrite, options=chosen, sinks=sinks, lineage=lineage)
                request = self._request(membership, ranks, asked)
            stack.enter_context(request.operation.events.span("save", file=request.operation.store.url))
            report = SaveOperation(request).run(LiveSnapshot(app_state, request.taking))
        self._log_warnings(report, ranks)
        return report

    def async_save(  # noqa: PLR0913 - what the public verb takes
        self,
        place: Place,
        app_state: Mapping[str, object],
        *,
        step: int | None,
        overwrite: bool,
        group: GroupLike,
        options: SaveOptions | None,
        sinks: Sequence[Sink],
        lineage: Lineage | None = None,
    ) -> PendingSave:
        """See `anyshard.async_save`; the `lineage` that counts is that of the coordinator."""
        from anyshard.progress import Progress

        began_s, timeout_s = time.perf_counter(), _timeout_of(options)
        membership = self._memberships.find(group, timeout_s)
        membership.check_outside(f"the call of async_save to {_show(place)}")
        background = self._find_background(membership)
        self._wait_at_exit()
        try:
            progress = Progress(membership.group.rank)
            chosen, all_sinks = _choose(SaveOptions, options), (*sinks, progress)
            asked = _Asked(place=place, step=step, overwrite=overwrite, options=chosen, sinks=all_sinks, lineage=lineage)
            ranks = membership.group if membership.group.size > 1 else make_lone_group(membership.group.ranks[0])
            request = self._request(membership, ranks, asked, began_s=began_s)
        except Exception as error:
            background.refuse(error, timeout_s)
            raise
        return background.save(app_state, request, progress)

    def prepare(  # noqa: PLR0913 - what the public verb takes
        self,
        place: Place,
        app_state: Mapping[str, object],
        *,
        also: Sequence[Layout],
        num_steps: int,
        step_s: float | None,
        group: GroupLike,
        options: SaveOptions | None,
        sinks: Sequence[Sink],
    ) -> PrepareReport:
        """See `anyshard.prepare`."""
        from anyshard.preparing import PrepareOperation, PreparingMeans
        from anyshard.rehearsal import Rehearsal

        timeout_s = _timeout_of(options)
        membership = self._memberships.find(group, timeout_s)
        what = f"the rehearsal of saves to {_show(place)}"
        membership.raise_earlier(what, timeout_s)
        background = self._find_background(membership)
        with ExitStack() as stack:
            ranks = stack.enter_context(membership.take_calls_and_turn(what, timeout_s))
            with _failing_together(ranks, timeout_s):
                chosen = _choose(SaveOptions, options)
                rehearsal = Rehearsal(num_steps, step_s, also, chosen)
                asked = _Asked(place=place, step=None, overwrite=False, options=chosen, sinks=sinks)
                request = self._request(membership, ranks, asked)
            stack.enter_context(request.operation.events.span("prepare", file=request.operation.store.url))
            means = PreparingMeans(request.pool, request.taking, background.means, self._guards)
            report = PrepareOperation(request.operation, rehearsal, means).run(app_state)
        self._log_warnings(report, ranks)
        return report

    def wait_all(self, timeout_s: float | None) -> None:
        """See `anyshard.wait_all`."""
        from anyshard.background import wait_all

        self._memberships.check_outside("wait_all")
        wait_all(self._memberships.savers, timeout_s)

    def find_group(self, group: GroupLike, timeout_s: float) -> Group:
        """The ranks that take part in the operations of `group`."""
        return self._memberships.find(group, timeout_s).group

    def hear_from_coordinator(self, what: str, find: Callable[[], bytes], *, group: GroupLike, timeout_s: float) -> bytes:
        """What `find` returns on the coordinator, on all ranks, which all call; so too what it raises. `what` names the call."""
        membership = self._memberships.find(group, timeout_s)
        with (
            membership.take_turn(what, timeout_s) as ranks,
            ranks.agree(what, patience=patience_with_ranks(timeout_s)) as agreement,
            agreement.phase("find"),
        ):
            if ranks.is_coordinator:
                agreement.announce("found", find())
            found = agreement.hear("found")
            agreement.post("heard", b"")
            if ranks.is_coordinator:
                agreement.collect("heard")
            agreement.decide()
            return found

    def _find_background(self, membership: Membership) -> Background:
        from anyshard.async_saving import Background

        group, take_turn = membership.group, membership.take_turn_of_saver
        tell = partial(self._log_warnings, group=group)
        return self._memberships.find_background(membership, lambda: Background(group, take_turn, tell))

    def _wait_at_exit(self) -> None:
        if not self._waits_at_exit:
            self._waits_at_exit = True
            atexit.register(self._finish_at_exit, os.getpid())

    def _finish_at_exit(self, pid: int) -> None:
        from anyshard.background import finish_at_exit

        if os.getpid() == pid:  # a fork has none of the threads
            finish_at_exit(self._memberships.savers)

    def _request(self, membership: Membership, ranks: Group, asked: _Asked, *, began_s: float | None = None) -> SaveRequest:
        """All that saving needs, from what the caller has said."""
        from anyshard.adapters.values import torch_types
        from anyshard.save_intent import Lineage, SaveIntent, find_step
        from anyshard.saving import SaveRequest
        from anyshard.snapshot import Taking

        options = asked.options
        operation = self._make_operation(asked.place, ranks, options=options, sinks=asked.sinks)
        lineage = asked.lineage or Lineage()
        intent = SaveIntent(find_step(operation.store, asked.step), asked.overwrite, options, membership.parent, lineage)
        registry = self._registry.extended(torch_types())
        longest = operation.store.capabilities.max_blob_nbytes
        max_blob_nbytes = options.max_blob_nbytes if longest is None else min(longest, options.max_blob_nbytes)
        taking = Taking(ranks, membership.find_captures(), membership.plans, registry, max_blob_nbytes)
        pool = self._pool(options.byte_budget, options.block_nbytes)
        operation = operation if began_s is None else replace(operation, started_s=began_s)
        return SaveRequest(operation, intent, taking, pool, self._guards)

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
        membership = self._memberships.find(group, timeout_s)
        with ExitStack() as stack:
            ranks = stack.enter_context(membership.take_turn(f"the load of {_show(place)}", timeout_s))
            with _failing_together(ranks, timeout_s):
                chosen = _choose(LoadOptions, options, **given)
                check_app_state(app_state)
                operation = stack.enter_context(self._operating("load", place, group=ranks, options=chosen, sinks=sinks))
                means = self._means(chosen, operation.events, self._registry.extended(torch_types()))
            loading = LoadOperation(operation, chosen, means)
            report = _read_again(lambda: loading.run(app_state))
            membership.parent = loading.parent
        self._log_warnings(report, ranks)
        return report

    def open(self, place: Place, *, options: LoadOptions | None, sinks: Sequence[Sink]) -> Checkpoint:
        """See `anyshard.open`."""
        chosen = _choose(LoadOptions, options)
        with self._operating("open", place, group=make_lone_group(), options=chosen, sinks=sinks) as operation:
            means = self._means(chosen, operation.events, self._registry)
            return _read_again(lambda: open_checkpoint(operation.store, means=means))

    @contextmanager
    def _operating(
        self, kind: str, place: Place, *, group: Group, options: LoadOptions, sinks: Sequence[Sink]
    ) -> Iterator[Operation]:
        operation = self._make_operation(place, group, options=options, sinks=sinks)
        with operation.events.span(kind, file=operation.store.url):
            yield operation

    def _make_operation(
        self, place: Place, group: Group, *, options: SaveOptions | LoadOptions, sinks: Sequence[Sink]
    ) -> Operation:
        rank = group.ranks[group.rank]
        events = Emitter((*self._sinks, *sinks), operation=secrets.token_hex(8), rank=rank)
        store = open_store(place, storage_options=options.storage_options, events=events)
        return Operation(TimedStore(store, options.timeout_s), group, events)

    def _means(self, options: LoadOptions, events: Emitter, registry: ValueRegistry) -> ReadingMeans:
        job = ReadJob(options.threads, events, Patience(options.timeout_s))
        return ReadingMeans(job, self._pool(options.byte_budget, options.block_nbytes), registry)

    def _log_warnings(self, report: SaveReport | LoadReport | PrepareReport, group: Group) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the caller of a save has said."""

    place: Place
    step: int | None
    overwrite: bool
    options: SaveOptions
    sinks: Sequence[Sink]
    lineage: Lineage | None = None


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

"""The checkpointer of one process: keeps what is dear to make (warm blocks, open sinks) and starts operations with it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from anyshard.checkpoint import Checkpoint, ReadingMeans, open_checkpoint
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

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 5


class Checkpointer:
    """Saves, loads and opens checkpoints; may be used from several threads, each call on its own."""

    def __init__(self, *, registry: ValueRegistry) -> None:
        self._registry = registry
        self._sinks = sinks_from_environment()
        self._pools: dict[tuple[int, int], BlockPool] = {}
        self._lock = threading.Lock()
        self._parent: Parent | None = None

    def save(  # noqa: PLR0913 - what the public verb takes
        self,
        place: str | os.PathLike[str] | Store,
        app_state: Mapping[str, object],
        *,
        step: int | None,
        overwrite: bool,
        options: SaveOptions,
        sinks: Sequence[Sink],
    ) -> SaveReport:
        """See `anyshard.save`."""
        # Saving and loading need torch, opening does not: hence imports where they are used.
        from anyshard.adapters.values import torch_types
        from anyshard.adapters.world import check_single_process
        from anyshard.saving import SaveIntent, SaveOperation, find_step

        check_single_process()
        with self._operating("save", place, timeout_s=options.timeout_s, sinks=sinks) as operation:
            intent = SaveIntent(find_step(operation.store, step), overwrite, options, self._parent)
            pool = self._pool(options.byte_budget, options.block_nbytes)
            registry = self._registry.extended(torch_types())
            report = SaveOperation(operation, intent, pool=pool, registry=registry).run(app_state)
        _log_warnings(report)
        return report

    def load(
        self,
        place: str | os.PathLike[str] | Store,
        app_state: Mapping[str, object],
        *,
        options: LoadOptions,
        sinks: Sequence[Sink],
    ) -> LoadReport:
        """See `anyshard.load`."""
        from anyshard.adapters.world import check_single_process

        check_single_process()
        with self._operating("load", place, timeout_s=options.timeout_s, sinks=sinks) as operation:
            report = _read_again(lambda: self._load(operation, app_state, options))
        _log_warnings(report)
        return report

    def _load(self, operation: Operation, app_state: Mapping[str, object], options: LoadOptions) -> LoadReport:
        from anyshard.adapters.values import torch_types
        from anyshard.loading import LoadOperation

        registry = self._registry.extended(torch_types())
        with open_checkpoint(operation.store, means=self._means(options, operation.events, registry)) as checkpoint:
            report = LoadOperation(operation, checkpoint, options, registry=registry).run(app_state)
        manifest = checkpoint.manifest
        self._parent = Parent(manifest.run_id, manifest.step, manifest.attempt)
        return report

    def open(self, place: str | os.PathLike[str] | Store, *, options: LoadOptions, sinks: Sequence[Sink]) -> Checkpoint:
        """See `anyshard.open`."""
        with self._operating("open", place, timeout_s=options.timeout_s, sinks=sinks) as operation:
            means = self._means(options, operation.events, self._registry)
            return _read_again(lambda: open_checkpoint(operation.store, means=means))

    @contextmanager
    def _operating(
        self, kind: str, place: str | os.PathLike[str] | Store, *, timeout_s: float, sinks: Sequence[Sink]
    ) -> Iterator[Operation]:
        events = Emitter((*self._sinks, *sinks), operation=secrets.token_hex(8), rank=0)
        store = TimedStore(open_store(place, events=events), timeout_s)
        with events.span(kind, file=store.url):
            yield Operation(store, events)

    def _means(self, options: LoadOptions, events: Emitter, registry: ValueRegistry) -> ReadingMeans:
        job = ReadJob(options.threads, events, Patience(options.timeout_s))
        return ReadingMeans(job, self._pool(options.byte_budget, options.block_nbytes), registry)

    def _pool(self, byte_budget: int, block_nbytes: int) -> BlockPool:
        # Only the pool that was used last is kept: who changes sizes all the time must not collect pools.
        with self._lock:
            key = (byte_budget, block_nbytes)
            if key not in self._pools:
                self._pools = {key: BlockPool(byte_budget=byte_budget, block_nbytes=block_nbytes)}
            return self._pools[key]


def _log_warnings(report: SaveReport | LoadReport) -> None:
    # Reports are easily dropped, and a warning there may be the only sign of, say, another optimizer's state.
    for warning in report.warnings:
        logger.warning("%s: %s", report.url, warning)


def _read_again(read: Callable[[], T]) -> T:
    """What `read` returns, begun afresh while the checkpoint is saved over under it. Until it raises that, it changes nothing."""
    for _ in range(_TRIES - 1):
        with suppress(CheckpointReplaced):
            return read()
    return read()

"""Events and spans of one operation, and the emitter that stamps them.

Every phase of a save or load is a span (`begin`, then `end` or `failed`) and every point at which a crash leaves another
state on storage is an event; tests kill the process at each of them through a sink.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from anyshard.errors import show_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One fact about an operation. `name` is dotted (`save.blob.durable`); unused fields are None.

    `time_s` is Unix time, `duration_s` is set on the last event of a span, `nbytes` counts what the event is about.
    """

    name: str
    operation: str
    rank: int
    time_s: float
    duration_s: float | None = None
    nbytes: int | None = None
    file: str | None = None
    address: str | None = None
    detail: str | None = None


class Sink(Protocol):
    """A place events go. `emit` is called on the thread where the thing happens and must be quick; its errors are logged."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class Emitter:
    """Stamps the events of one operation with its id and rank and hands them to all sinks."""

    def __init__(self, sinks: Sequence[Sink], *, operation: str, rank: int) -> None:
        self._sinks = tuple(sinks)
        self._operation = operation
        self._rank = rank

    @property
    def operation(self) -> str:
        """Id shared by all events of the operation."""
        return self._operation

    def event(  # noqa: PLR0913 - the fields of an event
        self,
        name: str,
        *,
        duration_s: float | None = None,
        nbytes: int | None = None,
        file: str | None = None,
        address: str | None = None,
        detail: str | None = None,
    ) -> None:
        """Emit one event. A sink that fails is logged, hears no more of this operation, and never disturbs it."""
        if not self._sinks:
            return
        event = Event(name, self._operation, self._rank, time.time(), duration_s, nbytes, file, address, detail)
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception:
                logger.exception("event sink %r failed on %s and is left out of this operation", sink, name)
                self._sinks = tuple(other for other in self._sinks if other is not sink)

    @contextmanager
    def span(self, name: str, *, nbytes: int | None = None, file: str | None = None) -> Iterator[None]:
        """Emit `<name>.begin`, then `<name>.end` with the duration, or `<name>.failed` with the error as detail."""
        self.event(f"{name}.begin", nbytes=nbytes, file=file)
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.event(f"{name}.failed", duration_s=time.perf_counter() - started, file=file, detail=show_error(error))
            raise
        self.event(f"{name}.end", duration_s=time.perf_counter() - started, nbytes=nbytes, file=file)


SILENT = Emitter((), operation="", rank=0)

"""Sinks: the log, a file of JSON lines, a list for tests."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from anyshard.monitor.events import Event

logger = logging.getLogger(__name__)

_FIELDS = tuple(field.name for field in fields(Event))
_RESULTS = frozenset({"save.end", "load.end", "copy.end"})


class LoggingSink:
    """Writes each event to a standard logger: failures as WARNING, the end of a save, load or copy as INFO, all else as DEBUG."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logging.getLogger("anyshard.events") if logger is None else logger

    def emit(self, event: Event) -> None:
        """Log one event."""
        level = _level(event.name)
        if self._logger.isEnabledFor(level):
            members = _members(event)
            name = members.pop("name")
            self._logger.log(level, "%s %s", name, " ".join(f"{key}={value}" for key, value in members.items()))


class JsonLinesSink:
    """Appends each event as one line of JSON, fields that are None left out; the line is handed over before `emit` returns.

    `target` is a path, opened for appending (several processes may share it), or a text stream, which stays the caller's.
    """

    def __init__(self, target: str | os.PathLike[str] | TextIO) -> None:
        self._owns = isinstance(target, (str, os.PathLike))
        self._stream: TextIO = _open_for_lines(target) if isinstance(target, (str, os.PathLike)) else target
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Append one event."""
        line = json.dumps(_members(event)) + "\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()

    def close(self) -> None:
        """Close the file if this sink opened it."""
        if self._owns:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def sinks_from_environment() -> tuple[JsonLinesSink, ...]:
    """The sink that ANYSHARD_EVENTS asks for, if it does. A file that cannot be opened is logged: it must not stop a job."""
    path = os.environ.get("ANYSHARD_EVENTS")
    try:
        return (JsonLinesSink(Path(path).expanduser()),) if path else ()
    except OSError as error:
        logger.warning("ANYSHARD_EVENTS: no events are written, for the file cannot be opened: %s", error)
        return ()


class RecordingSink:
    """Keeps all events in memory, for tests."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Keep one event."""
        with self._lock:
            self._events.append(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in the order of their arrival."""
        with self._lock:
            return tuple(self._events)

    def names(self) -> tuple[str, ...]:
        """The names of all events so far."""
        return tuple(event.name for event in self.events)


def _level(name: str) -> int:
    if name.endswith(".failed"):
        return logging.WARNING
    return logging.INFO if name in _RESULTS else logging.DEBUG


def _members(event: Event) -> dict[str, Any]:
    return {name: value for name in _FIELDS if (value := getattr(event, name)) is not None}


def _open_for_lines(path: str | os.PathLike[str]) -> TextIO:
    # Unbuffered below and written through: each line is one write to a file in append mode, so lines of processes do not mix.
    return io.TextIOWrapper(io.FileIO(path, "a"), encoding="utf-8", write_through=True)

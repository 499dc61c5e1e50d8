"""Progress: how far the save of one rank has come, as its events tell; and as other ranks are told."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import final

import msgspec

from anyshard.monitor.events import Event
from anyshard.records.packed import read_record

_WHAT = "progress of a rank"
_NOT_PHASES = ("save", "save.blob", "save.block")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where one rank is: its phase and for how many seconds, how many of its bytes are written, and to which file last.

    `nbytes` is 0 until it is known. The phase is "" for a rank that has not been heard of yet.
    """

    rank: int
    phase: str = ""
    phase_s: float = 0.0
    written_nbytes: int = 0
    nbytes: int = 0
    file: str = ""


class _Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    phase: str
    since_s: float  # Unix time
    written_nbytes: int
    nbytes: int
    file: str


@final
class Progress:
    """A sink of the events of one save that sums them up; may be asked from any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._word = _Word("begin", time.time(), 0, 0, "")
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Take one event."""
        what, _, verb = event.name.rpartition(".")
        if verb == "begin" and what not in _NOT_PHASES:
            phase = what.removeprefix("save.")
            with self._lock:
                nbytes = event.nbytes or self._word.nbytes
                self._word = msgspec.structs.replace(self._word, phase=phase, since_s=event.time_s, nbytes=nbytes)
        elif event.name == "save.block.written":
            with self._lock:
                written = min(self._word.written_nbytes + (event.nbytes or 0), self._word.nbytes)  # not what records add
                self._word = msgspec.structs.replace(self._word, written_nbytes=written, file=event.file or "")

    def encode(self) -> bytes:
        """This rank's word, for `decode_status` on another one."""
        return msgspec.msgpack.encode(self._word)

    def read(self) -> RankStatus:
        """This rank's status now."""
        return _describe(self._rank, self._word)


def decode_status(rank: int, word: bytes | None) -> RankStatus:
    """The status of a rank by what it has told last; raises `UnsupportedFormat` for anything else."""
    return RankStatus(rank) if word is None else _describe(rank, read_record(word, _Word, what=_WHAT))


def _describe(rank: int, word: _Word) -> RankStatus:
    phase_s = max(0.0, time.time() - word.since_s)
    return RankStatus(rank, word.phase, phase_s, word.written_nbytes, word.nbytes, word.file)

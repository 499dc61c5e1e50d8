"""The test's side of a world's processes: a wire, a process descriptor and a log for each rank, and what goes wrong there."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

from anyshard.testing.rank import log_path
from anyshard.testing.wire import SOCKET, Wire

_POLL_S = 0.05
_STACK_TIMEOUT_S = 1.0
_SHOWN_NBYTES = 8_000

ENDED = "the process ended without an answer"


class CaseFailed(AssertionError):
    """A case failed on some rank: `failures` maps each such rank to a traceback, or to why there is none."""

    def __init__(self, case: str, failures: Mapping[int, str], logs: Mapping[int, str]) -> None:
        super().__init__("\n".join([f"{case} failed on {len(failures)} rank(s)", *_group(failures), *_group(logs, "output of ")]))
        self.case = case
        self.failures = dict(failures)
        self.logs = dict(logs)


def _group(texts: Mapping[int, str], prefix: str = "") -> list[str]:
    """One paragraph per distinct text, after the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text.strip(), []).append(rank)
    return [f"--- {prefix}rank {', '.join(map(str, numbers))}:\n{text}" for text, numbers in ranks.items() if text]


def name_of(case: str | Callable[..., object]) -> str:
    """A case as `package.module:function`, which is how a rank finds it."""
    return case if isinstance(case, str) else f"{case.__module__}:{case.__qualname__}"


def make_listener(directory: Path) -> socket.socket:
    """Where ranks that `join` this directory connect."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / SOCKET))
    listener.listen()
    return listener


def read_tail(path: Path, start: int = 0) -> str:
    """The end of a log from byte `start` on, cut to what a person reads."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _SHOWN_NBYTES))
        return file.read().decode(errors="replace")


@final
class Ranks:
    """The processes of one world once all have said hello."""

    def __init__(self, directory: Path, hellos: Mapping[int, tuple[int, Wire]]) -> None:
        self._directory = directory
        self.pids = tuple(hellos[rank][0] for rank in sorted(hellos))
        self.wires = tuple(hellos[rank][1] for rank in sorted(hellos))
        # A descriptor stands for this process for ever; its number may be another process's tomorrow.
        self._descriptors = tuple(map(os.pidfd_open, self.pids))
        self._begins = [0] * len(self.pids)

    @classmethod
    def meet(cls, directory: Path, listener: socket.socket, size: int, *, deadline: float, check: Callable[[], None]) -> Ranks:
        """Wait for the hellos of `size` ranks; `check` is called often, to raise if they can no longer come."""
        hellos: dict[int, tuple[int, Wire]] = {}
        listener.settimeout(_POLL_S)
        while len(hellos) < size:
            check()
            if time.monotonic() > deadline:
                missing = dict.fromkeys(set(range(size)) - set(hellos), "it did not start in time")
                raise CaseFailed("start", missing, {rank: read_tail(log_path(directory, rank)) for rank in range(size)})
            try:
                wire = Wire(listener.accept()[0])
            except TimeoutError:
                continue
            hello = wire.receive(timeout_s=10)
            hellos[hello["rank"]] = (hello["pid"], wire)
        return cls(directory, hellos)

    def order(self, case: str, args: tuple[object, ...]) -> None:
        """Send a case to all ranks; one that has died since the last case shows when its answer is collected."""
        self._begins = [path.stat().st_size for path in self._log_paths()]
        for wire in self.wires:
            with contextlib.suppress(ConnectionError):
                wire.send({"case": case, "args": args})

    def signal(self, rank: int, number: int) -> None:
        """Send one rank a signal; one that has ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptors[rank], number)

    def read_logs(self) -> dict[int, str]:
        """What each rank has printed since the last order."""
        return {rank: read_tail(path, self._begins[rank]) for rank, path in enumerate(self._log_paths())}

    def read_stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where these ranks are now; nothing for one that cannot say."""
        begins = {rank: path.stat().st_size for rank, path in enumerate(self._log_paths()) if rank in set(ranks)}
        for rank in begins:
            self.signal(rank, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if all(self._log_paths()[rank].stat().st_size > begin for rank, begin in begins.items()):
                break
        return {rank: read_tail(self._log_paths()[rank], begin) for rank, begin in begins.items()}

    def kill(self) -> None:
        """Hang up on all ranks and kill them."""
        for rank, descriptor in enumerate(self._descriptors):
            self.signal(rank, signal.SIGKILL)
            os.close(descriptor)
        self._descriptors = ()
        for wire in self.wires:
            wire.close()

    def _log_paths(self) -> list[Path]:
        return [log_path(self._directory, rank) for rank in range(len(self.pids))]


def collect(ranks: Ranks, *, timeout_s: float, grace_s: float) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """The answers by rank, and the ranks that ended without one.

    Waits for all, but no longer than `grace_s` once one has failed, since others may wait for it for ever.
    """
    answers: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, wire in enumerate(ranks.wires):
            selector.register(wire, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                try:
                    answers[key.data] = ranks.wires[key.data].receive(timeout_s=max(left, 1))
                except (EOFError, TimeoutError):
                    ended.add(key.data)
                selector.unregister(key.fileobj)
                if ended or "error" in answers.get(key.data, ()):
                    deadline = min(deadline, time.monotonic() + grace_s)
    return answers, ended

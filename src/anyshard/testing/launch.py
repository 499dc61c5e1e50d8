"""`launch`: ranks of their own for one test, to be killed, stopped, or to end by themselves, in a fraction of a second.

    with launch("package.module:function", *args, size=4) as launched:
        launched.wait_until_stopped(1)            # rank 1 stopped itself where the test wants it
        launched.send_signal(0, signal.SIGKILL)
        launched.send_signal(1, signal.SIGCONT)
        ended = launched.wait(timeout_s=60)       # per rank: value or traceback, exit code

The ranks are forks of a warm process, so they share its hash seed and addresses (a `World`'s do not). They meet in a key-value
store that the test process holds, as an agent would, so that any rank may die first.
"""

from __future__ import annotations

import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in torch's list of exports

from anyshard.testing.processes import end_process, start_python
from anyshard.testing.ranks import CaseFailed, Ranks, make_listener, name_of, read_tail
from anyshard.testing.wire import Wire

_WARM_TIMEOUT_S: Final = 120.0
_START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended: the case's value, or the traceback of what it raised, or neither if it was killed before."""

    exit_code: int  # negative: the signal that killed it
    value: Any = None
    error: str | None = None


@final
class Launcher:
    """Launches ranks from one warm process, which is started at the first launch."""

    def __init__(self) -> None:
        self._zygote: _ZygoteHandle | None = None

    def __call__(self, case: str | Callable[..., object], *args: object, size: int) -> Launch:
        """Start `size` ranks that run the case once and end; returns when all have started."""
        if self._zygote is None:
            self._zygote = _ZygoteHandle.start()
        return Launch.start(self._zygote, name_of(case), args, size=size)

    def close(self) -> None:
        """End the warm process and with it all ranks."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


@final
class _ZygoteHandle:
    """The warm process, and what it has told of its children."""

    def __init__(self, process: Any, wire: Wire, directory: Path) -> None:
        self._process = process
        self.wire = wire
        self._directory = directory
        self.exit_codes: dict[int, int] = {}
        self.stopped: set[int] = set()

    @classmethod
    def start(cls) -> _ZygoteHandle:
        """Start it and wait until it is warm."""
        ours, theirs = socket.socketpair()
        directory = Path(tempfile.mkdtemp(prefix="zygote-"))
        log = directory / "log"
        with theirs, log.open("wb") as output:
            process = start_python(
                "anyshard.testing.zygote", str(theirs.fileno()), output=output.fileno(), keep=[theirs.fileno()]
            )
        handle = cls(process, Wire(ours), directory)
        try:
            handle.wire.receive(timeout_s=_WARM_TIMEOUT_S)
        except (EOFError, TimeoutError):
            message = f"the warm process did not start:\n{read_tail(log)}"
            handle.close()
            raise CaseFailed("launch", {0: message}, {}) from None
        return handle

    def take(self) -> None:
        """Receive one message about a child."""
        message = self.wire.receive(timeout_s=10)
        if message["stopped"]:
            self.stopped.add(message["pid"])
        else:
            self.exit_codes[message["pid"]] = message["code"]

    def close(self) -> None:
        """Hang up, which ends it and its children."""
        self.wire.close()
        end_process(self._process)
        shutil.rmtree(self._directory)


@final
class Launch:
    """The ranks of one launch. Leaving the `with` block kills those that are left."""

    def __init__(self, zygote: _ZygoteHandle, case: str, ranks: Ranks, directory: Path, store: TCPStore) -> None:
        self._zygote = zygote
        self._case = case
        self._ranks = ranks
        self._directory = directory
        self._store = store
        self._answers: dict[int, dict[str, Any]] = {}
        self._hung_up: set[int] = set()

    @classmethod
    def start(cls, zygote: _ZygoteHandle, case: str, args: tuple[object, ...], *, size: int) -> Launch:
        """Order the ranks from the warm process and wait until all have said hello."""
        directory = Path(tempfile.mkdtemp(prefix="launch-"))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            with make_listener(directory) as listener:
                order = {"case": case, "args": args, "size": size, "port": store.port, "directory": str(directory)}
                zygote.wire.send(order)
                deadline = time.monotonic() + _START_TIMEOUT_S
                ranks = Ranks.meet(directory, listener, size, deadline=deadline, check=lambda: None)
        except BaseException:
            shutil.rmtree(directory)
            raise
        return cls(zygote, case, ranks, directory, store)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.kill()
        self._pump(lambda: len(self._list_running()) == 0, timeout_s=_START_TIMEOUT_S)
        shutil.rmtree(self._directory)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank; one that has ended is left alone."""
        if number == signal.SIGCONT:
            self._zygote.stopped.discard(self._ranks.pids[rank])
        self._ranks.signal(rank, number)

    def wait_until_stopped(self, rank: int, *, timeout_s: float = 60) -> None:
        """Wait until a rank is stopped (by itself, or by a signal of the test); raises `CaseFailed` if it ends or is late."""
        pid = self._ranks.pids[rank]
        self._pump(lambda: pid in self._zygote.stopped or pid in self._zygote.exit_codes, timeout_s=timeout_s)
        if pid not in self._zygote.stopped:
            raise self._fail({rank: f"expected it to stop within {timeout_s} s"})

    def wait(self, *, timeout_s: float = 60) -> list[Ended]:
        """How each rank ended, in rank order; raises `CaseFailed` with the stacks of those that are still there in the end."""
        self._pump(lambda: len(self._list_running()) == 0, timeout_s=timeout_s)
        if running := self._list_running():
            stacks = self._ranks.read_stacks(running)
            raise self._fail({rank: f"still running; it is in:\n{stacks[rank]}" for rank in running})
        self._receive_answers(0)
        return [Ended(self._zygote.exit_codes[pid], **self._answers.get(rank, {})) for rank, pid in enumerate(self._ranks.pids)]

    def read_logs(self) -> dict[int, str]:
        """What each rank has printed."""
        return self._ranks.read_logs()

    def _fail(self, failures: dict[int, str]) -> CaseFailed:
        return CaseFailed(self._case, failures, self.read_logs())

    def _list_running(self) -> list[int]:
        return [rank for rank, pid in enumerate(self._ranks.pids) if pid not in self._zygote.exit_codes]

    def _pump(self, is_done: Callable[[], bool], *, timeout_s: float) -> None:
        """Take what ranks and the warm process tell until it is enough, or late."""
        deadline = time.monotonic() + timeout_s
        while not is_done() and (left := deadline - time.monotonic()) > 0:
            self._receive_answers(left)

    def _receive_answers(self, timeout_s: float) -> None:
        """Take what has arrived; wait for the first of it at most `timeout_s`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._zygote.wire, selectors.EVENT_READ, None)
            for rank, wire in enumerate(self._ranks.wires):
                if rank not in self._hung_up and rank not in self._answers and wire.fileno() >= 0:
                    selector.register(wire, selectors.EVENT_READ, rank)
            for key, _ in selector.select(timeout_s):
                if key.data is None:
                    self._zygote.take()
                else:
                    self._receive_answer(key.data)

    def _receive_answer(self, rank: int) -> None:
        try:
            self._answers[rank] = self._ranks.wires[rank].receive(timeout_s=10)
        except EOFError:
            self._hung_up.add(rank)

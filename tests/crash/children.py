"""Children of a warm process: each is a fork that does one thing and tells how it ended, if it lives that long."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


class Child:
    """A running fork. It reports one line of text per `report`, and its end."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    def wait_until_stopped(self) -> bool:
        """Whether the child stopped itself (it may also have ended)."""
        pid, status = os.waitpid(self._pid, os.WUNTRACED)
        assert pid == self._pid
        return os.WIFSTOPPED(status)

    def wake(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def result(self) -> list[str]:
        """The lines of the child, once it has ended; the last one says how."""
        with os.fdopen(self._pipe, encoding="utf-8") as pipe:
            lines = pipe.read().splitlines()
        _, status = os.waitpid(self._pid, 0)
        return [*lines, "killed"] if os.WIFSIGNALED(status) else lines


def fork(act: Callable[[Callable[[str], None]], None]) -> Child:
    """Run `act(report)` in a fork. An exception is reported as its class and ends the child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    os.close(reading)

    def report(line: str) -> None:
        os.write(writing, f"{line}\n".encode())

    try:
        act(report)
    except BaseException as error:  # noqa: BLE001 - the border of a process: reported, then the process ends
        report(f"{type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        os._exit(0)

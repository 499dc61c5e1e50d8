"""`World`: real ranks under one torchrun that stay alive and run named cases, so that a further case costs milliseconds.

    world = World(4)
    results = world.run("package.module:function", *args, timeout_s=60)      # one plain value per rank, or CaseFailed
    world.close()

A case is a module-level function that every rank imports by name and calls with the same plain arguments; the default process
group (gloo) is there. What it raises on any rank is raised in the test as one `CaseFailed` with rank -> traceback and what the
ranks have printed. A case that hangs or kills a rank ends this world's processes; the next `run` starts new ones. Meshes and
groups that cases make stay until then (see `layouts.make_mesh`).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

from anyshard.testing.processes import end_process, start_python
from anyshard.testing.ranks import ENDED, CaseFailed, Ranks, collect, make_listener, name_of, read_tail

MAX_RANKS: Final = 8

_START_TIMEOUT_S = 180.0
_GRACE_S = 5.0


@final
class World:
    """`size` ranks, started at the first `run`. For one thread at a time."""

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(
                f"expected 1 to {MAX_RANKS} ranks, found {size}: more would only wait for each other on a test machine"
            )
        self.size = size
        self.num_starts = 0
        self._running: tuple[Path, subprocess.Popen[bytes], Ranks] | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: str | Callable[..., object], *args: object, timeout_s: float = 60) -> list[Any]:
        """What the case returns on each rank, in rank order; or `CaseFailed`, at the latest a few seconds after `timeout_s`."""
        ranks = self._start()
        ranks.order(name_of(case), args)
        answers, ended = collect(ranks, timeout_s=timeout_s, grace_s=_GRACE_S)
        if len(answers) == self.size and not any("error" in answer for answer in answers.values()):
            return [answers[rank]["value"] for rank in range(self.size)]
        failures = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        logs = ranks.read_logs()
        silent = set(range(self.size)) - set(answers)
        stacks = ranks.read_stacks(silent - ended)
        failures |= {rank: ENDED if rank in ended else f"no answer; it is in:\n{stacks[rank]}" for rank in silent}
        if silent:
            self.close()
        raise CaseFailed(name_of(case), failures, logs)

    def close(self) -> None:
        """End the processes, whatever they are doing. The next `run` starts new ones."""
        if self._running is None:
            return
        directory, agent, ranks = self._running
        self._running = None
        ranks.kill()
        end_process(agent)
        shutil.rmtree(directory)

    def _start(self) -> Ranks:
        if self._running is None:
            directory = Path(tempfile.mkdtemp(prefix="world-"))
            try:
                self._running = _start_world(directory, self.size)
            except BaseException:
                shutil.rmtree(directory)
                raise
            self.num_starts += 1
        return self._running[2]


def _start_world(directory: Path, size: int) -> tuple[Path, subprocess.Popen[bytes], Ranks]:
    log = directory / "agent.log"
    with make_listener(directory) as listener, log.open("wb") as output:
        torchrun = ["torch.distributed.run", "--standalone", "--max-restarts=0", f"--nproc-per-node={size}"]
        agent = start_python(*torchrun, "-m", "anyshard.testing.rank", str(directory), output=output.fileno())

        def check() -> None:
            if agent.poll() is not None:
                raise CaseFailed("start", {0: f"torchrun ended with {agent.returncode}:\n{read_tail(log)}"}, {})

        try:
            ranks = Ranks.meet(directory, listener, size, deadline=time.monotonic() + _START_TIMEOUT_S, check=check)
        except BaseException:
            agent.terminate()  # torchrun ends its ranks then; we do not know them yet
            end_process(agent)
            raise
    return directory, agent, ranks


@final
class Worlds:
    """The worlds of a test session by size, each started when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """The world of this size."""
        return self._worlds.setdefault(size, World(size))

    def close(self) -> None:
        """End all processes, at once rather than one world after another."""
        if self._worlds:
            with ThreadPoolExecutor(len(self._worlds)) as pool:
                list(pool.map(World.close, self._worlds.values()))

"""A rank's side of `World`: run under torchrun as `-m anyshard.testing.rank DIRECTORY`, it answers cases until it is ended."""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from anyshard.testing.wire import Wire, connect, pack


def find_case(name: str) -> Callable[..., object]:
    """The function that `package.module:function` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert callable(found)
    return found  # type: ignore[no-any-return]


def join(directory: Path, rank: int) -> Wire:
    """Make this process rank `rank` of a world that is held in `directory`: its output goes there, its stack on SIGUSR1 too.

    The process dies when the holder of the world hangs up.
    """
    log = os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    wire = connect(directory)
    wire.send({"rank": rank, "pid": os.getpid()})
    return wire


def log_path(directory: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return directory / f"rank-{rank}.log"


def listen(wire: Wire) -> queue.SimpleQueue[dict[str, Any]]:
    """The orders that arrive on the wire, received by a thread that kills the process when the other end is gone."""
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def receive_all() -> None:
        try:
            while True:
                orders.put(wire.receive())
        except EOFError:  # whatever the main thread is stuck in, this ends it
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=receive_all, name="anyshard-testing-orders", daemon=True).start()
    return orders


def answer(order: dict[str, Any]) -> bytes:
    """Run one case and pack its value, or the traceback of whatever it raised."""
    try:
        return pack({"value": find_case(order["case"])(*order["args"])})
    except BaseException:  # noqa: BLE001 - the border of a process: it goes to the test as text
        return pack({"error": traceback.format_exc()})


def main() -> None:
    """Join the process group that torchrun describes, then the world, and answer cases."""
    dist.init_process_group("gloo")
    wire = join(Path(sys.argv[1]), dist.get_rank())
    orders = listen(wire)
    while True:
        wire.send_packed(answer(orders.get()))


if __name__ == "__main__":
    main()

"""A warm process that forks ranks: run as `-m anyshard.testing.zygote DESCRIPTOR` by `Launcher`.

It has imported what ranks need and has a single thread, so a rank costs a fork and not seconds of imports. It tells the other
end of the descriptor when one of its children has stopped or ended, and kills all of them when that end is gone.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in torch's list of exports

from anyshard.testing.rank import find_case, join, listen
from anyshard.testing.wire import Wire

# The last two bring what torch and pyarrow import at the first DTensor and the first index: half a second in every rank.
_WARM = (
    "anyshard.checkpointer",
    "anyshard.saving",
    "anyshard.async_saving",
    "anyshard.loading",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.debug",
    "pyarrow.compute",
)


@final
class Zygote:
    """Forks ranks on order."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._children: set[int] = set()

    def serve(self) -> dict[str, Any] | None:
        """Fork on order until the other end is gone: then None. In a child: its order, with its rank."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._wire, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                if reading in ready:
                    os.read(reading, 4096)
                    self._reap()
                if self._wire.fileno() in ready and (order := self._receive()) is not None:
                    if (rank := self._fork(order["size"])) is not None:
                        break
                elif self._wire.fileno() in ready:
                    return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(reading)
        os.close(writing)
        self._wire.close()
        return {**order, "rank": rank}

    def _receive(self) -> dict[str, Any] | None:
        try:
            return self._wire.receive()
        except EOFError:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
            return None

    def _fork(self, size: int) -> int | None:
        """In a child: its rank."""
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                return rank
            self._children.add(pid)
        return None

    def _reap(self) -> None:
        """Tell what has happened to the children."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._wire.send({"pid": pid, "stopped": True})
                continue
            self._children.discard(pid)
            self._wire.send({"pid": pid, "stopped": False, "code": os.waitstatus_to_exitcode(status)})


def run(order: dict[str, Any]) -> None:
    """Be a rank: join the process group, run the case, answer, and end as a script would."""
    random.seed()  # or all children of the zygote would draw the same numbers
    wire = join(Path(order["directory"]), order["rank"])
    listen(wire)
    store = TCPStore("127.0.0.1", order["port"], is_master=False)
    dist.init_process_group("gloo", store=store, rank=order["rank"], world_size=order["size"])
    try:
        value = find_case(order["case"])(*order["args"])
    except BaseException:
        wire.send({"error": traceback.format_exc()})
        raise
    wire.send({"value": value})


def main() -> None:
    """Get warm, then serve; a child returns from there too and becomes its rank."""
    for module in _WARM:
        importlib.import_module(module)
    gc.freeze()  # children share what is there
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    wire.send({"pid": os.getpid()})
    order = Zygote(wire).serve()
    if order is not None:
        run(order)


if __name__ == "__main__":
    main()

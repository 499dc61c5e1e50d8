"""What ranks run in the tests of `World` and `launch`."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist


def tell_rank(*args: object) -> tuple[int, int, tuple[object, ...]]:
    return dist.get_rank(), dist.get_world_size(), args


def add_up() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def tell_pid() -> int:
    return os.getpid()


def fail_on(rank: int) -> int:
    """Fails on one rank; no other waits for it."""
    if dist.get_rank() == rank:
        print(f"rank {rank} is about to fail")
        raise ValueError(f"rank {rank} has a problem")
    return dist.get_rank()


def fail_before_barrier(rank: int) -> None:
    fail_on(rank)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def kill_self(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever()
    return rank


def return_object() -> object:
    return object()


def stop_self(rank: int) -> float:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    return add_up()


def end_as_scripts_do(path: str) -> float:
    """One rank raises, one exits with a code, the others return; all of them have something to do at exit."""
    rank = dist.get_rank()
    atexit.register(Path(path, f"{rank}").write_text, "left", encoding="utf-8")
    if rank == 1:
        raise RuntimeError("rank 1 gives up")
    if rank == 2:
        raise SystemExit(7)
    return random.random()

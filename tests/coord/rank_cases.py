"""What real ranks do in the tests of `test_real_ranks.py`."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from anyshard.coord.bounded import Caller
from anyshard.coord.looks import Patience
from anyshard.coord.torch_dist import find_ranks, job_token, make_group
from anyshard.errors import OperationFailed
from tests.coord.thread_ranks import LONG, save

PATIENCE = Patience(timeout_s=2)
Outcome = tuple[str, dict[int, str], str]


def die_after_the_decision() -> Outcome:
    """The coordinator dies between its `COMMIT` and the word that the others wait for."""
    group = make_group()
    save(group, "save 0", patience=LONG)
    with group.agree("save 1", patience=PATIENCE) as agreement:
        agreement.decide()
        if group.is_coordinator:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            agreement.hear("published")
        except OperationFailed as error:
            return type(error).__name__, error.failures, str(agreement.decision)
    raise AssertionError("heard what nobody has said")


def freeze(frozen: int, at: str) -> tuple[str, dict[int, str], bytes]:
    """One rank is frozen in a phase of the first save. The others stop when they have given up, and all go on together."""
    group = make_group()
    save(group, "save 0", patience=LONG)
    kind, failures = "", {}
    try:
        with group.agree("save 1", patience=PATIENCE) as agreement:
            for phase in ("table", "durable"):
                if (group.rank, phase) == (frozen, at):
                    os.kill(os.getpid(), signal.SIGSTOP)
                agreement.post(phase, b"")
                if group.is_coordinator:
                    agreement.announce(phase, b"".join(agreement.collect(phase)))
                agreement.hear(phase)
            agreement.decide()
    except OperationFailed as error:
        kind, failures = type(error).__name__, error.failures
    if group.rank != frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    return kind, failures, save(group, "save 2", patience=LONG)


def press_ctrl_c(interrupted: int) -> tuple[str, dict[int, str], bool, bytes]:
    """One rank is interrupted while it waits; how it and the others end, whether soon, and that the next save works."""
    group = make_group()
    save(group, "save 0", patience=LONG)
    kind, failures = "", {}
    began_s = time.monotonic()
    try:
        with group.agree("save 1", patience=LONG) as agreement:
            if group.rank == interrupted:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            agreement.hear("what nobody says")
    except (KeyboardInterrupt, OperationFailed) as error:
        kind, failures = type(error).__name__, getattr(error, "failures", {})
    return kind, failures, time.monotonic() - began_s < 15, save(group, "save 2", patience=LONG)


def freeze_in_a_call() -> str:
    """The process is frozen while the key-value store answers."""

    def stop() -> str:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "answered"

    return Caller().ask(stop, 1.0)


def save_as_every_group() -> dict[str, object]:
    """Saves as the whole job, as a list, as a process group, one after the other as one group, and after the job's end."""
    pair = dist.new_group([0, 2])
    kept = make_group()
    found: dict[str, object] = {"job": save(make_group()), "list": save(make_group([2, 1, 0]))}
    found["group"] = save(make_group(pair)) if dist.get_rank() != 1 else None
    found["kept"] = [save(kept, f"save {step}") for step in range(3)]
    dist.destroy_process_group()
    found["after"] = save(kept, "after the group is gone")
    return found


def tell_ranks_and_tokens(path: str) -> dict[str, object]:
    """What a rank finds of its job, and of the next job of the same processes."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    first = job_token()
    found: dict[str, object] = {
        "all": find_ranks(None),
        "list": find_ranks([rank, 1] if rank != 1 else [1]),
        "group": find_ranks(pair) if rank != 1 else None,
        "stays": first is job_token(),
    }
    dist.destroy_process_group()
    found["without"] = job_token(), find_ranks(None)
    dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    found["is_new"] = job_token() not in (None, first) and job_token() is job_token()
    return found

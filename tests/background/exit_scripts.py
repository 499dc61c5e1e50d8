"""What the ranks of a launch do in the tests of asynchronous saves at the end of their processes, of one of them, or of a job."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partialmethod
from typing import NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist

import anyshard
from anyshard.background import Saver
from anyshard.errors import StorageError
from anyshard.storage.local import LocalStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, LatencyStore, Rule, Verb, do_before, fail
from tests.ranks.death_cases import IMPATIENT, PATIENT, Outcome, Strike, end_at_once, make_state, tell

VICTIM = 2
SLOW_S = 0.5  # of each write, so that a save is under way when its caller goes on
EXIT_S = 4.0  # how long the end of a process waits for a storage that does not answer
STAY_S = 3.0  # how long the coordinator's process stays for ranks that are dead and so never hear how a save has ended
NO_THREADS = "can't create new thread at interpreter shutdown"  # as from Python 3.12 on

SHORT = anyshard.SaveOptions(timeout_s=3.0)
BRIEF = anyshard.SaveOptions(exit_timeout_s=EXIT_S)


def host() -> None:
    """Let rank 0 hold the key-value store of the job from now on, as without a launcher."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port: list[int | None] = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port[0]}", rank=rank, world_size=size)


def stay_briefly() -> None:
    """Let no process stay as long for dead ranks as it does out there."""
    patch.object(Saver, "await_heard", partialmethod(Saver.await_heard, STAY_S)).start()


def slow(place: str) -> Store:
    """Storage whose writes take some time."""
    return LatencyStore(LocalStore(place), {Verb.WRITE_AT: SLOW_S})


def save_last(place: str, is_hosted: bool) -> None:
    """A script whose last line is a save."""
    if is_hosted:
        host()
    anyshard.async_save(slow(f"{place}/step_2"), make_state("2"), step=2)


def save_then_destroy(place: str, is_hosted: bool) -> None:
    """As above, with the process group destroyed behind it."""
    save_last(place, is_hosted)
    dist.destroy_process_group()


def save_two_last(place: str, is_hosted: bool) -> None:
    """The last lines are two saves, of which the second one begins when the process ends."""
    save_last(place, is_hosted)
    anyshard.async_save(slow(f"{place}/step_3"), make_state("3"), step=3, options=anyshard.SaveOptions(max_in_flight=2))


def save_without_threads(place: str, is_hosted: bool) -> None:
    """As `save_two_last` in an interpreter that starts no threads once it ends."""
    save_two_last(place, is_hosted)
    start_no_threads_at_exit()


def start_no_threads_at_exit() -> None:
    """From the first exit handler on, do as Python 3.12 does."""
    atexit.register(patch.object(threading.Thread, "start", refuse_thread).start)


def refuse_thread(_thread: threading.Thread) -> NoReturn:
    """What Python 3.12 says then."""
    raise RuntimeError(NO_THREADS)


def raise_before(place: str, is_hosted: bool) -> None:
    """One rank ends with an exception before its call."""
    if is_hosted:
        host()
    stay_briefly()
    if dist.get_rank() == VICTIM:
        raise ValueError("a mistake before the save")
    anyshard.async_save(f"{place}/step_2", {"model": {"w": torch.ones(3)}}, options=SHORT)


def raise_between(place: str, is_hosted: bool) -> None:
    """As above, of a structure that was saved before, so that no call waits for the plan."""
    if is_hosted:
        host()
    stay_briefly()
    anyshard.save(f"{place}/step_1", make_state("1"))
    if dist.get_rank() == VICTIM:
        raise ValueError("a mistake before the save")
    anyshard.async_save(f"{place}/step_2", make_state("2"), options=SHORT)


def raise_after(place: str, is_hosted: bool) -> None:
    """One rank ends with an exception after its call."""
    save_last(place, is_hosted)
    if dist.get_rank() == VICTIM:
        raise ValueError("a mistake after the save")


def exit_after(place: str, is_hosted: bool) -> None:
    """All ranks end by sys.exit."""
    save_last(place, is_hosted)
    sys.exit(3)


def leave_at_once(place: str, is_hosted: bool) -> None:
    """One rank ends by os._exit behind its call, the one that holds the key-value store if there is one."""
    if is_hosted:
        host()
    stay_briefly()
    anyshard.save(f"{place}/step_1", make_state("1"))
    anyshard.async_save(slow(f"{place}/step_2"), make_state("2"), step=2, options=SHORT)
    if dist.get_rank() == (0 if is_hosted else VICTIM):
        os._exit(0)


def be_terminated(place: str, is_hosted: bool) -> None:
    """All ranks get a SIGTERM behind their calls."""
    anyshard.save(f"{place}/step_1", make_state("1"))
    anyshard.async_save(slow(f"{place}/step_2"), make_state("2"), step=2)
    os.kill(os.getpid(), signal.SIGTERM)


def hang(place: str, is_hosted: bool) -> None:
    """The storage of one rank does not answer any more."""
    if is_hosted:
        host()
    store: Store = LocalStore(f"{place}/step_2")
    if dist.get_rank() == VICTIM:
        store = FaultStore(store, [Rule(Verb.WRITE_AT, "*", do_before(threading.Event().wait))])
    anyshard.async_save(store, make_state("2"), step=2, options=BRIEF)


def fail_last(place: str, is_hosted: bool) -> None:
    """The storage of one rank fails when nobody will call again."""
    store: Store = slow(f"{place}/step_2")
    if dist.get_rank() == VICTIM:
        store = FaultStore(store, [Rule(Verb.WRITE_AT, "*", fail(StorageError("the disk is gone", file="x")))])
    anyshard.async_save(store, make_state("2"), step=2)


# ------------------------------------------------------------------------------------------------------- one process alone


def save_in_exit_handlers(place: str) -> None:
    """Saves asynchronously and otherwise when no threads can be started any more: first, planned, lazily, a failure, a load."""
    model = torch.nn.Linear(128, 128)  # large enough to be lazy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    lazy = anyshard.SaveOptions(staging="lazy")

    def save_all() -> None:
        anyshard.async_save(f"{place}/step_1", state)
        anyshard.async_save(f"{place}/step_2", state).committed(10)
        lazily = anyshard.async_save(f"{place}/step_3", state, options=lazy)
        assert lazily.staging.lazy_nbytes > 0, lazily.staging
        store = FaultStore(LocalStore(f"{place}/step_4"), [Rule(Verb.WRITE_AT, "*", fail(StorageError("gone", file="x")))])
        _expect_failure(lambda: anyshard.async_save(store, {"other": torch.ones(2)}, step=4).committed(10))
        _expect_failure(lambda: anyshard.async_save(f"{place}/step_5", {"other": object()}))
        anyshard.save(f"{place}/step_6", state)
        anyshard.load(f"{place}/step_6", state)
        anyshard.wait_all(10)

    atexit.register(save_all)
    start_no_threads_at_exit()


def _expect_failure(act: Callable[[], object]) -> None:
    try:
        act()
    except anyshard.AnyshardError:
        return
    raise AssertionError("expected a failure, found none")


# --------------------------------------------------------------------------------------------- deaths, frozen ranks, new jobs


class _StrikeHere(Strike):
    """A strike that stops the thread that meets it at once; others of its process may get a little further."""

    def _hit(self) -> None:
        self._at = ""
        signal.pthread_kill(threading.get_ident(), self._number)


def save_and_strike(place: str, number: int, at: str, victim: int) -> Outcome:
    """Save step 1, then step 2 asynchronously, in which one rank is struck while all train on; how the next call ends."""
    end_at_once()
    stay_briefly()
    anyshard.save(f"{place}/step_1", make_state("1"), options=PATIENT)
    sink = _StrikeHere(number, at, rank=victim)
    pending = anyshard.async_save(f"{place}/step_2", make_state("2"), options=IMPATIENT, sinks=[sink])
    num_steps = 0
    while not pending.is_done:
        threading.Event().wait(0.01)
        num_steps += 1
    has_trained = num_steps > 0
    return {**tell(lambda: anyshard.async_save(f"{place}/step_3", make_state("3"), options=PATIENT)), "trained": has_trained}


def save_and_freeze(place: str, at: str, victim: int) -> tuple[Outcome, Outcome]:
    """As `save_and_strike`, but the rank is frozen until the others have given up; then all save step 4 together."""
    outcome = save_and_strike(place, int(signal.SIGSTOP), at, victim)
    if dist.get_rank() != victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return outcome, tell(lambda: anyshard.async_save(f"{place}/step_4", make_state("1"), options=PATIENT).committed(30))


def begin_new_jobs(place: str) -> list[bool]:
    """Save asynchronously in three jobs, each of which begins while the save of the one before it is under way."""
    pending = []
    for step in (1, 2, 3):
        pending.append(anyshard.async_save(slow(f"{place}/run_{step}/step_{step}"), make_state(str(step)), step=step))
        was_done = pending[-1].is_done
        if step < 3:
            host()
    anyshard.wait_all(30)
    return [was_done, *(one.is_done for one in pending)]

"""What the ranks of a world do in the tests of asynchronous saves: late, changed, failing and mixed calls, groups, status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import anyshard
from anyshard.background import Saver
from anyshard.coord.turn import Turn
from anyshard.errors import StorageError
from anyshard.storage.local import LocalStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, LatencyStore, Rule, Verb, do_before, fail
from tests.ranks.agreement_cases import Moments, await_writes_of_others, count_calls_and_groups, count_resources, make_state

Outcome = dict[str, Any]

NUM_CALLS = 7
WAIT_S = 50.0
RING = anyshard.SaveOptions(max_in_flight=3)


def tell(act: Callable[[], object]) -> object:
    """How a call ends: its value, or the class of its error with the failed ranks, their phases and classes."""
    try:
        return act()
    except anyshard.AnyshardError as error:
        failures = error.failures if isinstance(error, anyshard.OperationFailed) else {}
        return [type(error).__name__, {rank: text.split(": ")[:2] for rank, text in failures.items()}]


def come_late(place: str, late: int) -> Outcome:
    """Save twice; to the second save one rank comes late, when the others have written."""
    told = Path(place) / "told"
    state, moments = make_state("async_late"), Moments(told)
    anyshard.async_save(f"{place}/step_1", state).committed(WAIT_S)
    dist.barrier()
    if dist.get_rank() == late:
        await_writes_of_others(told)
    called_s = time.time()
    pending = anyshard.async_save(f"{place}/step_2", state, sinks=[moments])
    returned_s = time.time()
    report = pending.committed(WAIT_S)
    times_s = {"called": called_s, "returned": returned_s, "written": moments.times_s["save.write.end"], "committed": time.time()}
    return {"times_s": times_s, "cached": report.plan_was_cached, "stall_s": report.stall_s}


def count_collectives(place: str) -> dict[str, list[int]]:
    """How many collectives are called and process groups made by a first asynchronous save and by a later one."""
    state = make_state("async_counted")
    counted = {}
    for step in (1, 2):
        before = count_calls_and_groups()
        anyshard.async_save(f"{place}/step_{step}", state).committed(WAIT_S)
        counted[f"step {step}"] = [now - then for now, then in zip(count_calls_and_groups(), before, strict=True)]
    return counted


def change(place: str, name: str, changing: Sequence[int], waits: bool, limit: int) -> list[object]:
    """Save seven times; at the third time the structure has changed on some ranks, for good. At most `limit` are under way."""
    options = anyshard.SaveOptions(max_in_flight=limit)
    state = make_state(name)
    outcomes: list[object] = []
    for step in range(1, NUM_CALLS + 1):
        if step == 3 and dist.get_rank() in changing:
            state["model"]["grown"] = torch.ones(2)
        begin = partial(anyshard.async_save, f"{place}/step_{step}", state, options=options)
        outcomes.append(tell(partial(_call, begin, waits)))
        dist.barrier()
    return [*outcomes, tell(lambda: anyshard.wait_all(WAIT_S))]


def _call(begin: Callable[[], anyshard.PendingSave], waits: bool) -> object:
    pending = begin()
    return {"cached": pending.committed(WAIT_S).plan_was_cached} if waits else None


def fail_and_go_on(place: str, failing: int, waiting: Sequence[int]) -> Outcome:
    """The storage of one rank fails in step 2, and only some ranks wait for that; all go on to call steps 3 to 5."""
    state = make_state("async_failing")
    anyshard.async_save(f"{place}/step_1", state).committed(WAIT_S)
    store: Store = LocalStore(f"{place}/step_2")
    if dist.get_rank() == failing:
        store = FaultStore(store, [Rule(Verb.WRITE_AT, "*", fail(StorageError("the disk is gone", file="x")))])
    pending = anyshard.async_save(store, state, step=2)
    waited = tell(lambda: pending.committed(WAIT_S)) if dist.get_rank() in waiting else None
    calls: list[object] = []
    ends: list[object] = []
    for step in (3, 4, 5):
        call = tell(partial(anyshard.async_save, f"{place}/step_{step}", state))
        calls.append("begun" if isinstance(call, anyshard.PendingSave) else call)
        ends.append(tell(partial(_await_step, call)) if isinstance(call, anyshard.PendingSave) else None)
    return {"waited": waited, "calls": calls, "ends": ends}


def _await_step(pending: anyshard.PendingSave) -> int | None:
    return pending.committed(WAIT_S).step


def fail_without_waiting(place: str, failing: int) -> list[object]:
    """As above with a ring, nobody waits for anything, and training goes on: what eight calls raise."""
    state, steps = make_state("async_ring"), torch.zeros(1)
    outcomes: list[object] = []
    for step in range(1, 9):
        store: Store = LocalStore(f"{place}/step_{step}")
        if dist.get_rank() == failing and step == 2:
            store = FaultStore(store, [Rule(Verb.WRITE_AT, "*", fail(StorageError("the disk is gone", file="x")))])
        call = tell(partial(anyshard.async_save, store, state, step=step, options=RING))
        outcomes.append(None if isinstance(call, anyshard.PendingSave) else call)
        dist.all_reduce(steps)
    return [*outcomes, tell(lambda: anyshard.wait_all(WAIT_S))]


def fail_in_places(places: Sequence[str], failing: int, limit: int) -> list[object]:
    """What calls raise that save to each of the places, and the storage of one rank fails at the second; nobody waits for it."""
    state, options = make_state("async_places"), anyshard.SaveOptions(max_in_flight=limit)
    outcomes: list[object] = []
    for number, place in enumerate(places):
        store: Store = LocalStore(place)
        if dist.get_rank() == failing and number == 1:
            store = FaultStore(store, [Rule(Verb.WRITE_AT, "*", fail(StorageError("the disk is gone", file="x")))])
        call = tell(partial(anyshard.async_save, store, state, step=number, options=options))
        outcomes.append(None if isinstance(call, anyshard.PendingSave) else call)
        dist.barrier()
    return [*outcomes, tell(lambda: anyshard.wait_all(WAIT_S))]


def leave_out(place: str, absent: int, num: int, is_blocking: bool) -> list[bool]:
    """Eleven saves, of which one rank leaves out the third and so many; which of its own calls succeeded on this rank."""
    state, outcomes = make_state("async_left_out"), list[bool]()
    for step in range(1, 12):
        if dist.get_rank() == absent and 3 <= step < 3 + num:
            continue
        outcome = tell(partial(_save, f"{place}/step_{step}", state, is_blocking))
        outcomes.append(isinstance(outcome, anyshard.SaveReport))
    return outcomes


def _save(place: str, state: dict[str, Any], is_blocking: bool) -> anyshard.SaveReport:
    return anyshard.save(place, state) if is_blocking else anyshard.async_save(place, state).committed(WAIT_S)


def break_a_call(place: str, broken: int, how: str) -> list[object]:
    """The third call of one rank ends before it has begun anything; all ranks go on."""
    state, options = make_state("async_broken"), anyshard.SaveOptions(timeout_s=5)
    outcomes: list[object] = []
    for step in range(1, 5):
        with _breaking(how) if (step, dist.get_rank()) == (3, broken) else nullcontext():
            outcomes.append(tell(partial(_save_patiently, f"{place}/step_{step}", state, options)))
    return outcomes


@contextmanager
def _breaking(how: str) -> Iterator[None]:
    """Let a call meet Ctrl-C while it waits for room, or find another thread in a call."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def refuse(*_: object) -> None:
        raise anyshard.OperationFailed("expected the turn", {})

    verb, act = ("await_room", interrupt) if how == "interrupt" else ("take", refuse)
    with patch.object(Saver if how == "interrupt" else Turn, verb, act):
        yield


def _save_patiently(place: str, state: dict[str, Any], options: anyshard.SaveOptions) -> int | str | None:
    try:
        pending = anyshard.async_save(place, state, options=options)
    except KeyboardInterrupt:
        return "interrupted"
    return pending.committed(WAIT_S).step


def mix(place: str) -> Outcome:
    """Asynchronous and blocking saves and loads in a row, the tensors changed before each, on storage that is slow."""
    state = make_state("async_mixed")
    tensor = state["model"]["bias"]
    ends: list[int] = []
    pending: list[anyshard.PendingSave] = []

    def begin(step: int) -> None:
        tensor.fill_(step)
        store = LatencyStore(LocalStore(f"{place}/step_{step}"), {Verb.WRITE_AT: 0.04 * (5 - step)})
        pending.append(anyshard.async_save(store, state, step=step, options=RING, sinks=[_Ends(step, ends)]))

    for step in (1, 2, 3):
        begin(step)
    tensor.fill_(4)
    were_done = [one.is_done for one in pending[1:]]
    anyshard.save(f"{place}/step_4", state, sinks=[_Ends(4, ends)])
    begin(5)
    anyshard.load(f"{place}/step_5", state)
    loaded = [float(tensor[0])]
    begin(6)
    anyshard.load(f"{place}/step_2", state)
    loaded.append(float(tensor[0]))
    anyshard.wait_all(WAIT_S)
    return {"ends": ends, "loaded": loaded, "were_done": were_done}


class _Ends:
    """A sink that notes the end of a save."""

    def __init__(self, step: int, ends: list[int]) -> None:
        self._step = step
        self._ends = ends

    def emit(self, event: anyshard.Event) -> None:
        if event.name == "save.end":
            self._ends.append(self._step)


def save_in_groups(place: str) -> list[object]:
    """Ranks 0 and 1 as a list and 2 and 3 as another one save asynchronously at the same time, then all together."""
    rank = dist.get_rank()
    group = [0, 1] if rank < 2 else [2, 3]
    state = {"model": {f"of_{rank}": torch.full((5,), rank)}}
    own = [anyshard.async_save(f"{place}/group_{group[0]}/step_{step}", state, group=group, options=RING) for step in (1, 2)]
    joint = anyshard.async_save(f"{place}/all/step_1", state)
    return [one.committed(WAIT_S).num_tensors for one in (*own, joint)]


def ask_status(place: str, stuck: int) -> list[Outcome]:
    """What rank 0 is told of all ranks while the store of one of them does not answer."""
    state = make_state("async_status")
    anyshard.async_save(f"{place}/step_1", state).committed(WAIT_S)
    gate = threading.Event()
    store: Store = LocalStore(f"{place}/step_2")
    if dist.get_rank() == stuck:
        store = FaultStore(store, [Rule(Verb.WRITE_AT, "*", do_before(gate.wait))])
    pending = anyshard.async_save(store, state, step=2)
    statuses: tuple[anyshard.RankStatus, ...] = ()
    if dist.get_rank() == 0:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and not _is_clear(statuses := pending.status()):
            threading.Event().wait(0.1)
    dist.barrier()
    gate.set()
    pending.committed(WAIT_S)
    return [asdict(status) for status in statuses]


def _is_clear(statuses: Sequence[anyshard.RankStatus]) -> bool:
    return all(one.nbytes and one.phase_s > 1 for one in statuses)


def save_often(place: str, counted: Sequence[int]) -> list[tuple[int, ...]]:
    """Save asynchronously over one place and load it again and again; what there is in the job after so many times."""
    state = make_state("async_often")
    counts = []
    options = anyshard.SaveOptions(overwrite_grace_s=0)
    for number in range(1, counted[-1] + 1):
        anyshard.async_save(place, state, step=1, overwrite=True, options=options)
        if number % 10 == 0:
            anyshard.load(place, state)
        if number in counted:
            anyshard.wait_all(WAIT_S)
            counts.append(count_resources())
    return counts

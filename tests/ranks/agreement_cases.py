"""What the ranks of a world do in the tests of agreement: late, missing, changed and restarted ranks, and groups."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Shard, distribute_tensor

import anyshard
from anyshard import _api
from anyshard.testing.fill import Fill, fill
from anyshard.testing.layouts import make_mesh

Outcome = dict[str, Any]

SHORT_S = 3.0
WRITTEN_S = 30.0  # until ranks that wait for nobody have written
IMPATIENT = anyshard.SaveOptions(timeout_s=SHORT_S)


class Moments:
    """A sink that keeps when the first event of each name came; by a file in `told` others hear that this rank has written."""

    def __init__(self, told: Path | None = None) -> None:
        self.times_s: dict[str, float] = {}
        self._told = told

    def emit(self, event: anyshard.Event) -> None:
        self.times_s.setdefault(event.name, event.time_s)
        if self._told is not None and event.name == "save.write.end":
            self._told.mkdir(exist_ok=True)
            (self._told / f"{dist.get_rank()}").touch()


def await_writes_of_others(told: Path) -> None:
    """Return when all ranks but this one have written."""
    deadline = time.monotonic() + WRITTEN_S
    while not told.exists() or len(list(told.iterdir())) < dist.get_world_size() - 1:
        assert time.monotonic() < deadline, "the others wait for this rank before they write"
        threading.Event().wait(0.01)


def make_state(name: str, *, seed: str = "") -> dict[str, dict[str, Any]]:
    """A tensor that lies on all ranks, under a name of its own, so that no plan of another case is for it."""
    tensor = torch.zeros(4000)
    fill(tensor, seed, kind=Fill.FINITE)
    mesh = make_mesh(("dp", dist.get_world_size()))
    return {"model": {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None), "bias": torch.ones(3)}}


def tell_save(place: str, state: dict[str, Any], *, options: anyshard.SaveOptions | None = None) -> Outcome:
    """How a save ends: whether its plan was cached, or its error."""
    return _tell(lambda: {"cached": anyshard.save(place, state, options=options).plan_was_cached})


def tell_load(place: str, state: dict[str, Any], *, options: anyshard.LoadOptions | None = None) -> Outcome:
    """How a load ends: how many tensors it has filled, or its error."""
    return _tell(lambda: {"loaded": anyshard.load(place, state, options=options).num_tensors})


def _tell(act: Callable[[], Outcome]) -> Outcome:
    try:
        return act()
    except anyshard.OperationFailed as error:
        failures = {rank: text.split(" within ")[0] for rank, text in error.failures.items()}  # however long they have waited
        return {"error": type(error).__name__, "failures": failures}


def count_collectives(place: str) -> dict[str, list[int]]:
    """How many collectives are called and process groups made by a first save, a later one, a load, and an all_reduce."""
    state = make_state("counted")
    acts: dict[str, Callable[[], object]] = {
        "planned save": lambda: anyshard.save(f"{place}/step_1", state),
        "save": lambda: anyshard.save(f"{place}/step_2", state),
        "load": lambda: anyshard.load(f"{place}/step_2", state),
        "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
    }
    counted = {}
    for name, act in acts.items():
        before = count_calls_and_groups()
        act()
        counted[name] = [now - then for now, then in zip(count_calls_and_groups(), before, strict=True)]
    return counted


def count_calls_and_groups() -> tuple[int, int]:
    # Whatever thread a collective is called on, and through whatever interface, its process group numbers it.
    groups = list(distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups), len(groups)


def come_late(place: str, late: int) -> Outcome:
    """Save twice; to the second save one rank comes late, when the others have written."""
    told = Path(place) / "told"
    state, moments = make_state("late"), Moments(told)
    anyshard.save(f"{place}/step_1", state)
    dist.barrier()
    if dist.get_rank() == late:
        await_writes_of_others(told)
    called_s = time.time()
    report = anyshard.save(f"{place}/step_2", state, sinks=[moments])
    return {"called_s": called_s, "times_s": moments.times_s, "cached": report.plan_was_cached}


def save_on_some(place: str, callers: Sequence[int]) -> list[Outcome]:
    """The second save is called on some ranks, on the others when those have given up; then all save."""
    state = make_state("some")
    anyshard.save(f"{place}/step_1", state)
    outcomes = _call_in_turn(callers, lambda: tell_save(f"{place}/step_2", state, options=IMPATIENT))
    return [*outcomes, tell_save(f"{place}/step_2", state)]


def load_on_some(place: str, callers: Sequence[int]) -> list[Outcome]:
    """As `save_on_some`, of a load."""
    state = make_state("some")
    anyshard.save(place, state)
    outcomes = _call_in_turn(callers, lambda: tell_load(place, state, options=anyshard.LoadOptions(timeout_s=SHORT_S)))
    return [*outcomes, tell_load(place, state)]


def _call_in_turn(callers: Sequence[int], call: Callable[[], Outcome]) -> list[Outcome]:
    outcomes = []
    for is_turn in (True, False):
        dist.barrier()
        if (dist.get_rank() in callers) == is_turn:
            outcomes.append(call())
    dist.barrier()
    return outcomes


def save_apart(place: str) -> list[Outcome]:
    """Rank 1 saves to another place than all others; then all save to the same one."""
    state = make_state("apart")
    anyshard.save(f"{place}/step_1", state)
    step = 2 if dist.get_rank() == 1 else 3
    return [tell_save(f"{place}/step_{step}", state), tell_save(f"{place}/step_4", state)]


def load_apart(place: str) -> tuple[Outcome, bool, Outcome]:
    """Rank 1 loads another step than all others, then all load the same one; whether the first changed anything."""
    for step, name in ((1, "apart"), (2, "other")):
        state = make_state("apart", seed=name)
        anyshard.save(f"{place}/step_{step}", state)
    before = state["model"]["apart"].to_local().clone()
    outcome = tell_load(f"{place}/step_{2 if dist.get_rank() == 1 else 1}", state)
    is_unchanged = torch.equal(before, state["model"]["apart"].to_local())
    return outcome, is_unchanged, tell_load(f"{place}/step_1", state)


def change(place: str, name: str, changing: Sequence[int]) -> list[Outcome]:
    """Save five times; after the second time the structure changes on some ranks, for good."""
    state = make_state(name)
    outcomes = []
    for step in range(1, 6):
        if step == 3 and dist.get_rank() in changing:
            state["model"]["grown"] = torch.ones(2)
        outcomes.append(tell_save(f"{place}/step_{step}", state))
    return outcomes


def restart(place: str, name: str, restarting: Sequence[int]) -> list[Outcome]:
    """Save five times; after the second time some ranks forget all that a new process would not know."""
    state = make_state(name)
    outcomes = []
    for step in range(1, 6):
        if step == 3 and dist.get_rank() in restarting:
            _api._checkpointer.cache_clear()
        dist.barrier()
        outcomes.append(tell_save(f"{place}/step_{step}", state, options=IMPATIENT))
    return outcomes


def save_in_groups(place: str) -> Outcome:
    """Even ranks as a list and odd ones as a process group save and load at the same time, each at a place of its own."""
    odd = dist.new_group([1, 3])
    rank = dist.get_rank()
    group = odd if rank % 2 else [2, 0]
    state = {"model": {f"of_{rank}": torch.full((5,), rank)}}
    report = anyshard.save(f"{place}/group_{rank % 2}", state, group=group)
    state["model"][f"of_{rank}"].zero_()
    anyshard.load(f"{place}/group_{rank % 2}", state, group=group)
    return {"num_tensors": report.num_tensors, "loaded": state["model"][f"of_{rank}"].tolist()}


def save_on_members(place: str) -> str:
    """Ranks 0 and 2 save, the others do not call, but for rank 3, which is no member."""
    rank = dist.get_rank()
    if rank == 1:
        return "went on"
    try:
        anyshard.save(place, {"model": {"w": torch.ones(3)}}, group=[0, 2])
    except anyshard.InvalidOption:
        return "refused"
    return "saved"


def save_often(place: str, counted: Sequence[int]) -> list[tuple[int, ...]]:
    """Save over one place and load it again and again; what there is in the job after so many times."""
    state = make_state("often")
    counts = []
    for number in range(1, counted[-1] + 1):
        anyshard.save(place, state, step=1, overwrite=True, options=anyshard.SaveOptions(overwrite_grace_s=0))
        if number % 5 == 0:
            anyshard.load(place, state)
        if number in counted:
            counts.append(count_resources())
    return counts


def count_resources() -> tuple[int, ...]:
    """Keys, threads, descriptors, process groups, at a moment when no rank is doing anything."""
    for thread in threading.enumerate():
        if thread.name == "anyshard-storage":  # ends as soon as it has been idle for a while
            thread.join(timeout=10)
    dist.barrier()
    num_keys = distributed_c10d._get_default_store().num_keys()
    counts = num_keys, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(distributed_c10d._world.pg_map)
    dist.barrier()
    return counts

"""What the ranks do in the tests of preemption: train, meet in collectives, save through a run, and be told to stop.

Run as `-m tests.run.preemption_scripts CASE PLACE` by torchrun; the launcher of the tests calls the cases by name.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import anyshard
from anyshard.coord.group import make_lone_group
from anyshard.run.data_workers import shield_worker
from anyshard.run.preemption import PreemptionWatch
from anyshard.storage.local import LocalStore
from anyshard.storage.wrappers import LatencyStore, Verb

NUM_STEPS = 12
HELD_AT = 5  # the step in which rank 1 keeps all others in a collective
WAIT_S = 60.0
SLOW_S = 0.3
DEADLINE_S = 25.0


def meet(place: str, name: str) -> None:
    """Tell the test that this rank has come so far."""
    (Path(place) / f"{name}.{dist.get_rank()}").write_text(str(os.getpid()))


def await_file(place: str, name: str) -> None:
    """Wait until the test says so."""
    deadline = time.monotonic() + WAIT_S
    while not (Path(place) / name).exists():
        assert time.monotonic() < deadline, f"{name} has not come"
        threading.Event().wait(0.01)


def await_decision(run: anyshard.Run) -> None:
    """Wait until the ranks have agreed where to stop."""
    deadline = time.monotonic() + WAIT_S
    watch = run._pace._watch
    assert watch is not None
    assert watch._summons is not None
    while watch._summons.stop_call is None:
        assert time.monotonic() < deadline, "no decision has come"
        threading.Event().wait(0.01)


class Job:
    """A small model, trained in step with the other ranks: the same on all of them, from batches that are of step and rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    @property
    def app_state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        self.model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        values = [parameter.detach() for parameter in self.model.parameters()]
        values += [state["exp_avg_sq"] for state in self.optimizer.state.values()]
        return torch.cat([value.flatten() for value in values]).numpy().tobytes().hex()


def train(place: str, act: str = "") -> dict[str, object]:
    """Train to the end or until told to stop; how this rank ended. With an `act` of the test step `HELD_AT` lasts until then."""
    job = Job()
    preemption = anyshard.Preemption(deadline_s=DEADLINE_S, notice=Notice(place) if act == "notice" else None)
    with anyshard.Run(f"{place}/run", every=anyshard.EverySteps(4), preemption=preemption) as run:
        report = run.restore_or_init(job.app_state)
        first = 0 if report is None else report.step + 1
        for step in range(first, NUM_STEPS):
            if step == HELD_AT and act:
                meet(place, "ready")
                if dist.get_rank() == 1:  # the others are in a collective meanwhile
                    await_decision(run)
            job.train(step)
            run.end_step(step, job.app_state)
            if run.should_stop:
                break
    return {"step": step, "stopped": run.should_stop, "digest": job.digest()}


class Notice:
    """What a cloud tells one machine."""

    def __init__(self, place: str) -> None:
        self._file = Path(place) / "notice"

    def __call__(self) -> bool:
        return dist.get_rank() == 2 and self._file.exists()


def die_before_the_others_are_told(place: str) -> None:
    """The last rank is killed in the midst of a step, while the others wait for it in a collective."""
    if dist.get_rank() == dist.get_world_size() - 1:
        threading.Thread(target=_die_at, args=(place,), daemon=True).start()
    train(place, "die")


def _die_at(place: str) -> None:
    await_file(place, "die")
    os.kill(os.getpid(), signal.SIGKILL)


def never_come_again(place: str) -> None:
    """The signal comes, and no call of `end_step` any more."""
    job = Job()
    with anyshard.Run(f"{place}/run", preemption=anyshard.Preemption(deadline_s=1.0, roll_call_s=0.5)) as run:
        run.restore_or_init(job.app_state)
        job.train(0)
        run.end_step(0, job.app_state)
        meet(place, "ready")
        await_file(place, "never")


class Words(Dataset[torch.Tensor]):
    """Data that come slowly."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(0.05)
        return torch.full((16,), float(index % 7))


def load_data(place: str, how: str) -> dict[str, object]:
    """Train on what data workers load, saving asynchronously all the time; `how` these are started."""
    if how == "fork":
        os.setpgid(0, 0)  # as torchrun does it, so that the test can signal this rank and its data workers
    job = Job()
    store = LatencyStore(LocalStore(f"{place}/run"), {Verb.WRITE_AT: SLOW_S})
    loader = DataLoader(
        Words(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=how,
        worker_init_fn=shield_worker if how == "spawn" else None,
    )
    preemption = anyshard.Preemption(deadline_s=DEADLINE_S)
    with anyshard.Run(store, every=anyshard.EverySteps(2), preemption=preemption) as run:
        run.restore_or_init(job.app_state)
        for step, _ in enumerate(loader):
            job.train(step)
            run.end_step(step, job.app_state)
            if run.should_stop:
                break
            if step == 4:
                meet(place, "ready")
    return {"step": step, "stopped": run.should_stop}


# ------------------------------------------------------------------------------------------------------------------ children


def have_children() -> dict[str, object]:
    """What signals do to children of a rank that hears them: one of multiprocessing, and a plain fork."""
    with _open_watch() as watch:
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_echo, args=(theirs,), daemon=True)
        child.start()
        subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
        ours.send("alive")
        answer = ours.recv() if ours.poll(20) else None
        child.terminate()
        child.join(20)
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        watch.count_call()
        return {"answer": answer, "terminated": child.exitcode, "fork": status, "is_told": watch.deadline_left_s < math.inf}


def _open_watch() -> PreemptionWatch:
    watch = PreemptionWatch(anyshard.Preemption())
    watch.open(make_lone_group().open_channel("one"))
    return watch


def _echo(wire: Connection) -> None:
    while True:
        wire.send(wire.recv())


CASES = {
    "train": lambda place: train(place, "signal"),
    "die": die_before_the_others_are_told,
    "spawn": lambda place: load_data(place, "spawn"),
}


def main() -> None:
    """Be one rank under torchrun; leave what the case returns in a file."""
    case, place = sys.argv[1:]
    dist.init_process_group("gloo")
    value = CASES[case](place)
    (Path(place) / f"ended.{dist.get_rank()}").write_text(repr(value))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Interrupts saves at every event and prints one JSON object per case: `python -m tests.crash.runner DIRECTORY`.

Kill: a save is killed by SIGKILL at its n-th event, for every n; every second time a clean comes before the next save.
Change: a thinning, and a delete of a step in parts, are killed in the same way.
Stop: a save is stopped by SIGSTOP at the first event of each name, somebody else acts, and it wakes up.
What is seen afterwards is judged by test_crash.py, which runs this script once.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch

import anyshard
from anyshard import ops
from anyshard.commit.publish_parts import Publication, publish_parts
from anyshard.commit.resolve import resolve
from anyshard.commit.thinning import thin_step
from anyshard.monitor.events import Emitter, Sink
from anyshard.storage.local import LocalStore
from tests.crash.children import fork

Report = Callable[[str], None]

ROLES = ("actor", "critic")
SEEDS = {"blank": 0, "old": 1, "new": 2, "next": 3}
OPTIONS = anyshard.SaveOptions(byte_budget=1 << 20, block_nbytes=1 << 17, threads=2, overwrite_grace_s=0)
LOAD_OPTIONS = anyshard.LoadOptions(byte_budget=4 << 20, block_nbytes=1 << 20, threads=2)


def make_state(name: str) -> dict[str, object]:
    """A state of two sections whose every byte depends on its name."""
    bits = np.arange(40_000, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(SEEDS[name])
    model = {"w": torch.from_numpy(bits.copy().view(np.int32)), "b": torch.full((3,), SEEDS[name])}
    return {"model": model, "extra": {"table": bits[::2].copy(), "n": SEEDS[name]}}


def to_bytes(state: dict[str, object]) -> bytes:
    """All bytes of a state, in order."""
    model, extra = state["model"], state["extra"]
    assert isinstance(model, dict)
    assert isinstance(extra, dict)
    return b"".join((model["w"].numpy().tobytes(), model["b"].numpy().tobytes(), extra["table"].tobytes(), b"%d" % extra["n"]))


def look(place: Path) -> str:
    """Which state a reader gets: a name, `none`, `torn`, or the error."""
    state = make_state("blank")
    try:
        anyshard.load(place, state, options=LOAD_OPTIONS)
    except anyshard.CheckpointNotFound:
        return "none"
    except anyshard.AnyshardError as error:
        return f"{type(error).__name__}: {error}"
    found = to_bytes(state)
    return next((name for name in SEEDS if found == to_bytes(make_state(name))), "torn")


class Interrupt:
    """A sink that reports each event and sends the process a signal at the n-th one, or at the first one of a name."""

    def __init__(self, report: Report, at: int | str | None, signal_number: int) -> None:
        self._report = report
        self._at = at
        self._signal = signal_number
        self._seen = 0
        self._lock = threading.Lock()

    def emit(self, event: anyshard.Event) -> None:
        with self._lock:
            self._seen += 1
            self._report(event.name)
            if self._at in (self._seen, event.name):
                self._at = None
                os.kill(os.getpid(), self._signal)


def save_new(place: Path, at: int | str | None, signal_number: int) -> Callable[[Report], None]:
    def act(report: Report) -> None:
        sink = Interrupt(report, at, signal_number)
        anyshard.save(place, make_state("new"), overwrite=True, options=OPTIONS, sinks=[sink])
        report("saved")

    return act


def save_next(place: Path) -> None:
    anyshard.save(place, make_state("next"), overwrite=True, options=OPTIONS)


def clean(place: Path) -> None:
    ops.clean(place, older_than_s=0, grace_s=0)


def in_fork(*steps: Callable[[], object]) -> list[str]:
    """What the steps give, one by one, in one fork; an error is the last line."""

    def act(report: Report) -> None:
        for step in steps:
            report(str(step()))

    return fork(act).result()


def attempts_left(place: Path) -> int:
    """How many attempts have files there."""
    return len({path.name.rsplit("-", 1)[-1].split(".")[0] for path in place.rglob("*-*-*")})


def aftermath(place: Path, *, clean_first: bool) -> list[str]:
    """What is seen, after a clean (or again), after the next save, after a last clean, and how many attempts are left."""
    seen = in_fork(
        lambda: look(place),
        lambda: (clean(place) if clean_first else None, look(place))[1],
        lambda: (save_next(place), look(place))[1],
        lambda: (clean(place), look(place))[1],
        lambda: attempts_left(place),
    )
    shutil.rmtree(place.parent)
    return seen


def prepare(directory: Path, before: str, number: int) -> Path:
    """A place of its own with what was there before."""
    place = directory / f"{number}_{before}" / "step_1"
    if before == "old":
        shutil.copytree(directory / "old" / "step_1", place)
    return place


def record_events(directory: Path, before: str) -> list[str]:
    """Names of the events of an undisturbed save, in order."""
    *names, end = fork(save_new(prepare(directory, before, 0), None, 0)).result()
    assert end == "saved", end
    return names


def run_kills(directory: Path, before: str, names: list[str]) -> Iterator[dict[str, object]]:
    for nth in range(1, len(names) + 1):
        place = prepare(directory, before, nth)
        *events, end = fork(save_new(place, nth, signal.SIGKILL)).result()
        seen = aftermath(place, clean_first=nth % 2 == 0)
        yield {"mode": "kill", "before": before, "events": events, "end": end, "seen": seen}


OTHERS = {"writer": save_next, "cleaner": clean}


def run_stops(directory: Path, before: str, names: list[str]) -> Iterator[dict[str, object]]:
    for number, (name, other) in enumerate((name, other) for name in dict.fromkeys(names) for other in OTHERS):
        place = prepare(directory, before, 10_000 + number)
        child = fork(save_new(place, name, signal.SIGSTOP))
        stopped = child.wait_until_stopped()
        acted = in_fork(partial(look, place), partial(OTHERS[other], place), partial(look, place))
        child.wake()
        end = child.result()[-1]
        seen = [*acted, *aftermath(place, clean_first=False)]
        yield {"mode": "stop", "before": before, "other": other, "at": name, "stopped": stopped, "end": end, "seen": seen}


# Thinning, and deleting a step in parts -------------------------------------------------------------------------------------


def make_thin(place: Path) -> None:
    shutil.copytree(place.parents[1] / "old" / "step_1", place)


def make_parts(place: Path) -> None:
    for role in ROLES:
        shutil.copytree(place.parents[1] / "old" / "step_1", place / "parts" / role)
    publish_parts(LocalStore(place), Publication(1, dict.fromkeys(ROLES)))


def thin(place: Path, sink: Sink | None = None) -> None:
    events = Emitter(() if sink is None else (sink,), operation="thin", rank=0)
    thin_step(LocalStore(place, events=events), ("model",), events=events)


def delete(place: Path, sink: Sink | None = None) -> None:
    ops.delete(place, sinks=() if sink is None else (sink,))


def look_thin(place: Path) -> str:
    """`whole`, `thin`, or what else there is; every byte of it was compared."""
    with anyshard.open(place) as checkpoint:
        is_whole = "extra" in checkpoint.sections
    found = make_state("blank") if is_whole else {"model": make_state("blank")["model"]}
    anyshard.load(place, found, options=LOAD_OPTIONS)
    expected = make_state("old")
    is_old = to_bytes({**expected, **found}) == to_bytes(expected)
    return ("whole" if is_whole else "thin") if is_old else "torn"


def look_parts(place: Path) -> str:
    """`published` if the step is and all of its parts load, or how many of them load though it is deleted."""
    loaded = [look(place / "parts" / role) == "old" for role in ROLES]
    try:
        resolve(LocalStore(place))
    except anyshard.CheckpointNotFound:
        return f"deleted, {sum(loaded)} left"
    return "published" if all(loaded) else "torn"


CHANGES = {"thin": (make_thin, thin, look_thin), "delete": (make_parts, delete, look_parts)}


def seen_after(place: Path, change: Callable[[Path], None], look_at: Callable[[Path], str]) -> list[str]:
    """What is seen, what is seen once the change was made again, and how many files there are then."""
    return in_fork(
        lambda: look_at(place),
        lambda: (change(place), look_at(place))[1],
        lambda: len([path for path in place.rglob("*") if path.is_file()]),
    )


def run_changes(directory: Path, name: str) -> Iterator[dict[str, object]]:
    """Kill a change at each of its events, look, and do it again; the last case is the undisturbed one."""
    make, change, look_at = CHANGES[name]

    def act(place: Path, nth: int) -> Callable[[Report], None]:
        def run(report: Report) -> None:
            change(place, Interrupt(report, nth, signal.SIGKILL))
            report("done")

        return run

    for nth in count(1):
        place = directory / f"{name}_{nth}" / "step_1"
        make(place)
        *events, end = fork(act(place, nth)).result()
        seen = seen_after(place, change, look_at)
        shutil.rmtree(place.parent)
        yield {"mode": name, "events": events, "end": end, "seen": seen}
        if end != "killed":
            return


def list_modules() -> str:
    """All modules that can be imported by their name."""
    return " ".join(name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None)


def warm_up(place: Path) -> None:
    """Save the old state in a fork, and import here whatever that and a load imported, so that no other fork has to."""
    save_old = partial(anyshard.save, place / "step_1", make_state("old"), options=OPTIONS)
    *seen, imported = in_fork(save_old, partial(look, place / "step_1"), list_modules)
    assert "old" == seen[-1], (seen, imported)
    for name in imported.split():
        importlib.import_module(name)
    gc.freeze()  # forks share what is there


def main(directory: Path) -> None:
    warm_up(directory / "old")
    for before in ("none", "old"):
        names = record_events(directory, before)
        print(json.dumps({"mode": "record", "before": before, "events": names}))
        for run in (run_kills, run_stops):
            for case in run(directory, before, names):
                print(json.dumps(case))
    for name in CHANGES:
        for case in run_changes(directory, name):
            print(json.dumps(case))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

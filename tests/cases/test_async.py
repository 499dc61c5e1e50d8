"""Cases from the field about asynchronous saves. Each test is named after its row in cases.md."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import anyshard
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, do_before, fail
from anyshard.testing.launch import Launcher
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.background import scenes
from tests.background.scenes import SOON_S, contents, gated, is_there, make_small, saved_now
from tests.cases.jobs import look_at

IN_TIME = anyshard.SaveOptions(timeout_s=3.0)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def make_many(num: int, fill: float) -> dict[str, Any]:
    return {"model": {f"w{number}": torch.full((1,), fill + number) for number in range(num)}}


def test_b012_few_descriptors_and_no_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three thousand small tensors are saved where 50 files may be opened; nothing listens anywhere, so no port can be taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr("socket.socket.bind", fail(AssertionError("a port")))
    store = MemoryStore(url="memory:a/step_1")
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 50, hard))
    try:
        for number in range(3):
            anyshard.async_save(store, make_many(3000, number), overwrite=number > 0).committed(SOON_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the arena's
    live = make_many(3000, -1)
    anyshard.load(store, live)
    assert [2.0 + number for number in range(3000)] == [float(tensor) for tensor in live["model"].values()]


def test_b014_no_process_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with a pool of threads in use is saved where nothing can be forked, for threads of this process do all."""
    for name in ("os.fork", "os.posix_spawn", "multiprocessing.Process.start", "subprocess.Popen.__init__"):
        monkeypatch.setattr(name, fail(AssertionError("a process")))
    place, stop = gated("memory:a/step_1"), threading.Event()
    with ThreadPoolExecutor(4) as threads:
        busy = [threads.submit(stop.wait, SOON_S) for _ in range(4)]
        pending = anyshard.async_save(place.store, make_small("a"))
        place.gate.set()
        pending.committed(SOON_S)
        stop.set()
        assert [True] * 4 == [one.result(SOON_S) for one in busy]
    assert is_there(place.place)


def save_with_a_broken_writer(place: str) -> tuple[str, bool]:
    """On rank 0 the writer raises; what the handle raises, and whether the next save is there."""
    inner = LocalStore(f"{place}/step_1")
    rules = [Rule(Verb.WRITE_AT, "data/*", fail(ValueError("the writer broke")))] if dist.get_rank() == 0 else []
    pending = anyshard.async_save(FaultStore(inner, rules), make_small("a"))
    try:
        pending.committed(SOON_S)
    except anyshard.OperationFailed as error:
        told = str(error)
    anyshard.async_save(f"{place}/step_2", make_small("b")).committed(SOON_S)
    return told, is_there(inner)


@pytest.mark.slow
def test_b023_the_writer_raises(worlds: Worlds, tmp_path: Path) -> None:
    """The handle raises on both ranks, with rank, phase and error; the next save works."""
    one, other = worlds(2).run(save_with_a_broken_writer, str(tmp_path))
    assert one == other
    assert ("rank 0: write: ValueError: the writer broke" in one[0], False) == (True, one[1]), one
    assert contents(tmp_path / "step_2") == saved_now(make_small("b"))


class End:
    """A sink that ends the process in the midst of the writing."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def emit(self, event: anyshard.Event) -> None:
        if event.name == "save.block.written":
            self._act()


def save_and_exit(place: str) -> str:
    """On rank 0 the process ends from a thread of the save; what the handle raises on rank 1."""
    sinks = [End(lambda: os._exit(17))] if dist.get_rank() == 0 else []
    pending = anyshard.async_save(place, make_small("a"), options=IN_TIME, sinks=sinks)
    try:
        pending.committed(SOON_S)
    except anyshard.RankMissing as error:
        return str(error)
    return "committed"


@pytest.mark.slow
def test_b023_the_process_of_the_writer_ends(launch: Launcher, tmp_path: Path) -> None:
    """Where rank 0's process ends in mid-save, rank 1's handle raises in time and names rank and phase."""
    with launch(save_and_exit, str(tmp_path / "step_1"), size=2) as launched:
        ended = launched.wait(timeout_s=100)
    assert (17, True) == (ended[0].exit_code, "rank 0: " in (ended[1].value or "")), ended
    assert not is_there(LocalStore(str(tmp_path / "step_1")))


def test_b030_no_source_survives_the_staging() -> None:
    """While the slow write still runs, a dropped model is gone."""
    model, place = nn.Linear(100, 100), gated("memory:a/step_1")
    watched = [weakref.ref(param) for param in model.parameters()]
    pending = anyshard.async_save(place.store, {"model": model})
    pending.staged(SOON_S)
    del model
    gc.collect()
    assert ([None, None], False) == ([ref() for ref in watched], pending.is_done)
    place.gate.set()
    pending.committed(SOON_S)


@pytest.mark.slow
def test_b035_the_main_thread_goes_on_beside_many_tensors() -> None:
    """A loop of the main thread goes round while many tensors are saved (100,000, and how fast: benchmarks/many_tensors.py)."""
    state, store = make_many(20_000, 0.5), MemoryStore(url="memory:a/step_1")
    anyshard.save(MemoryStore(url="memory:a/step_0"), state)
    pending, rounds = anyshard.async_save(store, state), 0
    while not pending.is_done:
        rounds += 1
    assert (20_000, True) == (pending.result().num_tensors, rounds > 1000)


def test_b047_the_call_asks_the_storage_for_nothing() -> None:
    """When the call returns no request was made but the thread's first; a save of 500 tensors makes as many as one of 5."""
    calls = []
    for num in (5, 500):
        anyshard.save(MemoryStore(url="memory:a/step_0"), make_many(num, 0.0))
        place = gated("memory:a/step_1", Verb.LIST, "*")
        store = CountingStore(place.store)
        pending = anyshard.async_save(store, make_many(num, 1.0))
        assert {0} == {store.count(verb).calls for verb in Verb if verb not in (Verb.LIST, Verb.FREE_NBYTES)}
        place.gate.set()
        pending.committed(SOON_S)
        calls.append(sum(store.count(verb).calls for verb in Verb))
    assert calls[0] == calls[1]


def test_b052_a_step_that_failed_is_no_step(tmp_path: Path) -> None:
    """Step 20 fails in the background and is not there; after going on from 10, steps 11 to 20 are all saved."""
    anyshard.save(tmp_path / "step_10", make_small("10"))
    rules = [Rule(Verb.FINISH, "*", fail(anyshard.StorageError("no", file="x")))]
    pending = anyshard.async_save(FaultStore(LocalStore(str(tmp_path / "step_20")), rules), make_small("20"))
    with pytest.raises(anyshard.StorageError):
        pending.committed(SOON_S)
    assert ["step_10"] == [path.name for path in tmp_path.iterdir() if is_there(LocalStore(str(path)))]
    anyshard.load(tmp_path / "step_10", make_small("live"))
    for step in range(11, 21):
        anyshard.async_save(tmp_path / f"step_{step}", make_small(str(step)))
    anyshard.wait_all(SOON_S)
    assert [saved_now(make_small(str(step))) for step in range(10, 21)] == [
        contents(tmp_path / f"step_{step}") for step in range(10, 21)
    ]


class Scaled(nn.Linear):
    """A layer with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def save_scalar_parameters(place: str) -> list[tuple[int, ...]]:
    """Save FSDP2 with a scalar parameter asynchronously, twice; the shapes that are stored."""
    model = Scaled()
    fully_shard(model, mesh=make_mesh(("dp", 2)), ignored_params={model.scale})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    before = look_at(model, optimizer)
    for _ in range(2):
        anyshard.async_save(place, {"model": model, "optimizer": optimizer}, overwrite=True, options=scenes.LAZY)
    anyshard.wait_all(SOON_S)
    assert before
    with anyshard.open(place) as checkpoint:
        return [tuple(checkpoint[address].shape) for address in ("model/scale", "optimizer/state/scale/exp_avg")]


@pytest.mark.slow
def test_b077_scalar_parameters_under_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    """A 0-dimensional parameter and its state keep their shape in asynchronous saves."""
    assert [[(), ()]] * 2 == worlds(2).run(save_scalar_parameters, str(tmp_path / "step_1"))


def test_b122_cpu_tensors_are_copied_too() -> None:
    """A parameter on the CPU that is filled right after the call is stored as it was."""
    param, place = nn.Parameter(torch.ones(1, 1)), gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, {"model": {"w": param}})
    param.data.fill_(99)
    place.gate.set()
    pending.committed(SOON_S)
    assert 1.0 == anyshard.open(place.place)["model/w"][0, 0]


def test_b125_b129_buffers_are_kept_until_they_are_written() -> None:
    """While a slow writer reads the first save's buffer, further saves use others, and what each stored is right."""
    options = anyshard.SaveOptions(max_in_flight=3)
    anyshard.save(MemoryStore(url="memory:b/step_0"), make_small("plan"))  # without which a call waits for the save before it
    places, states = [gated(f"memory:a/step_{number}") for number in range(3)], [make_small(str(n)) for n in range(3)]
    for place, state in zip(places, states, strict=True):
        anyshard.async_save(place.store, state, options=options)
    assert 10 == len([torch.full((40, 5), 7.0) for _ in range(10)])  # memory that is used again
    places[0].await_arrival()
    for place in places:
        place.gate.set()
    anyshard.wait_all(SOON_S)
    assert [saved_now(state) for state in states] == [contents(place.place) for place in places]


def test_b126_all_layers_are_of_one_step() -> None:
    """Training goes on between the writing of two blobs: both hold what they held at the call."""
    one, other = torch.full((9,), 1.0), torch.full((9,), 2.0)
    place = gated("memory:a/step_1", Verb.CREATE_BLOB, "data/b/*")
    pending = anyshard.async_save(place.store, {"a": {"w": one}, "b": {"w": other}})
    for _ in range(3):
        one += 1
        other += 1
        place.await_arrival()
    place.gate.set()
    pending.committed(SOON_S)
    checkpoint = anyshard.open(place.place)
    assert ([1.0] * 9, [2.0] * 9) == (checkpoint["a/w"][...].tolist(), checkpoint["b/w"][...].tolist())


def save_and_die(place: str) -> None:
    """Save, then begin to save over it asynchronously, and die while the blobs are written."""
    anyshard.save(place, make_small("old"))
    sinks = [End(lambda: os.kill(os.getpid(), signal.SIGKILL))]
    options = anyshard.SaveOptions(overwrite_grace_s=0)
    anyshard.async_save(place, make_small("new"), overwrite=True, options=options, sinks=sinks).committed(SOON_S)


@pytest.mark.slow
def test_b128_a_save_that_is_only_begun_replaces_nothing(launch: Launcher, tmp_path: Path) -> None:
    """A process that is killed in mid-write leaves the checkpoint that was there whole, and the next save works."""
    with launch(save_and_die, str(tmp_path / "step_1"), size=1) as launched:
        (ended,) = launched.wait(timeout_s=60)
    assert -signal.SIGKILL == ended.exit_code
    assert contents(tmp_path / "step_1") == saved_now(make_small("old"))
    anyshard.async_save(tmp_path / "step_1", make_small("next"), overwrite=True).committed(SOON_S)
    assert contents(tmp_path / "step_1") == saved_now(make_small("next"))


def test_b152_a_save_that_does_not_move_can_be_asked() -> None:
    """Status from the main thread: rank, phase, bytes done of all, current file, seconds in the phase."""
    place = gated("memory:a/step_1", Verb.FINISH)
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()
    (status,) = pending.status()
    assert (0, "write") == (status.rank, status.phase)
    assert 0 < status.written_nbytes <= status.nbytes
    assert status.file.startswith("data/")
    assert 0 <= status.phase_s < SOON_S
    place.gate.set()
    pending.committed(SOON_S)


def save_and_be_told_to_stop(place: str) -> list[str]:
    """SIGTERM to the trainer and its two data workers during a save; what the trainer met on its way to the end."""
    gate, met, stop = threading.Event(), [], threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    loader = iter(DataLoader(TensorDataset(torch.arange(100)), batch_size=1, num_workers=2))
    next(loader)
    store = FaultStore(LocalStore(place), [Rule(Verb.WRITE_AT, "*", do_before(lambda: gate.wait(SOON_S)))])
    pending = anyshard.async_save(store, make_small("a"))
    for pid in [*(worker.pid for worker in loader._workers), os.getpid()]:
        os.kill(pid, signal.SIGTERM)
    assert stop.wait(SOON_S)
    try:
        gate.set()
        for _ in loader:
            pass
    except (RuntimeError, EOFError, ConnectionError) as error:  # how torch tells of dead workers depends on where it is
        met.append(type(error).__name__)
    pending.committed(SOON_S)
    return met


@pytest.mark.slow
def test_b154_sigterm_to_all_in_mid_save(launch: Launcher, tmp_path: Path) -> None:
    """Data workers that end by SIGTERM take no save with them: the trainer finishes it before it stops."""
    with launch(save_and_be_told_to_stop, str(tmp_path / "step_1"), size=1) as launched:
        (ended,) = launched.wait(timeout_s=60)
    assert (0, 1) == (ended.exit_code, len(ended.value or ())), ended
    assert contents(tmp_path / "step_1") == saved_now(make_small("a"))


def test_b159_a_stuck_storage_does_not_hold_training() -> None:
    """Steps and saves go on up to the limit while the storage is stuck; nothing counts as durable before it is."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state, stored = {"model": model, "optimizer": optimizer}, []
    places = [gated(f"memory:a/step_{number}") for number in range(3)]
    options = anyshard.SaveOptions(max_in_flight=2, timeout_s=0.5)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    anyshard.save(MemoryStore(url="memory:b/step_0"), state)  # a plan: without one a call waits for the save before it
    for place in places[:2]:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        stored.append({name: value.clone() for name, value in model.state_dict().items()})
        anyshard.async_save(place.store, state, options=anyshard.SaveOptions(max_in_flight=2))
    with pytest.raises(anyshard.StillPending, match="At most max_in_flight saves of a run"):
        anyshard.async_save(places[2].store, state, options=options)
    assert [False, False] == [is_there(place.place) for place in places[:2]]
    for place in places:
        place.gate.set()
    anyshard.wait_all(SOON_S)
    for place, expected in zip(places, stored, strict=False):
        assert expected["weight"].tolist() == anyshard.open(place.place)["model/weight"][...].tolist()

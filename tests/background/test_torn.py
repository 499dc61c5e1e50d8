"""Never torn: whatever writes to a job while it is copied waits, or the save is exact all the same, or it fails by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import anyshard
from anyshard.engine.arena import Arena
from anyshard.storage.memory import MemoryStore
from anyshard.testing.world import Worlds
from tests.background import scenes, torn_cases
from tests.background.scenes import LAZY, SOON_S, contents, is_there
from tests.background.torn_cases import IMPLEMENTATIONS, WRAPPINGS, Race, build, hold_copier, make_model, race_all, save_now
from tests.background.writers import BREACHES, HARMLESS, STEPS, WIDTH, WRITERS, Job

NUM_RANKS = 2
MODEL, OPTIMIZER, BOTH = "lazy, named in model", "lazy, named in optimizer", "lazy, named in model and optimizer"
NAMED = {
    "step without hooks": BOTH,
    "kernel of a step": BOTH,
    "moments to zero": OPTIMIZER,
    "storage freed": BOTH,
    "storage shared": BOTH,
}
PLAIN = (
    dict.fromkeys(STEPS, "lazy, waited, exact") | dict.fromkeys(HARMLESS, "lazy, exact") | dict.fromkeys(BREACHES, MODEL) | NAMED
)
# The snapshot holds the local tensors of DTensors, which stay as they are when the DTensors get others.
FSDP2 = PLAIN | dict.fromkeys(["model.to", "data replaced", "set_", "tensors swapped"], "lazy, exact")

# DDP and FSDP1 hold their parameters, so none is swapped. Under FSDP1 a step in the backward pass breaks the heap, without
# anyshard too.
NOT_OF_FSDP1 = {"step in backward", "tensors swapped", "update of the average", "average copied back"}
# Nothing of it depends on the optimizer's implementation.
each_eager = pytest.mark.parametrize(
    "implementation", ["fused", *(pytest.param(name, marks=pytest.mark.long) for name in ("foreach", "for-loop"))]
)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def run(race: Race, place: Path, job: Job) -> str:
    """How a save of the job ends, told from what a blocking save stores."""
    return race.run(place / "step_2", job, save_now(place / "step_1", job))


# Each writer -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_implementation
def test_lazy_in_one_process(tmp_path: Path, implementation: str) -> None:
    """What torch tells of waits for the copy, and what is written behind its back fails the save by the names of sections."""
    assert PLAIN == race_all(str(tmp_path), "plain", implementation, "lazy", tuple(WRITERS))


@pytest.mark.slow
@each_eager
def test_eager_in_one_process(tmp_path: Path, implementation: str) -> None:
    """What is stored is the state of the call, whatever comes after it."""
    found = race_all(str(tmp_path), "plain", implementation, "eager", tuple(WRITERS))
    assert dict.fromkeys(WRITERS, "eager, exact") == found


@pytest.mark.slow
@each_implementation
def test_lazy_under_fsdp2(worlds: Worlds, tmp_path: Path, implementation: str) -> None:
    """As in one process, where version counters of fused and foreach steps tell nothing (T1), on all ranks alike."""
    args = (str(tmp_path), "fsdp2", implementation, "lazy", tuple(WRITERS))
    assert [FSDP2] * NUM_RANKS == worlds(NUM_RANKS).run(torn_cases.race_all, *args)


@pytest.mark.slow
@each_eager
def test_eager_under_fsdp2(worlds: Worlds, tmp_path: Path, implementation: str) -> None:
    """What is stored is the state of the call, whatever comes after it."""
    args = (str(tmp_path), "fsdp2", implementation, "eager", tuple(WRITERS))
    assert [dict.fromkeys(WRITERS, "eager, exact")] * NUM_RANKS == worlds(NUM_RANKS).run(torn_cases.race_all, *args)


@pytest.mark.slow
def test_lazy_under_ddp(worlds: Worlds, tmp_path: Path) -> None:
    """As in one process, where each rank copies only parts of tensors; the names are those of the rank that tells first."""
    writers = [writer for writer in WRITERS if writer != "tensors swapped"]
    found = worlds(NUM_RANKS).run(torn_cases.race_all, str(tmp_path), "ddp", "fused", "lazy", writers)
    expected = {writer: PLAIN[writer].partition(" in ")[0] for writer in writers}
    assert [expected] * NUM_RANKS == [{writer: end.partition(" in ")[0] for writer, end in ends.items()} for ends in found]


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", [name for name in WRAPPINGS if "fsdp1" in name])
def test_lazy_under_fsdp1(worlds: Worlds, tmp_path: Path, wrapping: str) -> None:
    """All is copied at the call, so that nothing that comes after it is seen."""
    writers = [writer for writer in WRITERS if writer not in NOT_OF_FSDP1]
    found = worlds(NUM_RANKS).run(torn_cases.race_all, str(tmp_path), wrapping, "fused", "lazy", writers)
    assert [dict.fromkeys(writers, "eager, exact")] * NUM_RANKS == found


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["fsdp1", "fsdp1, use_orig_params"])
def test_sharded_optimizers_of_fsdp1_are_refused(worlds: Worlds, tmp_path: Path, wrapping: str) -> None:
    """Its flat pieces do not say what they are pieces of, so none is stored as if it were a whole."""
    found = worlds(NUM_RANKS).run(torn_cases.save_sharded, str(tmp_path / "step_1"), wrapping)
    for end in found:
        assert end.startswith("InvalidAppState: optimizer: expected an optimizer of whole parameters or of DTensors")
        assert "FSDP1" in end
    assert not is_there(str(tmp_path / "step_1"))


# Each moment -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 95])
@pytest.mark.parametrize("writer", ["step after two backward passes", "kernel of a step", "storage freed"])
def test_the_first_and_the_last_piece(tmp_path: Path, writer: str, number: int) -> None:
    """While half of the first piece is copied, and while all is but half of the last one, it ends as in between.

    What was copied before it was changed is named too, for until `staged()` nothing but steps that wait may change it.
    """
    job = build("plain", "fused")
    assert PLAIN[writer] == run(Race(WRITERS[writer], number=number), tmp_path, job)


class Faults:
    """How often the kernel has found memory gone that was to be copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_found = 0
        self._write = Arena.write
        monkeypatch.setattr(Arena, "write", lambda *args: self._count(*args))

    def _count(self, arena: Arena, position: int, data: memoryview) -> None:
        try:
            self._write(arena, position, data)
        except OSError:
            self.num_found += 1
            raise


def test_memory_that_the_system_took_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage so large that it has a mapping of its own is freed within a piece: no crash."""
    model = nn.Linear(1 << 13, 1 << 11, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters()), {})
    job.state |= {"model": model, "optimizer": job.optimizer}
    faults = Faults(monkeypatch)
    assert MODEL == run(Race(WRITERS["storage freed"]), tmp_path, job)
    assert 1 == faults.num_found


# Other jobs ------------------------------------------------------------------------------------------------------------


def test_many_optimizers_in_the_backward_pass(tmp_path: Path) -> None:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there; the first one waits."""
    model = make_model()
    optimizers = {param: torch.optim.AdamW([param], fused=True) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    job = Job(model, next(iter(optimizers.values())), {"model": model, "optimizer": list(optimizers.values())})
    job.backward()
    assert "lazy, waited, exact" == run(Race(Job.backward), tmp_path, job)


def test_steps_with_a_closure(tmp_path: Path) -> None:
    """LBFGS changes parameters many times within a step, and waits before the first time."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    job = Job(model, optimizer, {"model": model, "optimizer": optimizer})

    def close() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, WIDTH)).square().sum()
        loss.backward()
        return loss

    optimizer.step(close)
    assert "lazy, waited, exact" == run(Race(lambda job: job.optimizer.step(close)), tmp_path, job)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_compiled_steps(tmp_path: Path, implementation: str) -> None:
    """A step that was compiled before the first save waits."""
    job = build("plain", implementation)
    step = torch.compile(job.optimizer.step, backend="eager")
    step()
    assert "lazy, waited, exact" == run(Race(lambda _: step()), tmp_path, job)


def test_two_snapshots_at_once(tmp_path: Path) -> None:
    """A write between the calls of two saves in flight fails the first one; the second one has what was written."""
    job = build("plain", "fused")
    save_now(tmp_path / "step_1", job)
    options = anyshard.SaveOptions(staging="lazy", max_in_flight=2)
    with hold_copier(torn_cases.EARLY) as copier:
        first = anyshard.async_save(tmp_path / "step_2", job.state, options=options)
        assert copier.arrived.wait(SOON_S)
        WRITERS["write to data"](job)
        second = anyshard.async_save(tmp_path / "step_3", job.state, options=options)
        copier.gate.set()
        with pytest.raises(anyshard.TornSnapshot):
            first.committed(SOON_S)
        second.committed(SOON_S)
    assert (False, save_now(tmp_path / "now", job)) == (is_there(str(tmp_path / "step_2")), contents(tmp_path / "step_3"))


def test_loads_wait_for_the_save(tmp_path: Path) -> None:
    """A load of another checkpoint into the job that is being copied begins when the save is over."""
    job = build("plain", "fused")
    save_now(tmp_path / "other", job)
    job.optimizer.step()
    expected = save_now(tmp_path / "now", job)
    store = MemoryStore(url="memory:a/step_1")
    with hold_copier(torn_cases.EARLY) as copier:
        pending = anyshard.async_save(store, job.state, options=LAZY)
        loading = threading.Thread(target=anyshard.load, args=(tmp_path / "other", job.state))
        loading.start()
        assert copier.arrived.wait(SOON_S)
        loading.join(0.1)
        copier.gate.set()
        pending.committed(SOON_S)
        loading.join(SOON_S)
    assert expected == contents(store)

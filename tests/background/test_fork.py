"""Forks in the midst of a save: children neither save nor hang, and what the parent saves is what it was."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import anyshard
from anyshard.adapters.stability import Eligibility
from anyshard.adapters.step_hooks import StepGuard
from anyshard.storage.memory import MemoryStore
from tests.background import scenes
from tests.background.scenes import LAZY, SOON_S, contents, gated, make_job, make_small, saved_now


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def in_child(act: Callable[[], str]) -> str:
    """What `act` gives in a fork of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = act()
        except BaseException as error:  # noqa: BLE001 - the border of a process
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        assert selector.select(SOON_S), "the child hangs"
        text = pipe.read().decode()
    assert (pid, 0) == os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize("ask", ["staged", "durable", "committed", "result", "status", "is_done"])
def test_a_pending_save_in_a_child(ask: str) -> None:
    """A child that asks for its parent's save is told so at once; the parent's save goes on."""
    place = gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()

    def act() -> str:
        found = getattr(pending, ask)
        return f"no error: {found()}" if callable(found) else f"no error: {found}"

    told = in_child(act)
    assert f"InvalidOption: memory:a/step_1: expected the pending save to be used in process {os.getpid()}" in told
    place.gate.set()
    pending.committed(SOON_S)
    assert contents(place.place) == saved_now(make_small("a"))


def test_a_child_saves_on_its_own(tmp_path: Path) -> None:
    """A child of a process that is saving saves and loads by itself, without waiting for what the parent has under way."""
    place = gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()

    def act() -> str:
        anyshard.wait_all(SOON_S)
        for number in range(3):
            anyshard.async_save(tmp_path / f"step_{number}", make_small(str(number)), options=LAZY)
        anyshard.save(tmp_path / "step_3", make_small("3"))
        anyshard.wait_all(SOON_S)
        return "saved"

    assert "saved" == in_child(act)
    assert not pending.is_done
    place.gate.set()
    pending.committed(SOON_S)
    assert [saved_now(make_small(str(number))) for number in range(4)] == [contents(tmp_path / f"step_{i}") for i in range(4)]
    assert contents(place.place) == saved_now(make_small("a"))


def test_a_failure_of_the_parent_is_not_the_child_s(tmp_path: Path) -> None:
    """An untold failure stays with the parent, whose next call raises it."""
    anyshard.save(tmp_path / "step_1", make_small("old"))
    anyshard.async_save(tmp_path / "step_1", make_small("new"))
    scenes.background().saver.await_idle(SOON_S)
    assert "2" == in_child(lambda: str(anyshard.async_save(tmp_path / "step_2", make_small("b")).committed(SOON_S).step))
    with pytest.raises(anyshard.CheckpointExists):
        anyshard.wait_all(SOON_S)


def test_data_workers_that_are_forked_in_mid_save() -> None:
    """Workers of a DataLoader start, serve and end while a save is under way, before and after its copy."""
    model, optimizer = make_job()
    anyshard.async_save(MemoryStore(url="memory:a/step_0"), {"model": model, "optimizer": optimizer}).committed(SOON_S)
    expected, place = saved_now({"model": model, "optimizer": optimizer}), gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, {"model": model, "optimizer": optimizer}, options=LAZY)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=2)
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [int(number) for (batch,) in loader for number in batch]
    place.await_arrival()
    assert not pending.is_done
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [int(number) for (batch,) in loader for number in batch]
    optimizer.step()
    place.gate.set()
    pending.committed(SOON_S)
    assert expected == contents(place.place)


SCRIPT = """
import os, sys, threading, torch, anyshard
from anyshard.storage.local import LocalStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before

gate = threading.Event()
store = FaultStore(LocalStore(sys.argv[1]), [Rule(Verb.WRITE_AT, "*", do_before(gate.wait))])
pending = anyshard.async_save(store, {"w": torch.arange(100.0)})
pid = os.fork()
if pid == 0:
    sys.exit(0)  # as a program that ends: what is registered for that runs
assert (pid, 0) == os.waitpid(pid, 0)
print("the child has ended, the save is done:", pending.is_done, flush=True)
gate.set()
"""


@pytest.mark.slow
def test_a_child_that_ends_as_programs_do(tmp_path: Path) -> None:
    """The end of a child waits for nothing of its parent; the parent's own end waits for the save."""
    script = [sys.executable, "-c", SCRIPT, str(tmp_path / "step_1")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=100, check=False)
    assert (0, "the child has ended, the save is done: False\n", "") == (done.returncode, done.stdout, done.stderr)
    live = torch.zeros(100)
    anyshard.load(tmp_path / "step_1", {"w": live})
    assert live.tolist() == torch.arange(100.0).tolist()


def test_a_child_steps_while_its_parent_still_copies() -> None:
    """A child has none of the threads that copy, and what it does to its memory is in no snapshot: its steps do not wait."""
    model, optimizer = make_job()
    assert list(model.parameters())
    guard = StepGuard(Eligibility(np.ones(1, dtype=np.bool_), {}, (optimizer,)), lambda: os._exit(3))
    guard.open()
    try:
        assert "stepped" == in_child(lambda: str(optimizer.step() or "stepped"))
    finally:
        guard.close()

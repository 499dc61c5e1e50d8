"""Lazy asynchronous saves in one process: training goes on while its state is copied, and steps wait until it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import anyshard
from anyshard.adapters.stability import MIN_LAZY_NBYTES
from anyshard.engine.arena import Arena
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from tests.background import scenes
from tests.background.scenes import LAZY, SOON_S, State, contents, gated, make_job, make_state, saved_now


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


class Copier:
    """Holds the thread that copies lazy rows before its first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.gate = threading.Event(), threading.Event()
        self._write = Arena.write
        monkeypatch.setattr(Arena, "write", lambda *args: self._hold(*args))

    def _hold(self, arena: Arena, position: int, data: memoryview) -> None:
        self.arrived.set()
        assert self.gate.wait(SOON_S)
        self._write(arena, position, data)


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Copier:
    return Copier(monkeypatch)


def save_first(state: State) -> None:
    """The save that leaves the plan, without which nothing is lazy."""
    anyshard.async_save(MemoryStore(url="memory:a/step_0"), state).committed(SOON_S)


def go_on(state: State, wait_began: threading.Event) -> None:
    """What training does next: forward, backward, another state for all that is no optimizer's, and a step, as told."""
    state["model"](torch.ones(2, 128)).sum().backward()
    scenes._spoil([state["tensors"], state["values"]], set())
    state["scheduler"].step()
    torch.rand(1)
    wait_began.set()
    state["optimizer"].step()


@pytest.mark.parametrize("how", ["for-loop", "foreach", "fused"])
def test_the_state_of_the_call(how: str, copier: Copier) -> None:
    """While nothing is copied yet, training goes on up to its step, which waits; what is stored is the state of the call."""
    state = make_state()
    for group in state["optimizer"].param_groups:
        group |= {"foreach": how == "foreach", "fused": how == "fused"}
    save_first(state)
    expected, store, waits = saved_now(state), MemoryStore(url="memory:a/step_1"), threading.Event()
    pending = anyshard.async_save(store, state, options=LAZY)
    call_s = pending.stall_s
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(go_on, state, waits)
        assert (True, True) == (copier.arrived.wait(SOON_S), waits.wait(SOON_S))
        with pytest.raises(anyshard.StillPending):
            pending.staged(0.05)
        copier.gate.set()
        training.result(SOON_S)
    report = pending.committed(SOON_S)
    assert expected == contents(store)
    assert call_s + 0.02 <= report.stall_s <= report.duration_s
    assert report.stall_s == pytest.approx(pending.stall_s, abs=0.04)  # of the step, which goes on while the save ends
    assert expected["model/0.weight"] != saved_now(state)["model/0.weight"]


def test_the_report_says_what_is_lazy_and_why_the_rest_is_not() -> None:
    """The first save is eager; later ones leave to the copier what optimizers own, and name the reasons for all else."""
    state = make_state()
    first = anyshard.async_save(MemoryStore(url="memory:a/step_0"), state, options=LAZY)
    first.committed(SOON_S)
    later = anyshard.async_save(MemoryStore(url="memory:a/step_1"), state, options=LAZY)
    later.committed(SOON_S)
    assert (0, {"the first save of a structure is compared in full": ("**",)}) == (first.staging.lazy_nbytes, first.staging.eager)
    assert 3 * 128 * 128 * 4 == later.staging.lazy_nbytes  # a weight and its two moments; all else is small, or no optimizer's
    reasons = {address: reason for reason, addresses in later.staging.eager.items() for address in addresses}
    assert "of no torch.optim.Optimizer in the app state" == reasons["tensors/large"]
    assert {f"smaller than {MIN_LAZY_NBYTES >> 10} KiB"} == {
        reasons["model/0.bias"],
        reasons["optimizer/state/2.weight/step"],
        reasons["step"],
    }


def test_loading_an_optimizer_waits_as_its_step_does(copier: Copier) -> None:
    """`load_state_dict` in the midst of the copy waits for it."""
    model, optimizer = make_job()
    state = {"model": model, "optimizer": optimizer}
    save_first(state)
    expected, store = saved_now(state), MemoryStore(url="memory:a/step_1")
    other = make_job()[1].state_dict()
    pending = anyshard.async_save(store, state, options=LAZY)
    loading = threading.Thread(target=optimizer.load_state_dict, args=(other,))
    loading.start()
    assert copier.arrived.wait(SOON_S)
    loading.join(0.05)
    assert loading.is_alive()
    copier.gate.set()
    loading.join(SOON_S)
    pending.committed(SOON_S)
    assert expected == contents(store)


def test_a_change_that_nobody_waited_for(copier: Copier) -> None:
    """A write around the optimizer before the copy fails the save by the tensor's address; the next save is whole."""
    model, optimizer = make_job()
    state = {"model": model, "optimizer": optimizer}
    save_first(state)
    store = MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state, options=LAZY)
    assert copier.arrived.wait(SOON_S)
    model[0].weight.data.add_(1)
    copier.gate.set()
    with pytest.raises(anyshard.TornSnapshot, match=r"model/0\.weight") as caught:
        pending.committed(SOON_S)
    assert ("model/0.weight",) == caught.value.addresses
    with pytest.raises(anyshard.TornSnapshot):
        pending.staged(SOON_S)
    assert {} == store.snapshot()
    anyshard.async_save(store, state, options=LAZY).committed(SOON_S)
    assert saved_now(state) == contents(store)


def test_a_step_is_not_held_by_a_save_that_failed(copier: Copier) -> None:
    """When the save has failed the copy ends early, and the step goes on though the snapshot was never whole."""
    model, optimizer = make_job()
    state = {"model": model, "optimizer": optimizer}
    save_first(state)
    denied = anyshard.StorageDenied("no", file="data")
    store = FaultStore(MemoryStore(url="memory:a/step_1"), [Rule(Verb.LIST, "*", fail(denied))])
    pending = anyshard.async_save(store, state, options=LAZY)
    assert copier.arrived.wait(SOON_S)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    copier.gate.set()
    stepping.join(SOON_S)
    assert not stepping.is_alive()
    with pytest.raises(anyshard.StorageDenied):
        pending.committed(SOON_S)


def test_a_step_waits_for_the_copy_and_not_for_storage() -> None:
    """While a storage hangs, steps go on once all is copied."""
    model, optimizer = make_job()
    state = {"model": model, "optimizer": optimizer}
    save_first(state)
    expected, place = saved_now(state), gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, state, options=LAZY)
    optimizer.step()
    place.await_arrival()
    pending.staged(SOON_S)
    assert not pending.is_done
    optimizer.step()
    place.gate.set()
    pending.committed(SOON_S)
    assert expected == contents(place.place)

"""What asynchronous saves hold of memory: arenas used again, sources let go of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyshard
from anyshard import _api
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before, fail
from tests.background import scenes
from tests.background.scenes import (
    EAGER,
    LAZY,
    SOON_S,
    contents,
    count_alive,
    gated,
    make_job,
    make_small,
    saved_now,
    watch_tensors,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def save(number: int, state: dict[str, Any], options: anyshard.SaveOptions = EAGER) -> None:
    anyshard.async_save(MemoryStore(url=f"memory:a/step_{number}"), state, options=options).committed(SOON_S)


@pytest.mark.parametrize("options", [EAGER, LAZY], ids=["eager", "lazy"])
def test_one_arena_for_all_saves(options: anyshard.SaveOptions) -> None:
    """One arena of this rank's share is made at the first save and used again by each later one."""
    model, optimizer = make_job()
    for number in range(6):
        save(number, {"model": model, "optimizer": optimizer}, options)
    arenas = scenes.background().means.arenas
    share = sum(p.nbytes for p in model.parameters()) * 3
    assert 5 == arenas.num_hits
    assert share <= arenas.nbytes <= share + (64 << 10)


def test_a_ring_has_as_many_arenas_as_saves_in_flight() -> None:
    """Two saves under way have two arenas, and later ones take turns with these."""
    options, places = anyshard.SaveOptions(max_in_flight=2), [gated(f"memory:a/step_{number}") for number in range(2)]
    save(9, make_small("0"))
    arenas = scenes.background().means.arenas
    one = arenas.nbytes
    for place in places:
        anyshard.async_save(place.store, make_small("a"), options=options)
    assert 2 * one == arenas.nbytes
    for place in places:
        place.gate.set()
    anyshard.wait_all(SOON_S)
    for number in range(4):
        save(number, make_small("b"))
    assert (2 * one, 1 + 4) == (arenas.nbytes, arenas.num_hits)


def test_an_arena_that_is_too_small_makes_room() -> None:
    """A larger state gets a larger arena in place of the smaller one, and a smaller state uses it too."""
    save(0, make_small("a", num=2))
    small = scenes.background().means.arenas.nbytes
    save(1, make_small("a", num=200))
    large = scenes.background().means.arenas.nbytes
    save(2, make_small("a", num=2))
    assert 200 * 40 * 5 * 4 <= large <= 200 * 40 * 5 * 4 + 200 * 64 + small
    assert (large, 1) == (scenes.background().means.arenas.nbytes, scenes.background().means.arenas.num_hits)


def test_an_arena_that_stuck_threads_may_read_is_left_to_them() -> None:
    """After `StorageStuck` the next save has another arena; when the storage wakes up it writes the old bytes to nowhere new."""
    gate, inner = threading.Event(), MemoryStore(url="memory:a/step_1")
    stuck = FaultStore(inner, [Rule(Verb.WRITE_AT, "*", do_before(lambda: gate.wait(SOON_S)), times=99)])
    save(0, make_small("0"))
    arenas = scenes.background().means.arenas
    before = arenas.nbytes
    try:
        with pytest.raises(anyshard.StorageStuck):
            anyshard.async_save(stuck, make_small("a"), options=anyshard.SaveOptions(timeout_s=0.2)).committed(SOON_S)
        assert 0 == arenas.nbytes
        place = gated("memory:a/step_2", Verb.FINISH)
        pending = anyshard.async_save(place.store, make_small("b"))
        place.await_arrival()
    finally:
        gate.set()
    for thread in threading.enumerate():
        if thread.name == "anyshard-write":
            thread.join(0.1)
    place.gate.set()
    pending.committed(SOON_S)
    assert contents(place.place) == saved_now(make_small("b"))
    assert before == arenas.nbytes


@pytest.mark.parametrize("options", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_before", [0, 1], ids=["first", "later"])
def test_sources_are_let_go_of_when_staged(options: anyshard.SaveOptions, num_before: int) -> None:
    """While a slow write runs nothing of anyshard holds the model, the optimizer, or a tensor of them."""
    model, optimizer = make_job()
    for number in range(num_before):
        save(number, {"model": model, "optimizer": optimizer})
    place, extra = gated("memory:a/step_7"), {"w": torch.ones(50, 50)}
    expected = saved_now({"model": model, "optimizer": optimizer, "extra": extra})
    watched = watch_tensors(model, optimizer, extra)
    pending = anyshard.async_save(place.store, {"model": model, "optimizer": optimizer, "extra": extra}, options=options)
    pending.staged(SOON_S)
    place.await_arrival()
    del model, optimizer, extra
    assert (0, False) == (count_alive(watched), pending.is_done)
    place.gate.set()
    pending.committed(SOON_S)
    assert expected == contents(place.place)


KINDS = {"value": anyshard.UnsupportedValue, "storage": anyshard.StorageDenied, "torn": anyshard.TornSnapshot}


def deny() -> None:
    raise anyshard.StorageDenied("no", file="data")


def tell_error(store: Store, state: dict[str, Any]) -> type[Exception] | None:
    """Of what class the error of a lazy save is; the error itself is gone then."""
    try:
        anyshard.async_save(store, state, options=LAZY).committed(SOON_S)
    except anyshard.AnyshardError as error:
        return type(error)
    return None


@pytest.mark.parametrize("where", KINDS)
def test_sources_are_let_go_of_after_a_failure(where: str) -> None:
    """Neither a call that failed nor a save that did keeps tensors, once nobody has its error any more."""
    model, optimizer = make_job()
    state = {"model": model, "optimizer": optimizer, "x": object() if where == "value" else 1}
    save(0, {**state, "x": 1})
    rules = [Rule(Verb.WRITE_AT, "data/*", do_before(deny))] if where == "storage" else []
    store = FaultStore(MemoryStore(url="memory:a/step_1"), rules)
    watched = watch_tensors(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if where == "torn":
            patch.setattr("anyshard.engine.lazy_rows.LazyRows._is_there", lambda *_: False)
        assert KINDS[where] is tell_error(store, state)
    scenes.join_threads()
    del model, optimizer, state
    assert 0 == count_alive(watched)


def test_a_failure_that_nobody_has_heard_of_holds_no_tensors() -> None:
    """What the next call will raise keeps nothing of the state that was not saved."""
    model, optimizer = make_job()
    watched = watch_tensors(model, optimizer)
    denied = anyshard.StorageDenied("no", file="data")
    store = FaultStore(MemoryStore(url="memory:a/step_1"), [Rule(Verb.LIST, "*", fail(denied))])
    anyshard.async_save(MemoryStore(url="memory:a/step_0"), {"model": model, "optimizer": optimizer}).committed(SOON_S)
    pending = anyshard.async_save(store, {"model": model, "optimizer": optimizer})
    scenes.join_threads()
    del model, optimizer
    assert (0, True) == (count_alive(watched), pending.is_done)
    with pytest.raises(anyshard.StorageDenied):
        anyshard.wait_all(SOON_S)


def test_arenas_of_groups_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that follow each other in one process keep one arena in all, but for saves under way and failures untold."""
    pools = []
    for number in range(8):
        token = object()
        monkeypatch.setattr("anyshard.coord.torch_dist.job_token", lambda token=token: token)
        save(number, make_small("a"))
        pools.append(scenes.background().means.arenas)
    assert [0] * 7 == [pool.nbytes for pool in pools[:-1]]
    assert pools[-1].nbytes > 0
    assert 1 + 4 == len(_api._checkpointer(os.getpid())._memberships.savers)


def test_a_group_that_is_gone_ends_its_saves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of an earlier job is waited for by `wait_all`, and its arena is freed by the first call after that."""
    place = gated("memory:a/step_1")
    anyshard.async_save(place.store, make_small("a"))
    pool = scenes.background().means.arenas
    place.await_arrival()
    token = object()
    monkeypatch.setattr("anyshard.coord.torch_dist.job_token", lambda: token)
    save(2, make_small("b"))
    assert pool.nbytes > 0
    place.gate.set()
    anyshard.wait_all(SOON_S)
    save(3, make_small("b"))
    assert (0, contents(place.place)) == (pool.nbytes, saved_now(make_small("a")))


def test_a_rehearsal_waits_for_the_call_of_another_thread() -> None:
    """They use the same arenas and caches, so one of them has its turn after the other, up to a time."""
    save(1, make_small("a"))
    calls, is_held, gate = scenes.background().calls, threading.Event(), threading.Event()

    def hold() -> None:
        with calls.take("the call of async_save to b", SOON_S):
            is_held.set()
            gate.wait(SOON_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(SOON_S)
    with pytest.raises(anyshard.OperationFailed, match="another thread still in the call of async_save to b"):
        anyshard.prepare(MemoryStore(url="memory:a"), make_small("a"), options=anyshard.SaveOptions(timeout_s=0.1))
    gate.set()
    thread.join(SOON_S)
    assert "memory:a" == anyshard.prepare(MemoryStore(url="memory:a"), make_small("a")).url

"""Eager asynchronous saves: what is committed is the state of the call, whatever is done after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import anyshard
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import Verb
from tests.background import scenes
from tests.background.scenes import SOON_S, contents, gated, make_small, make_state, saved_now, spoil


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


@pytest.mark.parametrize(
    ("is_first", "verb", "key"),
    [
        (True, Verb.WRITE_AT, "data/*"),
        (True, Verb.CREATE, "manifest*"),
        (False, Verb.LIST, "*"),
        (False, Verb.WRITE_AT, "data/*"),
    ],
    ids=["first, blobs", "first, record", "later, begin", "later, blobs"],
)
def test_the_state_of_the_call(is_first: bool, verb: Verb, key: str) -> None:
    """Tensors, containers, modules, optimizer and generators may all change at once: what is stored is what they were."""
    state = make_state()
    if not is_first:
        anyshard.async_save(MemoryStore(url="memory:a/step_0"), make_state()).committed(SOON_S)
    expected, place = saved_now(state), gated("memory:a/step_1", verb, key)
    if is_first:
        scenes.forget_all()
    pending = anyshard.async_save(place.store, state)
    spoil(state)
    place.await_arrival()
    spoil(state)
    place.gate.set()
    pending.committed(SOON_S)
    assert expected == contents(place.place)
    unlike = {name for name, data in saved_now(state).items() if data != expected.get(name)}
    assert 50 <= len(unlike)  # so that the state was spoilt indeed


def test_a_blocking_save_stores_the_same() -> None:
    """Sizes, blobs and what is in them are those of a blocking save of the same state."""
    state, places = make_state(), [MemoryStore(url="memory:a/step_1"), MemoryStore(url="memory:b/step_1")]
    blocking = anyshard.save(places[0], state)
    background = anyshard.async_save(places[1], state).committed(SOON_S)
    one, other = ({key.split("-")[0]: len(data) for key, data in place.snapshot().items()} for place in places)
    one.pop("manifest"), other.pop("manifest")  # numbers in a text
    assert one == other
    assert contents(places[0]) == contents(places[1])
    assert (blocking.num_tensors, blocking.nbytes, blocking.written_nbytes) == (
        background.num_tensors,
        background.nbytes,
        background.written_nbytes,
    )


def test_a_load_gives_back_what_was_saved() -> None:
    """A job that loads an asynchronous save has the state of the call, generators included."""
    state, store = make_state(), MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state)
    drawn, live = torch.rand(5), make_state()
    pending.committed(SOON_S)
    live["optimizer"].step()
    live["scheduler"].step()
    anyshard.load(store, live)
    assert drawn.tolist() == torch.rand(5).tolist()
    anyshard.load(store, live)
    assert contents(store) == saved_now(live)


def test_what_the_call_says_of_staging() -> None:
    """All bytes are staged at the call, which is the whole stall; the report of the end says the same."""
    pending = anyshard.async_save(MemoryStore(url="memory:a/step_1"), make_small("a"))
    report = pending.committed(SOON_S)
    assert (3 * 40 * 5 * 4, 0, {}) == (pending.staging.nbytes, pending.staging.lazy_nbytes, dict(pending.staging.eager))
    assert pending.staging.nbytes <= pending.staging.arena_nbytes
    assert (pending.staging, pending.stall_s) == (report.staging, report.stall_s)
    assert 0 < report.stall_s <= report.duration_s + pending.stall_s
    assert (pending.url, pending.step) == ("memory:a/step_1", 1)


def test_two_modules_that_share_a_tensor() -> None:
    """Tied tensors are staged once and loaded as one."""
    shared = torch.arange(6.0)
    store = MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, {"a": {"w": shared}, "b": {"w": shared}})
    shared.fill_(9)
    pending.committed(SOON_S)
    live = torch.zeros(6)
    anyshard.load(store, {"a": {"w": live}, "b": {"w": live}})
    assert [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] == live.tolist()


def test_one_plan_for_all_saves_of_a_structure() -> None:
    """A blocking save leaves the plan for an asynchronous one, and the other way round."""
    kinds = []
    for number, save in enumerate((anyshard.save, anyshard.async_save, anyshard.async_save, anyshard.save)):
        made = save(MemoryStore(url=f"memory:a/step_{number}"), make_small("a"))
        report = made.committed(SOON_S) if isinstance(made, anyshard.PendingSave) else made
        kinds.append(report.plan_was_cached)
    assert [False, True, True, True] == kinds

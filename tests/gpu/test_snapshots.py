"""Snapshots of a state on a GPU: what is stored is the state of the call in the order of its stream, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch

import anyshard
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from tests.background.scenes import EAGER, LAZY, SOON_S, background, is_there
from tests.gpu import scenes
from tests.gpu.scenes import DEVICE, LATE_CYCLES, State, contents, gated, make_state, saved_now, train

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: tests/gpu/run.sh says how to check on one", allow_module_level=True)

HOW = pytest.mark.parametrize("how", ["fused", "foreach", "for-loop"])
STAGING = pytest.mark.parametrize("options", [LAZY, EAGER], ids=["lazy", "eager"])
WEIGHTS = ("model/0.weight", "model/1.weight")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy copies come after all that is enqueued behind the call."""
    scenes.make_late(monkeypatch)


def fill_weights(state: State, value: float) -> None:
    """Change the weights around the optimizer, in the order of the current stream."""
    for param in state["model"].parameters():
        param.data.fill_(value)


def read_weights(store: MemoryStore) -> list[list[list[float]]]:
    """The weights that a checkpoint has."""
    with anyshard.open(store) as checkpoint:
        return [checkpoint[address][...].tolist() for address in WEIGHTS]


# Torn or whole -----------------------------------------------------------------------------------------------------------


@HOW
@STAGING
def test_steps_behind_the_call_are_not_in_it(how: str, options: anyshard.SaveOptions, late: None) -> None:
    """Training goes on at once, into a step that changes everything: what is stored is the state of the call."""
    state = make_state(how)
    expected, store = saved_now(state), MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state, options=options)
    train(state)
    report = pending.committed(SOON_S)
    assert expected == contents(store)
    assert expected != saved_now(state)
    assert report.staging is not None
    # Two weights and two moments of each are lazy: all but biases and counts of steps.
    assert (6 * scenes.WIDTH**2 * 4 if options is LAZY else 0) == report.staging.lazy_nbytes


@HOW
def test_a_write_that_nobody_waited_for_is_torn(how: str, late: None) -> None:
    """A write around the optimizer before the copy fails the save by its addresses; the next one is whole."""
    state = make_state(how)
    saved_now(state)
    store = MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state, options=LAZY)
    fill_weights(state, 3.0)
    with pytest.raises(anyshard.TornSnapshot) as caught:
        pending.staged(SOON_S)
    assert WEIGHTS == caught.value.addresses
    assert not is_there(store)
    anyshard.async_save(store, state, options=LAZY).committed(SOON_S)
    assert saved_now(state) == contents(store)


@HOW
def test_a_write_behind_an_eager_call_is_not_in_it(how: str) -> None:
    """What is done to the tensors after the call, in whatever way, is nothing to an eager save."""
    state = make_state(how)
    expected, store = saved_now(state), MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state, options=EAGER)
    fill_weights(state, 3.0)
    pending.committed(SOON_S)
    assert expected == contents(store)


def test_a_race_with_the_copy_is_torn_or_won() -> None:
    """A write beside the copy leaves the state of the call or an error; a mixture is found, for all samples change."""
    state = make_state(width=4096)
    for number in range(8):
        expected, store = saved_now(state), MemoryStore(url=f"memory:a/step_{number}")
        pending = anyshard.async_save(store, state, options=LAZY)
        fill_weights(state, float(number))
        with suppress(anyshard.TornSnapshot):
            pending.committed(SOON_S)
        assert not is_there(store) or expected == contents(store)


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
def test_a_replayed_step_is_not_in_the_save(late: None) -> None:
    """Replays of a captured step run no hooks, so an optimizer that can be captured is staged at the call, and says so."""
    state = make_state("capturable")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state["optimizer"].step()
    expected, store = saved_now(state), MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state, options=LAZY)
    graph.replay()
    pending.committed(SOON_S)
    assert expected == contents(store)
    assert expected != saved_now(state)
    assert 0 == pending.staging.lazy_nbytes
    assert [WEIGHTS[0]] == [
        name for reason, names in pending.staging.eager.items() if "capturable" in reason for name in names[:1]
    ]


def test_a_failed_save_does_not_write_into_the_next(late: None) -> None:
    """Copies that a failed save has enqueued have ended when its arena is used again."""
    state = make_state()
    expected = saved_now(state)
    denied = anyshard.StorageDenied("no", file="data")
    broken = FaultStore(MemoryStore(url="memory:a/step_1"), [Rule(Verb.LIST, "*", fail(denied))])
    with pytest.raises(anyshard.StorageDenied):
        anyshard.async_save(broken, state, options=LAZY).committed(SOON_S)
    place = gated("memory:a/step_2", Verb.LIST, "*")
    pending = anyshard.async_save(place.store, state, options=EAGER)
    fill_weights(state, 3.0)  # what late copies would take along
    torch.cuda.synchronize()
    place.gate.set()
    pending.committed(SOON_S)
    assert expected == contents(place.place)


# Streams and graphs ------------------------------------------------------------------------------------------------------


@STAGING
def test_the_order_of_the_callers_stream(options: anyshard.SaveOptions) -> None:
    """On a stream that is not the default one, a write enqueued before the call is in the save, one behind it is not."""
    state, store = make_state(), MemoryStore(url="memory:a/step_1")
    saved_now(state)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LATE_CYCLES // 4)
        fill_weights(state, 1.0)
        pending = anyshard.async_save(store, state, options=options)
        pending.staged(SOON_S)
        fill_weights(state, 2.0)
    pending.committed(SOON_S)
    assert [np.ones((scenes.WIDTH, scenes.WIDTH)).tolist()] * 2 == read_weights(store)


def test_a_lazy_call_does_not_wait_for_the_device() -> None:
    """Where nothing on the device is eager, the call returns while the device still does what came before it."""
    model = torch.nn.Linear(512, 512, bias=False, device=DEVICE)
    state: State = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    anyshard.async_save(MemoryStore(url="memory:a/step_0"), state).committed(SOON_S)
    torch.cuda._sleep(LATE_CYCLES)
    model.weight.data.fill_(1.0)
    done = torch.cuda.current_stream().record_event()
    store = MemoryStore(url="memory:a/step_1")
    pending = anyshard.async_save(store, state, options=LAZY)
    assert not done.query()
    pending.committed(SOON_S)
    with anyshard.open(store) as checkpoint:
        assert np.ones((512, 512)).tolist() == checkpoint["model/weight"][...].tolist()


@STAGING
@pytest.mark.parametrize("is_first", [False, True])
def test_no_save_while_a_graph_is_captured(is_first: bool, options: anyshard.SaveOptions) -> None:
    """The call is refused by an error that says why, the graph is captured all the same, and the next save is whole."""
    state, graph, kept = make_state(), torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
    if not is_first:
        anyshard.async_save(MemoryStore(url="memory:a/step_0"), state).committed(SOON_S)
    with torch.cuda.graph(graph):
        kept.add_(1)
        with pytest.raises(anyshard.InvalidAppState, match="found that one is being captured"):
            anyshard.async_save(MemoryStore(url="memory:a/step_1"), state, options=options)
    graph.replay()
    store = MemoryStore(url="memory:a/step_2")
    anyshard.async_save(store, state, options=options).committed(SOON_S)
    assert 1.0 == kept.item()
    assert saved_now(state) == contents(store)


# Memory, and the way back ------------------------------------------------------------------------------------------------


def test_memory_is_free_after_staged(late: None) -> None:
    """The save holds what it has still to copy and nothing once that is staged, though it is not committed yet."""
    saved_now(make_state())
    before = scenes.count_allocated()
    state, place = make_state(), gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, state, options=LAZY)
    del state
    held = scenes.count_allocated()
    pending.staged(SOON_S)
    place.await_arrival()
    after = scenes.count_allocated()
    place.gate.set()
    pending.committed(SOON_S)
    assert before == after
    assert 6 * scenes.WIDTH**2 * 4 <= held - before


@STAGING
def test_a_load_gives_back_what_was_saved(options: anyshard.SaveOptions) -> None:
    """Into a fresh job on the device, and into one in host memory: all bits are those of the call."""
    state, store = make_state(), MemoryStore(url="memory:a/step_1")
    expected = saved_now(state)
    pending = anyshard.async_save(store, state, options=options)
    train(state)
    pending.committed(SOON_S)
    live = make_state()
    train(live)
    anyshard.load(store, live)
    assert expected == saved_now(live)
    model = torch.nn.Sequential(torch.nn.Linear(scenes.WIDTH, scenes.WIDTH), torch.nn.Linear(scenes.WIDTH, scenes.WIDTH))
    anyshard.load(store, {"model": model})
    assert expected["model/1.weight"] == model[1].weight.detach().numpy().tobytes()


def test_the_arena_of_a_save_is_pinned() -> None:
    """The memory that saves of a job on a GPU are staged in is pinned, so copies run beside training."""
    anyshard.async_save(MemoryStore(url="memory:a/step_1"), make_state()).committed(SOON_S)
    arenas = background().means.arenas
    arena = arenas.take(1)
    assert torch.frombuffer(arena.memory, dtype=torch.uint8).is_pinned()
    assert 1 == arenas.num_hits
    arenas.give_back(arena)

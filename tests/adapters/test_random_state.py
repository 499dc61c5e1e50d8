"""Random state of one rank: every generator goes on exactly as it would have, and nothing draws in between."""

# ruff: noqa: NPY002 - NumPy's global generator is what this is about

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anyshard import PerRank, RNGState
from anyshard.errors import InvalidAppState, Mismatch, StateMismatch
from anyshard.records.values import PerRankMark
from tests.adapters.roundtrip import Kept, give, keep, plan, take, unite


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Other tests find the generators as they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def draw() -> tuple[Any, ...]:
    """Numbers from all generators; the normal ones come in pairs, of which one is kept."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item(), torch.randn(1).item()


class Drawer:
    """A stateful that uses random numbers whenever it is asked for something."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(draw())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draw()


@pytest.mark.parametrize("seed", range(3))
def test_all_generators_go_on_where_they_were(seed: int) -> None:
    """Python, NumPy and torch, in the middle of a pair too; through the bytes of a checkpoint."""
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    for _ in range(seed):
        draw()
    kept = keep({"rng": RNGState()})
    expected = [draw() for _ in range(400)]
    give(kept, {"rng": RNGState()})
    assert expected == [draw() for _ in range(400)]


def test_nothing_is_drawn_by_a_save_or_a_plan() -> None:
    """Training goes on with the numbers that it would have had."""
    kept = keep({"rng": RNGState()})
    expected = draw()
    give(kept, {"rng": RNGState()})
    plan(keep({"rng": RNGState()}), {"rng": RNGState()})
    assert expected == draw()


def test_random_state_is_taken_last_and_set_last() -> None:
    """Others may draw when they give or take their state, whatever their place in the app state."""
    state = {"rng": RNGState(), "own": PerRank(Drawer()), "shared": Drawer(), "x": [PerRank({"rng": RNGState()})]}
    kept = keep(state)
    expected = draw()
    draw()
    give(kept, state)
    assert expected == draw()


def test_it_makes_no_tensors() -> None:
    """The index of a checkpoint does not grow with the number of ranks."""
    kept = keep({"rng": RNGState()})
    assert ((), {"rng": PerRankMark("rng")}) == (kept.tensors.addresses, kept.trees)


def keep_on_two_ranks(make: Callable[[int], object]) -> Kept:
    """A checkpoint in which rank r has the generators of seed r."""
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        parts.append(take({"rng": make(rank)}, rank=rank, world_size=2))
    return unite(parts)


def first_number(seed: int) -> float:
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


def test_every_rank_has_its_own() -> None:
    """Nothing has to be said for that."""
    kept = keep_on_two_ranks(lambda rank: RNGState())
    give(kept, {"rng": RNGState()}, rank=1, world_size=2)
    assert first_number(1) == torch.rand(1).item()


def test_another_number_of_ranks_can_be_refused() -> None:
    """It can be left out then, and the generators stay as they are."""
    kept, live = keep_on_two_ranks(lambda rank: RNGState()), RNGState(other_mesh="refuse")
    with pytest.raises(StateMismatch, match=r"that of rank 0 of 1, found those of .* exclude=\['rng'\]") as caught:
        plan(kept, {"rng": live})
    assert [(Mismatch.RANK, "rng")] == [(difference.kind, difference.address) for difference in caught.value.differences]
    before = torch.get_rng_state()
    give(kept, {"rng": live}, exclude=["rng"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_key_takes_it_to_another_number_of_ranks() -> None:
    """A wrapper around it says which ranks have the same state."""
    kept = keep_on_two_ranks(lambda rank: PerRank(RNGState(), key=rank))
    give(kept, {"rng": PerRank(RNGState(), key=1)})
    assert first_number(1) == torch.rand(1).item()


def _with(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**RNGState().state_dict(), **changes}


def _with_numpy(**changes: Any) -> Callable[[], dict[str, Any]]:
    state: Any = np.random.get_state(legacy=False)
    return _with(numpy={**state, "state": {**state["state"], **changes}})


DAMAGE: dict[str, tuple[Callable[[], object], str]] = {
    "number": (lambda: 5, "expected the random state of python, numpy, cpu, found int"),
    "nothing": (dict, "expected the random state of python, numpy, cpu, found "),
    "no cpu": (
        lambda: {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)},
        "found python, numpy; exclude=",
    ),
    "no map of generators": (_with(generators=5), "found generators that are no map"),
    "python with text": (lambda: _with(python=(*random.getstate()[:2], "text"))(), "damage at python"),
    "short python": (_with(python=(3, (1, 2), None)), "damage"),
    "python list": (_with(python=[]), "damage"),
    "no numpy": (_with(numpy=None), "damage"),
    "empty numpy": (_with(numpy={}), "damage"),
    "numpy beyond its end": (_with_numpy(pos=625), "damage"),
    "numpy before its start": (_with_numpy(pos=-1), "damage"),
    "short numpy": (_with_numpy(key=np.zeros(3, np.uint32)), "damage"),
    "another numpy": (_with(numpy={"bit_generator": "PCG64", "state": {"key": np.zeros(624), "pos": 0}}), "damage"),
    "empty cpu": (_with(cpu=b""), "damage"),
    "cpu of zeros": (_with(cpu=bytes(5056)), "damage"),
    "cpu text": (_with(cpu="text"), "damage"),
    "cpu number": (_with(cpu=10**12), "damage at cpu"),
}


def take_all() -> list[object]:
    """The states of all generators."""
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(("make", "found"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_no_random_state_is_refused_before_anything_changes(make: Callable[[], Any], found: str) -> None:
    """It may come from anywhere; NumPy for one would read beyond its memory."""
    kept, before = keep({"rng": PerRank(make())}), take_all()
    with pytest.raises(StateMismatch, match="rng: kind .expected a random state for the generators of this process") as caught:
        plan(kept, {"rng": RNGState()})
    assert found in str(caught.value)
    assert "exclude=" in str(caught.value)
    with pytest.raises(ValueError):
        RNGState().load_state_dict(make())
    assert before == take_all()


def test_all_devices_of_the_accelerator_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has a generator of its own; two made up here, for lack of others."""
    devices = {"cpu:0": torch.Generator().manual_seed(1), "cpu:1": torch.Generator().manual_seed(2)}
    module = SimpleNamespace(
        get_rng_state=lambda device: devices[str(device)].get_state(),
        set_rng_state=lambda state, device: devices[str(device)].set_state(state),
    )
    monkeypatch.setattr("anyshard.adapters.random_state._list_devices", lambda: {name: name for name in devices})
    monkeypatch.setattr("anyshard.adapters.random_state._device_module", lambda: module)
    kept = keep({"rng": RNGState()})
    expected = [torch.rand(1, generator=generator).item() for generator in devices.values()]
    give(kept, {"rng": RNGState()})
    assert expected == [torch.rand(1, generator=generator).item() for generator in devices.values()]


def test_another_global_generator_of_numpy_is_refused() -> None:
    """Its state cannot be checked before it is set."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(InvalidAppState, match="to be one of MT19937, found PCG64"):
            keep({"rng": RNGState()})
    finally:
        np.random.set_bit_generator(before)

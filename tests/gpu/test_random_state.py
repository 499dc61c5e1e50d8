"""Random state of a GPU: its generators go on where they were, and so do the masks that they make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyshard
from anyshard.storage.memory import MemoryStore
from tests.background.scenes import SOON_S
from tests.gpu import scenes
from tests.gpu.scenes import DEVICE

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: tests/gpu/run.sh says how to check on one", allow_module_level=True)

PLACE = "memory:a/step_1"


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Other tests find the generators as they were."""
    cpu, devices = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    yield from scenes.finish_all()
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(devices)


def make_masks() -> list[list[bool]]:
    """The masks of the next three steps."""
    dropout = torch.nn.Dropout(0.5)
    return [(dropout(torch.ones(512, device=DEVICE)) != 0).tolist() for _ in range(3)]


def test_masks_of_dropout_go_on() -> None:
    """In the middle of a stream: what the next steps drop is what the undisturbed job drops."""
    make_masks()
    store, state = MemoryStore(url=PLACE), {"rng": anyshard.RNGState()}
    anyshard.async_save(store, state).committed(SOON_S)
    expected = make_masks()
    torch.cuda.manual_seed_all(99)
    report = anyshard.load(store, state)
    assert expected == make_masks()
    assert () == report.warnings


def test_a_named_generator_goes_on() -> None:
    """One of the device is set in place."""
    live = torch.Generator(DEVICE).manual_seed(4)
    store, state = MemoryStore(url=PLACE), {"rng": anyshard.RNGState(generators={"noise": live})}
    torch.rand(3, device=DEVICE, generator=live)
    anyshard.save(store, state)
    expected = torch.rand(5, device=DEVICE, generator=live).tolist()
    anyshard.load(store, state)
    assert expected == torch.rand(5, device=DEVICE, generator=live).tolist()


def test_devices_that_a_checkpoint_lacks_are_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was saved without a GPU loads on one: its generator is seeded, alike at each load, and the report says so."""
    store, state = MemoryStore(url=PLACE), {"rng": anyshard.RNGState()}
    with monkeypatch.context() as patch:
        patch.setattr("anyshard.adapters.random_state._list_devices", dict)
        anyshard.save(store, state)
    expected = "rng: nothing is stored for cuda: derived from what is stored for others"
    found: list[Any] = []
    for seed in (1, 2):
        torch.cuda.manual_seed_all(seed)
        assert (expected,) == anyshard.load(store, state).warnings
        found.append(make_masks())
    assert found[0] == found[1]
    torch.cuda.manual_seed_all(1)
    assert found[0] != make_masks()

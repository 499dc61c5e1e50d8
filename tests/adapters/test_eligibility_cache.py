"""The cache of what may be lazy: gives what `find_eligible` gives, whatever has changed, and knows it if nothing has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anyshard.adapters.capture_cache import CaptureCache
from anyshard.adapters.eligibility_cache import EligibilityCache
from anyshard.adapters.random_state import RNGState
from anyshard.adapters.stability import Eligibility, find_eligible
from anyshard.testing.training import take_step
from tests.adapters.roundtrip import REGISTRY
from tests.adapters.test_stability import DIM, make_state

State = dict[str, Any]


class Caches:
    """Both caches, as two saves of a state leave them; the second one is the first that knows where it lies."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.captures, self.cache = CaptureCache(), EligibilityCache()
        for _ in range(2):
            self.find()

    def find(self) -> Eligibility:
        """What the cache says of the state as it is now, which must be what is found anew."""
        captured = self.captures.capture(self.state, registry=REGISTRY)
        found = self.cache.find(self.state, captured, REGISTRY)
        expected = find_eligible(self.state, captured, REGISTRY)
        assert (expected.is_lazy.tolist(), expected.reasons) == (found.is_lazy.tolist(), found.reasons)
        assert list(map(id, expected.optimizers)) == list(map(id, found.optimizers))
        return found


class Switched(torch.optim.AdamW):
    """An optimizer to which `train` and `eval` may be given."""

    train: Any = None
    eval: Any = None


def _freeze(state: State) -> None:
    state["model"][0].weight.requires_grad_(False)


def _set_capturable(state: State) -> None:
    state["optimizer"].param_groups[0]["capturable"] = True


def _lose_hooks(state: State) -> None:
    del state["optimizer"].__dict__["_optimizer_step_pre_hooks"]


def _gain_switches(state: State) -> None:
    state["optimizer"].train = state["optimizer"].eval = lambda: None


def _move(state: State) -> None:
    weight = state["model"][0].weight
    weight.data = weight.data.clone()


def _disown(state: State) -> None:
    del state["optimizer"].state[state["optimizer"].param_groups[0]["params"].pop()]


def _replace_optimizer(state: State) -> None:
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    take_step(state["model"], state["optimizer"])


def _mark_flat(state: State) -> None:
    state["model"][0].weight._fsdp_flattened = True


CHANGES: dict[str, Callable[[State], None]] = {
    "requires_grad": _freeze,
    "capturable": _set_capturable,
    "no hooks": _lose_hooks,
    "train and eval": _gain_switches,
    "memory": _move,
    "ownership": _disown,
    "another optimizer": _replace_optimizer,
    "flat": _mark_flat,
}


def test_what_has_not_changed_is_known_again() -> None:
    """Steps change nothing, nor do random state and numbers beside; each further save is a hit."""
    state = {**make_state(), "rng": RNGState(), "step": 1}
    caches = Caches(state)
    for _ in range(2):
        take_step(state["model"], state["optimizer"])
        state["step"] += 1
        assert caches.find().is_lazy.any()
    assert 2 == caches.cache.num_hits


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_found_anew(change: str) -> None:
    """Nothing is taken for what it was."""
    state = make_state(make=Switched)
    caches = Caches(state)
    CHANGES[change](state)
    caches.find()
    assert 0 == caches.cache.num_hits


def test_a_frozen_parameter_of_no_optimizer_is_found_anew() -> None:
    """Its reason changes with `requires_grad`, though it never was lazy."""
    state = {**make_state(), "base": nn.Linear(DIM, DIM)}
    caches = Caches(state)
    before = caches.find().reasons
    state["base"].weight.requires_grad_(False)
    assert before != caches.find().reasons
    assert 1 == caches.cache.num_hits


def test_an_embedding_that_is_renormed_from_now_on_is_found_anew() -> None:
    """`max_norm` may be set at any time."""
    state = make_state(nn.Sequential(nn.Embedding(DIM, DIM), nn.Linear(DIM, DIM)), torch.optim.SGD)
    caches = Caches(state)
    assert caches.find().is_lazy.any()
    state["model"][0].max_norm = 1.0
    assert any("max_norm" in reason for reason in caches.find().reasons)


def test_an_optimizer_of_tensors_that_are_nowhere_else_is_never_known() -> None:
    """The capture says nothing of where its parameters lie."""
    model = nn.Linear(DIM, DIM)
    optimizer = torch.optim.AdamW(model.named_parameters())
    take_step(model, optimizer)
    caches = Caches({"optimizer": optimizer})
    caches.find()
    assert (1, 0) == (caches.captures.num_hits - 1, caches.cache.num_hits)

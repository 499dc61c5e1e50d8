"""Cases from the field about values, random state, and masters kept beside the model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

import anyshard
from anyshard.storage.memory import MemoryStore
from tests.cases.training import move


class MasterSGD(torch.optim.SGD):
    """SGD over float32 masters of bfloat16 parameters; masters are optimizer state, as in mixed-precision wrappers."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, lr=lr)
        for param in params:
            self.state[param]["master"] = param.detach().float()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the masters and copy them into the parameters."""
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state[param]["master"]
                master.sub_(group["lr"] * param.grad.float())
                param.copy_(master)


def make_job(seed: int) -> tuple[nn.Module, MasterSGD]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3).to(torch.bfloat16)
    return model, MasterSGD(list(model.parameters()), lr=0.0)


def test_b005_masters_come_back_with_the_weights() -> None:
    """Masters are state of the optimizer: after a load of both, a step with lr 0 leaves the loaded weights."""
    saved, optimizer = make_job(1)
    fresh, fresh_optimizer = make_job(2)
    move({"model": saved, "optimizer": optimizer}, {"model": fresh, "optimizer": fresh_optimizer})
    for param in fresh.parameters():
        param.grad = torch.ones_like(param)
    fresh_optimizer.step()
    assert [True, True] == [torch.equal(a, b) for a, b in zip(saved.parameters(), fresh.parameters(), strict=True)]
    masters = [fresh_optimizer.state[param]["master"] for param in fresh.parameters()]
    assert [True, True] == [torch.equal(m, p.detach().float()) for m, p in zip(masters, saved.parameters(), strict=True)]


def test_b120_random_states_load_without_pickle() -> None:
    """States of Python, NumPy (a tuple with an array) and torch come back exactly, and the streams go on as they would have."""
    legacy = np.random.RandomState(7)
    states: dict[str, Any] = {"python": random.getstate(), "numpy": legacy.get_state(legacy=True), "torch": torch.get_rng_state()}
    expected = (random.random(), legacy.random_sample(), float(torch.rand(())))
    live: dict[str, Any] = {"rng": {"python": None, "numpy": None, "torch": torch.zeros_like(states["torch"])}}
    move({"rng": states}, live)
    random.setstate(live["rng"]["python"])
    legacy.set_state(live["rng"]["numpy"])
    torch.set_rng_state(live["rng"]["torch"])
    assert expected == (random.random(), legacy.random_sample(), float(torch.rand(())))


def test_b007_values_are_listed_offline() -> None:
    """Every plain value of the state can be read without the objects that it came from."""
    store = MemoryStore()
    anyshard.save(store, {"extra": {"only": {"a": 7, "b": [1, 2]}, "t": torch.zeros(1)}})
    assert {"a": 7, "b": [1, 2]} == anyshard.open(store)["extra/only"]

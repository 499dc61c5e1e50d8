"""Small training jobs that the cases share: a step with numbers of its own, and comparisons of what comes after."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import anyshard
from anyshard.reports import LoadReport
from anyshard.storage.memory import MemoryStore


def step(module: nn.Module, *optimizers: torch.optim.Optimizer, seed: int = 0) -> None:
    """Give every trainable parameter a gradient that depends on the seed alone, and step."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    for optimizer in optimizers:
        optimizer.step()


def save(app_state: dict[str, Any]) -> MemoryStore:
    """Save into memory and give the store."""
    store = MemoryStore(url="memory:step_7")
    anyshard.save(store, app_state)
    return store


def move(source: dict[str, Any], live: dict[str, Any], **options: Any) -> LoadReport:
    """Save one app state and load it into another."""
    return anyshard.load(save(source), live, **options)


def assert_equal_tensors(one: nn.Module, other: nn.Module) -> None:
    """Fail unless both modules have equal state dicts."""
    expected, found = one.state_dict(), other.state_dict()
    assert list(expected) == list(found)
    assert [] == [name for name in expected if not torch.equal(expected[name], found[name])]

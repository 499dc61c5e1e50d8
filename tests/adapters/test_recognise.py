"""What a value is: wrappers are seen through, overriding classes go by their own methods, lists hold parts of one thing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from anyshard import PerRank, RNGState
from anyshard.adapters.recognise import Kind, holds, is_object, recognise, unwrap
from anyshard.errors import InvalidAppState
from tests.adapters.roundtrip import REGISTRY


class _OwnModule(nn.Module):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


class _Container(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def _hooked_sgd() -> torch.optim.SGD:
    optimizer = _sgd()
    optimizer.state_dict = dict  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (nn.Linear(1, 1), Kind.MODULES),
        ([nn.Linear(1, 1), nn.Linear(1, 1)], Kind.MODULES),
        (nn.ModuleList([nn.Linear(1, 1)]), Kind.MODULES),
        (_OwnModule(), Kind.STATEFUL),
        (_sgd(), Kind.OPTIMIZERS),
        ((_sgd(), _sgd()), Kind.OPTIMIZERS),
        (_Container([torch.zeros(1)], lr=0.1), Kind.STATEFUL),
        (_hooked_sgd(), Kind.STATEFUL),
        (torch.optim.lr_scheduler.StepLR(_sgd(), 1), Kind.STATEFUL),
        (torch.amp.GradScaler("cpu"), Kind.STATEFUL),
        (nn.Linear, Kind.VALUE),
        ({"m": nn.Linear(1, 1)}, Kind.CONTAINER),
        ([], Kind.CONTAINER),
        (torch.zeros(1), Kind.TENSOR),
        (nn.Parameter(torch.zeros(1)), Kind.TENSOR),
        (torch.Generator(), Kind.GENERATOR),
        (PerRank(nn.Linear(1, 1)), Kind.PER_RANK),
        (RNGState(), Kind.RANDOM_STATE),
        (torch.float32, Kind.VALUE),
        (3, Kind.VALUE),
        (None, Kind.VALUE),
    ],
)
def test_order_of_recognition(value: object, expected: Kind) -> None:
    """Own methods win over base classes, base classes over the rest."""
    assert expected is recognise(value, REGISTRY, "x")


@pytest.mark.parametrize("other", [3, torch.zeros(1), None, {"a": 1}])
def test_modules_mixed_with_other_values_are_refused(other: object) -> None:
    """A position must never become part of a module's address, so the user has to give names."""
    with pytest.raises(InvalidAppState, match="models: expected a list of modules only"):
        recognise([nn.Linear(1, 1), other], REGISTRY, "models")


def test_wrappers_are_seen_through_at_any_depth() -> None:
    """Compiled and checkpoint-wrapped modules lead to the module itself; a genuine child called `module` is no wrapper."""
    module = nn.Sequential(nn.Linear(1, 1))
    wrapped = checkpoint_wrapper(torch.compile(nn.DataParallel(module), backend="eager"))
    assert module is unwrap(wrapped)
    plain = nn.Module()
    plain.module = module
    assert plain is unwrap(plain)


def test_wrappers_of_accelerate_are_known_by_name() -> None:
    """Accelerate is never imported: its classes are known by module and name."""
    inner = _sgd()
    for name, attribute in (("optimizer.AcceleratedOptimizer", "optimizer"), ("scheduler.AcceleratedScheduler", "scheduler")):
        module, _, cls = name.partition(".")
        fake = type(cls, (), {"__module__": f"accelerate.{module}"})()
        setattr(fake, attribute, inner)
        assert inner is unwrap(fake)


def test_holds_looks_below_containers_and_survives_cycles() -> None:
    """Namespaces and nested containers are looked into; a list that contains itself ends the search, not the process."""
    cycle: list[object] = [{"a": SimpleNamespace(b=(1, nn.Linear(1, 1)))}]
    cycle.append(cycle)
    assert holds(cycle, lambda item: is_object(item, REGISTRY))
    assert not holds(cycle, lambda item: isinstance(item, torch.Tensor))

"""A model and its optimizer as tests see them: flat state by address, filled and stepped alike on every layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyshard.adapters.modules import ModuleView, name_parameters
from anyshard.adapters.recognise import unwrap
from anyshard.testing.fill import Fill, fill, local_bytes

_SQUARES = ("_sq", "square_avg", "sum")  # state that optimizers take the root of


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rank has at a moment of training: the bytes of all tensors by address, and the options of all groups."""

    tensors: Mapping[str, bytes]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Moment:
        """This moment."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        return cls(local_bytes(training_state(model, optimizer)), groups)

    def differences(self, other: Moment) -> list[str]:
        """The addresses of tensors that differ or that only one of the two has, and "groups" if the groups differ."""
        addresses = sorted({*self.tensors, *other.tensors})
        differing = [address for address in addresses if self.tensors.get(address) != other.tensors.get(address)]
        return differing + ["groups"] * (self.groups != other.groups)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer by the address that a checkpoint gives them, sharing memory."""
    view = ModuleView(unwrap(model), "model")
    state = {f"model/{fqn}": view.state[key] for fqn, key in view.keys.items()}
    for param, fqn in _name_params(model, optimizer):
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"optimizer/state/{fqn}/{name}"] = value
    return state


def fill_training(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: str = "", num_steps: int = 7) -> None:
    """Fill parameters, buffers and all optimizer state with finite bits of address and seed, as after `num_steps` steps.

    State that is not there yet is made by a step.
    """
    take_step(model, optimizer, seed=seed)
    for address, tensor in training_state(model, optimizer).items():
        if address.startswith("optimizer/") and address.endswith("/step"):
            tensor.fill_(num_steps)
        else:
            fill(tensor, seed + address, kind=Fill.POSITIVE if address.endswith(_SQUARES) else Fill.FINITE)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: str = "") -> None:
    """Take a step with gradients that are bits of FQN and seed, so that it is the same step on every layout."""
    for param, fqn in _name_params(model, optimizer):
        if param.requires_grad:
            param.grad = _make_gradient(param, f"{seed}gradient/{fqn}")
    optimizer.step()
    optimizer.zero_grad()


def _name_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    plain = unwrap(model)
    names = name_parameters(plain, plain.state_dict(keep_vars=True))
    for group in optimizer.param_groups:
        yield from ((param, names[id(param)]) for param in group["params"])


def _make_gradient(param: torch.Tensor, name: str) -> torch.Tensor:
    gradient = torch.empty_like(param, requires_grad=False)
    if isinstance(param, DTensor):
        # The local tensors of uneven shards must be as large as the parameter's, whatever torch makes of the placements.
        local = torch.empty_like(param.to_local(), requires_grad=False)
        gradient = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    fill(gradient, name, kind=Fill.FINITE)
    return gradient

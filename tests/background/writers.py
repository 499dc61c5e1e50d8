"""What may be done to a job in training between the call of an asynchronous save and the end of its copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

WIDTH = 256  # a weight of it is large enough to be lazy, be it half of it on each of two ranks


@dataclass
class Job:
    """A model in training, and all that is saved with it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: dict[str, Any]

    @property
    def params(self) -> list[torch.Tensor]:
        """The memory of the parameters on this rank."""
        return [_local(param).detach() for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def moments(self) -> list[torch.Tensor]:
        """The memory of the optimizer's state on this rank, but for counts of steps."""
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        return [_local(value) for value in values if isinstance(value, torch.Tensor) and value.ndim]

    @property
    def average(self) -> AveragedModel:
        """The average of the model that is saved with it."""
        return cast("AveragedModel", self.state["average"])

    def backward(self) -> None:
        """A forward and a backward pass, with gradients of all parameters."""
        self.model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().sum().backward()


Writer: TypeAlias = Callable[[Job], object]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# What waits for the copy ------------------------------------------------------------------------------------------------


def _accumulate(job: Job) -> None:
    job.backward()
    job.backward()
    job.optimizer.step()


def _step_in_backward(job: Job) -> None:
    """The step is taken while the backward pass goes on, when the last gradient is there."""
    missing = set(job.model.parameters())

    def count(param: torch.Tensor) -> None:
        missing.discard(cast("nn.Parameter", param))
        if not missing:
            job.optimizer.step()

    for param in job.model.parameters():
        param.register_post_accumulate_grad_hook(count)
    job.backward()


def _schedule(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=1)
    job.optimizer.step()
    scheduler.step()


def _scale(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(job.optimizer)
    scaler.update()


def _step_with_hook(job: Job) -> None:
    job.optimizer.register_step_pre_hook(lambda *_: _write_data(job))
    job.optimizer.step()


def _freeze(job: Job) -> None:
    job.model.requires_grad_(requires_grad=False)
    job.optimizer.step()


def _add_group(job: Job) -> None:
    added = nn.Parameter(torch.zeros(WIDTH))
    added.grad = torch.ones_like(added)
    job.optimizer.add_param_group({"params": [added], "lr": 1.0})
    job.optimizer.step()


def _begin_anew(job: Job) -> None:
    job.optimizer.state.clear()
    job.optimizer.step()


def _step_by_other(job: Job) -> None:
    torch.optim.SGD(job.model.parameters(), lr=0.1).step()


def _load_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    _zero_moments(job)
    _write_data(job)


# What changes nothing that is lazy --------------------------------------------------------------------------------------


def _update_average(job: Job) -> None:
    job.average.update_parameters(job.model)


def _end(job: Job) -> None:
    job.state.clear()
    del job.model, job.optimizer


# What nobody makes wait -------------------------------------------------------------------------------------------------


class SignDescent:
    """An optimizer that is none of torch's, so it has no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        """Go down."""
        for param in self._params:
            param.sub_(param.sign(), alpha=0.1)


def _step_unhooked(job: Job) -> None:
    cast("Any", type(job.optimizer).step).__wrapped__(job.optimizer)


@torch.no_grad()
def _call_kernel(job: Job) -> None:
    params = [param for param in job.params if param.numel()]
    gradients, counts = [torch.ones_like(param) for param in params], [torch.ones(()) for _ in params]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    switches = {"amsgrad": False, "maximize": False}
    torch._fused_adamw_(params, gradients, job.moments[::2], job.moments[1::2], [], counts, **numbers, **switches)


def _write_data(job: Job) -> None:
    for param in job.model.parameters():
        param.data.add_(1)


def _write_by_numpy(job: Job) -> None:
    for param in job.params:
        param.numpy()[...] += 1


def _zero_moments(job: Job) -> None:
    for moment in job.moments:
        moment.zero_()


@torch.no_grad()
def _copy_average_back(job: Job) -> None:
    for param, averaged in zip(job.model.parameters(), job.average.module.parameters(), strict=True):
        param.copy_(averaged)


def _load_model(job: Job) -> None:
    job.model.load_state_dict({key: value + 1 for key, value in job.model.state_dict().items()})


def _replace_data(job: Job) -> None:
    for param in job.model.parameters():
        param.data = torch.zeros_like(param)


@torch.no_grad()
def _set(job: Job) -> None:
    for param in job.model.parameters():
        _local(param).set_(torch.zeros(WIDTH))


def _swap_tensors(job: Job) -> None:
    for param in job.model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(torch.zeros_like(param)))


def _free(job: Job) -> None:
    for tensor in (*job.params, *job.moments):
        tensor.untyped_storage().resize_(0)


def _share(job: Job) -> None:
    for tensor in (*job.params, *job.moments):
        tensor.untyped_storage().share_memory_()


STEPS: Final[Mapping[str, Writer]] = {
    "step after two backward passes": _accumulate,
    "step in backward": _step_in_backward,
    "step of a scheduled optimizer": _schedule,
    "step by a gradient scaler": _scale,
    "step with a hook that writes": _step_with_hook,
    "step after freezing": _freeze,
    "step with a group more": _add_group,
    "step with a new state": _begin_anew,
    "step of another optimizer": _step_by_other,
    "load_state_dict of the optimizer": _load_optimizer,
}
HARMLESS: Final[Mapping[str, Writer]] = {
    "update of the average": _update_average,
    "end of the job": _end,
}
BREACHES: Final[Mapping[str, Writer]] = {
    "step without hooks": _step_unhooked,
    "kernel of a step": _call_kernel,
    "step of a foreign optimizer": lambda job: SignDescent(job.model).step(),
    "write to data": _write_data,
    "write by numpy": _write_by_numpy,
    "moments to zero": _zero_moments,
    "average copied back": _copy_average_back,
    "load_state_dict of the model": _load_model,
    "model.to": lambda job: job.model.to(torch.float64),
    "data replaced": _replace_data,
    "set_": _set,
    "tensors swapped": _swap_tensors,
    "storage freed": _free,
    "storage shared": _share,
}
WRITERS: Final[Mapping[str, Writer]] = {**STEPS, **HARMLESS, **BREACHES}

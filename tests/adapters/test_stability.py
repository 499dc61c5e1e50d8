"""What a lazy snapshot may copy later: memory that nothing but a step of a hooked optimizer changes. All else has a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from anyshard.adapters.capture import capture
from anyshard.adapters.stability import MIN_LAZY_NBYTES, Eligibility, find_eligible
from anyshard.records.values import RegisteredType
from anyshard.testing.layouts import LAYOUTS
from anyshard.testing.training import take_step
from tests.adapters.fake_ranks import as_rank, on_each_rank
from tests.adapters.roundtrip import REGISTRY
from tests.adapters.test_capture_ranks import train

State = dict[str, Any]
DIM = 128  # a square matrix of it is large enough to be lazy


def look(state: Mapping[str, object], **options: Any) -> tuple[set[str], dict[str, set[str]], Eligibility]:
    """The addresses of what is lazy, those of the rest by reason, and all that was found."""
    captured = capture(state, registry=REGISTRY)
    found = find_eligible(state, captured, REGISTRY, **options)
    table = captured.shards
    lazy = {table.tensors.addresses[tensor] for tensor in table.tensor[found.is_lazy].tolist()}
    return lazy, {reason: set(addresses) for reason, addresses in found.reasons.items()}, found


def reason_of(state: Mapping[str, object], address: str, **options: Any) -> str:
    """Why this is not lazy, and nothing of it."""
    lazy, reasons, _ = look(state, **options)
    assert address not in lazy
    return " and ".join(reason for reason, addresses in reasons.items() if address in addresses)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))


def make_state(model: nn.Module | None = None, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> State:
    """A model and an optimizer of all its parameters, after a step."""
    model = model or make_model()
    optimizer = make(model.parameters())
    take_step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def expect_lazy(num_layers: int = 2) -> set[str]:
    weights = [f"{layer}.weight" for layer in range(num_layers)]
    return {f"model/{name}" for name in weights} | {
        f"optimizer/state/{name}/{key}" for name in weights for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("wrapping", ["plain", "compiled", "data parallel"])
def test_parameters_and_their_state_are_lazy(wrapping: str) -> None:
    """All that is large of model and optimizer; what is small is copied at the call, and says so."""
    wrap: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda model: model,
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "data parallel": DistributedDataParallel,
    }
    with as_rank(0, 2):
        state = make_state()
        lazy, reasons, found = look({**state, "model": wrap[wrapping](state["model"])})
    small = {f"smaller than {MIN_LAZY_NBYTES // 1024} KiB"}
    assert (expect_lazy(), small, (state["optimizer"],)) == (lazy, set(reasons), found.optimizers)


def test_every_row_is_lazy_or_has_a_reason_each_time_the_same() -> None:
    """One answer for one state."""
    state = make_state() | {"array": np.zeros(100_000), "tensor": torch.zeros(100_000)}
    lazy, reasons, found = look(state)
    assert set(capture(state, registry=REGISTRY).shards.tensors.addresses) == lazy.union(*reasons.values())
    again = look(state)[2]
    assert (found.is_lazy.tolist(), list(found.reasons.items())) == (again.is_lazy.tolist(), list(again.reasons.items()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp2", "fsdp3", "fsdp2 x tp2", "ep2 x fsdp2"])
def test_parameters_are_lazy_on_every_rank_of_a_layout(name: str) -> None:
    """With no limit of size nothing but buffers, empty tensors, unaligned and strided ones are copied at the call."""

    def act() -> tuple[set[str], bool]:
        model, optimizer = train(name)
        lazy, reasons, _ = look({"model": model, "optimizer": optimizer}, min_nbytes=1)
        return {reason.split()[0] + reason.split()[-1] for reason in reasons}, "model/embed.weight" in lazy

    for reasons, has_lazy in on_each_rank(LAYOUTS[name].size, act):
        assert reasons <= {"buffers,change", "smallerKiB", "notview", "notbytes"}
        assert has_lazy


class Hookless(torch.optim.SGD):
    """An optimizer whose step was replaced, as libraries do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, momentum=0.9)
        vars(self)["step"] = lambda: None


class Bare(torch.optim.Optimizer):
    """A wrapper that never called `Optimizer.__init__`."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state = {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


class ScheduleFree(torch.optim.SGD):
    """An optimizer that swaps parameters for evaluation."""

    def train(self) -> None:
        """Swap back."""

    def eval(self) -> None:
        """Swap."""


def _with_buffer() -> State:
    model = make_model()
    model.register_buffer("mean", torch.zeros(DIM, DIM))
    return make_state(model)


def _with_owned_buffer() -> State:
    state = make_state()
    state["model"].register_buffer("again", state["model"][0].weight.detach())
    return state


def _frozen(*, is_known: bool) -> State:
    model = make_model()
    model[0].weight.requires_grad_(False)
    return make_state(model, lambda params: torch.optim.AdamW([p for p in params if is_known or p.requires_grad]))


def _with_average() -> State:
    state = make_state()
    return state | {"average": AveragedModel(state["model"])}


def _channels_last() -> State:
    model = nn.Conv2d(DIM, DIM, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return make_state(model)


def _unaligned() -> State:
    flat = torch.zeros(DIM * DIM + 1)
    return make_state(nn.ParameterDict({"w": nn.Parameter(flat[1:].view(DIM, DIM))}))


def _half_owned_storage() -> State:
    flat = torch.zeros(2, DIM, DIM)
    return make_state(nn.ParameterDict({"w": nn.Parameter(flat[0])})) | {"rest": flat[1]}


def _capturable() -> State:
    model = make_model()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), capturable=True)}


def _of(make: Callable[..., torch.optim.Optimizer]) -> State:
    model = make_model()
    return {"model": model, "optimizer": make(model.parameters())}


def _by_two() -> State:
    state = make_state()
    return state | {"other": Hookless(state["model"][0].parameters())}


REFUSED: dict[str, tuple[Callable[[], State], str, str]] = {
    "buffer": (_with_buffer, "model/mean", "buffers"),
    "buffer that is owned": (_with_owned_buffer, "model/again", "buffers"),
    "owner of a buffer": (_with_owned_buffer, "model/0.weight", "in one storage"),
    "embedding that is normed": (lambda: make_state(nn.Embedding(DIM, DIM, max_norm=1.0)), "model/weight", "max_norm"),
    "frozen": (lambda: _frozen(is_known=True), "model/0.weight", "frozen"),
    "frozen, of no optimizer": (lambda: _frozen(is_known=False), "model/0.weight", "frozen"),
    "average": (_with_average, "average/module.0.weight", "no torch.optim.Optimizer"),
    "other model": (lambda: make_state() | {"teacher": make_model()}, "teacher/0.weight", "no torch.optim.Optimizer"),
    "tensor": (lambda: make_state() | {"x": torch.zeros(DIM, DIM)}, "x", "no torch.optim.Optimizer"),
    "array": (lambda: make_state() | {"x": np.zeros((DIM, DIM))}, "x", "NumPy"),
    "patched step": (lambda: _of(Hookless), "model/0.weight", "Hookless, an optimizer whose steps run no hooks"),
    "no hooks": (lambda: _of(Bare), "model/0.weight", "Bare, an optimizer whose steps run no hooks"),
    "also of one without hooks": (_by_two, "model/0.weight", "Hookless"),
    "changes outside of steps": (lambda: _of(ScheduleFree), "model/0.weight", "ScheduleFree"),
    "graphs": (_capturable, "model/0.weight", "capturable"),
    "channels last": (_channels_last, "model/weight", "not dense"),
    "unaligned": (_unaligned, "model/w", "not aligned"),
    "storage shared with a tensor": (_half_owned_storage, "model/w", "in one storage"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_something_else_may_change_is_copied_at_the_call(case: str) -> None:
    """It has one reason, in words for the report."""
    make, address, word = REFUSED[case]
    assert word in reason_of(make(), address)


def test_state_of_frozen_parameters_is_lazy() -> None:
    """Nothing but a step changes it, and no step does."""
    state = make_state()
    state["model"][0].weight.requires_grad_(False)
    assert expect_lazy() - {"model/0.weight"} == look(state)[0]


def test_tied_weights_are_lazy_under_their_first_name() -> None:
    """One row for one memory."""
    model = make_model()
    model[1].weight = model[0].weight
    lazy, _, _ = look(make_state(model))
    assert {"model/0.weight"} == {address for address in lazy if address.startswith("model/")}


def test_a_module_under_two_names_is_lazy_under_both() -> None:
    """Rows are known by their memory, so it is all one by which name the optimizer's parameters came."""
    state = make_state()
    lazy, _, _ = look({"again": nn.ModuleDict({"inner": state["model"]}), **state})
    expected = {f"{name}{layer}.weight" for name in ("model/", "again/inner.") for layer in range(2)}
    assert expected == {address for address in lazy if not address.startswith("optimizer/")}
    assert 4 == len(lazy - expected)


def test_optimizers_are_found_in_containers() -> None:
    """Each once, in the order of the app state, and only those to which something lazy belongs."""
    model = make_model()
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    state = {"model": model, "optimizers": {"all": optimizers, "first": optimizers[0]}}
    lazy, _, found = look(state)
    assert {"model/0.weight", "model/1.weight"} == lazy
    assert (optimizers[0], optimizers[2]) == found.optimizers


def test_optimizers_that_are_registered_values_own_nothing() -> None:
    """What such a value has to do with tensors, only its codec knows."""
    registry = REGISTRY.extended([RegisteredType("optimizer", torch.optim.AdamW, repr, str)])
    state = make_state()
    found = find_eligible(state, capture(state, registry=registry), registry)
    assert ([], ()) == (np.flatnonzero(found.is_lazy).tolist(), found.optimizers)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fsdp1_is_copied_at_the_call(*, use_orig_params: bool) -> None:
    """Neither parameters, which its hooks on the state dict make anew, nor state."""
    model = FullyShardedDataParallel(make_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    lazy, reasons, found = look({"model": model, "optimizer": optimizer})
    (addresses,) = (addresses for reason, addresses in reasons.items() if "FSDP1" in reason)
    assert (set(), ()) == (lazy, found.optimizers)
    assert {"model", "optimizer"} == {address.split("/")[0] for address in addresses}

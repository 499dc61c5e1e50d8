"""Cases of modules: hooks, tied weights, extra state, wrapped names, layouts. Each test is named after its row in cases.md."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import anyshard
from anyshard.errors import StateMismatch
from tests.cases.training import assert_equal_tensors, move, save, step


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_b004_compute_copy_is_refreshed_by_the_load() -> None:
    """Forward right after the load equals the reference: the hook that rebuilds the half-precision copy has run."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("compute", self.weight.detach().bfloat16(), persistent=False)
            self.register_load_state_dict_post_hook(Mixed.refresh)

        def refresh(self, _keys: Any) -> None:
            self.compute = self.weight.detach().bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.compute

    saved, live = Mixed(), Mixed()
    move({"model": saved}, {"model": live})
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert torch.equal(saved(x), live(x))


class Tied(nn.Module):
    """An embedding tied to the output layer, and two layers that are not tied."""

    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        if tie:
            self.output.weight = self.embedding.weight


def test_b066_both_tied_names_resolve_offline() -> None:
    """Read without a model, both names give equal data and the tie is recorded; nothing else is tied."""
    model = Tied()
    with anyshard.open(save({"model": model})) as checkpoint:
        ties = {address: checkpoint[address].tied_to for address in checkpoint if checkpoint[address].tied_to}
        assert {"model/output.weight": "model/embedding.weight"} == ties
        assert (checkpoint["model/output.weight"].numpy() == model.embedding.weight.detach().numpy()).all()
        assert (checkpoint["model/two.weight"][1:3] == model.two.weight.detach()[1:3].numpy()).all()


@pytest.mark.parametrize("kind", ["tied", "neighbours", "view of a half"])
def test_b068_shared_memory_is_saved_right(kind: str) -> None:
    """A tie is stored once; neighbours in one buffer and a view of a half are tensors of their own; none raises."""
    flat = torch.arange(8.0)
    state = {
        "tied": {"a": flat, "b": flat},
        "neighbours": {"a": flat[:4], "b": flat[4:]},
        "view of a half": {"a": flat, "b": flat[:4]},
    }[kind]
    live: dict[str, Any] = {"s": None}
    move({"s": state}, live)
    assert torch.equal(state["a"], live["s"]["a"])
    assert torch.equal(state["b"], live["s"]["b"])
    assert (kind == "tied") is (live["s"]["a"] is live["s"]["b"])


def test_b069_untied_checkpoint_into_a_tied_model_names_both() -> None:
    """Unequal values for one live tensor are an error with both names; nothing was changed; equal ones load."""
    saved, live = Tied(tie=False), Tied()
    before = live.embedding.weight.clone()
    with pytest.raises(StateMismatch, match=r"model/embedding.weight: tie .* model/output.weight"):
        move({"model": saved}, {"model": live})
    assert torch.equal(before, live.embedding.weight)
    saved.output.weight.data.copy_(saved.embedding.weight.data)
    move({"model": saved}, {"model": live})
    assert torch.equal(saved.embedding.weight, live.output.weight)


class Extra(nn.Linear):
    """A layer with opaque extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [io.BytesIO(b"scales"), torch.arange(5, dtype=torch.uint8), torch.empty(0), None])
def test_b074_extra_state_of_any_kind(extra: Any) -> None:
    """It comes back equal; models with and without it load from each other with a warning, unless the caller is strict."""
    saved, live, plain = Extra(extra), Extra("old"), nn.Linear(2, 2)
    move({"model": saved}, {"model": live})
    found = live.extra.getvalue() if isinstance(extra, io.BytesIO) else live.extra
    assert repr(b"scales" if isinstance(extra, io.BytesIO) else extra) == repr(found)
    report = move({"model": saved}, {"model": plain})
    assert 1 == sum("model/_extra_state" in warning for warning in report.warnings)
    report = move({"model": plain}, {"model": live})
    assert 1 == sum("model/_extra_state" in warning for warning in report.warnings)
    with pytest.raises(StateMismatch, match="model/_extra_state"):
        move({"model": plain}, {"model": live}, options=anyshard.LoadOptions(strict_extra_state=True))


def test_b077_scalar_parameters() -> None:
    """A 0-d parameter and its optimizer state keep the shape ()."""
    modules = [nn.ParameterDict({"scale": nn.Parameter(torch.tensor(value))}) for value in (1.0, 2.0)]
    optimizers = [torch.optim.AdamW(module.parameters()) for module in modules]
    step(modules[0], optimizers[0])
    store = save({"model": modules[0], "opt": optimizers[0]})
    anyshard.load(store, {"model": modules[1], "opt": optimizers[1]})
    assert modules[0]["scale"].item() == modules[1]["scale"].item()
    with anyshard.open(store) as checkpoint:
        assert () == checkpoint["model/scale"].shape == checkpoint["opt/state/scale/exp_avg"].shape


def test_b078_empty_things() -> None:
    """Nothing at all, zero-size tensors and empty metadata open again with their shapes."""
    anyshard.load(save({}), {})
    state: dict[str, Any] = {"a": torch.zeros(0, 4), "b": torch.zeros(3, 0), "meta": {}}
    live: dict[str, Any] = {"a": torch.ones(0, 4), "b": torch.ones(3, 0), "meta": None}
    move(state, live)
    assert ((0, 4), (3, 0), {}) == (tuple(live["a"].shape), tuple(live["b"].shape), live["meta"])


def test_b079_transposed_and_channels_last_weights() -> None:
    """Stored in C order whatever the memory looks like, and loaded into any layout."""
    transposed = nn.Linear(6, 4)
    transposed.weight = nn.Parameter(torch.randn(6, 4).t())
    saved = {"a": transposed, "b": nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)}
    live = {"a": nn.Linear(6, 4), "b": nn.Conv2d(2, 4, 3)}
    store = save(saved)
    anyshard.load(store, live)
    assert torch.equal(saved["a"].weight, live["a"].weight)
    assert torch.equal(saved["b"].weight, live["b"].weight)
    with anyshard.open(store) as checkpoint:
        assert (checkpoint["a/weight"].numpy() == transposed.weight.detach().numpy()).all()
        assert checkpoint["b/weight"].numpy().flags.c_contiguous


class Block(nn.Module):
    """A block with a submodule to wrap, and children whose names wrappers use too."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.module, self._orig_mod = nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 1)


def _compile(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def _checkpoint_attn(block: Block) -> Block:
    block.attn = checkpoint_wrapper(block.attn)
    return block


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "wrap", [_checkpoint_attn, lambda block: DistributedDataParallel(_checkpoint_attn(block))], ids=["plain", "ddp"]
)
def test_b102_wrapped_submodule_has_no_wrapper_names(wrap: Any) -> None:
    """Both directions load strictly, alone and under DDP."""
    saved, plain, again = wrap(Block()), Block(), wrap(Block())
    store = save({"model": saved})
    with anyshard.open(store) as checkpoint:
        assert {f"model/{name}" for name in Block().state_dict()} == set(checkpoint)
    anyshard.load(store, {"model": plain})
    move({"model": plain}, {"model": again})
    assert_equal_tensors(saved, again)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda block: DistributedDataParallel(_compile(block)),
        lambda block: _compile(DistributedDataParallel(block)),
        lambda block: _compile(DistributedDataParallel(_compile(block))),
    ],
    ids=["ddp of compiled", "compiled ddp", "compiled ddp of compiled"],
)
def test_b104_all_prefixes_are_removed_and_genuine_names_stay(wrap: Any) -> None:
    """DDP and compile in any order leave no trace, for weights and moments; `module` and `_orig_mod` are children here."""
    saved, live = wrap(Block()), Block()
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (saved, live)]
    step(saved, optimizers[0])
    move({"model": saved, "opt": optimizers[0]}, {"model": live, "opt": optimizers[1]})
    for seed in (1, 2):
        step(saved, optimizers[0], seed=seed)
        step(live, optimizers[1], seed=seed)
    for one, other in zip(saved.parameters(), live.parameters(), strict=True):
        assert torch.equal(one, other)


def _layers(num: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(num)))


@pytest.mark.parametrize("num", [3, 1])
def test_b108_missing_and_surplus_layers(num: int) -> None:
    """Strict raises for more layers and for fewer; else both are listed."""
    store = save({"model": _layers(2)})
    with pytest.raises(StateMismatch, match=r"model/[12].weight: (missing|unexpected)"):
        anyshard.load(store, {"model": _layers(num)})
    report = anyshard.load(store, {"model": _layers(num)}, strict=False)
    assert (2 if num == 3 else 0, 2 if num == 1 else 0) == (len(report.missing), len(report.unexpected))


def test_b110_renamed_keys_never_pass_as_a_load() -> None:
    """No name in common is an error even when not strict; the report counts what was loaded."""
    saved, live = _layers(2), nn.ModuleDict({"new": nn.Linear(2, 2), "newer": nn.Linear(2, 2)})
    with pytest.raises(StateMismatch, match="found none of 4"):
        move({"model": saved}, {"model": live}, strict=False)
    assert 4 == move({"model": saved}, {"model": _layers(3)}, strict=False).num_tensors


def test_b111_checkpoint_without_optimizer_says_so() -> None:
    """Default options name the section that is not stored; without strict the optimizer stays fresh."""
    model = _layers(1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(StateMismatch, match="optimizer not stored"):
        move({"model": _layers(1)}, state)
    assert ("optimizer",) == move({"model": _layers(1)}, state, strict=False).missing

"""Modules: canonical names, ties, extra state, hooks, buffers; loads go through the module's own `load_state_dict`."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from anyshard.adapters.modules import canonical_fqn, name_parameters
from anyshard.errors import InvalidAppState, Mismatch, StateMismatch
from tests.adapters.roundtrip import give, keep


class Block(nn.Module):
    """Two linear layers under attribute names that wrappers use too."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 3)
        self.attn = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(self._orig_mod(self.module(x)))


PLAIN_NAMES = tuple(sorted(f"m/{name}" for name in Block().state_dict()))


def _compile(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def _wrap_child(module: Block, wrap: Any) -> Block:
    module.attn = wrap(module.attn)
    return module


WRAPPINGS = {
    "plain": lambda m: m,
    "compiled": _compile,
    "parallel": nn.DataParallel,
    "parallel of compiled": lambda m: nn.DataParallel(_compile(m)),
    "compiled parallel": lambda m: _compile(nn.DataParallel(m)),
    "checkpointed": checkpoint_wrapper,
    "checkpointed child": lambda m: _wrap_child(m, checkpoint_wrapper),
    "compiled child": lambda m: _wrap_child(m, _compile),
    "compiled checkpointed child": lambda m: _compile(_wrap_child(m, lambda c: _compile(checkpoint_wrapper(c)))),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_names_have_no_trace_of_wrappers(wrapping: str) -> None:
    """Prefixes go by looking at the objects, at any depth; genuine children called `module` and `_orig_mod` stay."""
    assert PLAIN_NAMES == keep({"m": WRAPPINGS[wrapping](Block())}).tensors.addresses


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrapped_and_plain_models_load_from_each_other(wrapping: str) -> None:
    """Both directions load strictly, and every parameter arrives."""
    plain, wrapped, again = Block(), WRAPPINGS[wrapping](Block()), Block()
    give(keep({"m": plain}), {"m": wrapped})
    give(keep({"m": wrapped}), {"m": again})
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parameters_of_wrapped_modules_have_plain_names() -> None:
    """The optimizer's names come from the same canonical names as the tensors'."""
    module = _wrap_child(Block(), lambda child: _compile(checkpoint_wrapper(child)))
    names = set(name_parameters(module, module.state_dict(keep_vars=True)).values())
    assert {name.removeprefix("m/") for name in PLAIN_NAMES} == names
    assert "attn.weight" == canonical_fqn(module, "attn._orig_mod._checkpoint_wrapped_module.weight")


def test_identity_of_parameters_and_buffers_holds() -> None:
    """A load fills the tensors that are there, and autograd's counter sees it, once for each."""
    module = nn.BatchNorm1d(3)
    kept = keep({"m": nn.BatchNorm1d(3)})
    before = [(id(tensor), tensor.data_ptr()) for tensor in (*module.parameters(), *module.buffers())]
    version = module.weight._version
    give(kept, {"m": module})
    assert before == [(id(tensor), tensor.data_ptr()) for tensor in (*module.parameters(), *module.buffers())]
    assert module.weight._version > version
    assert module.weight.requires_grad


def test_parts_in_a_list_are_one_module() -> None:
    """Positions never enter an address: three parts load into one module of the same names."""
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})]
    kept = keep({"m": parts})
    assert ("m/0.bias", "m/0.weight", "m/1.bias", "m/1.weight") == kept.tensors.addresses
    give(kept, {"m": whole})
    assert torch.equal(parts[1]["1"].weight, whole[1].weight)


def test_parts_with_one_name_are_refused() -> None:
    """Two parts that both have a `weight` are an error that names the address and both positions."""
    with pytest.raises(InvalidAppState, match=r"m/(weight|bias): .* positions 0 and 2"):
        keep({"m": [nn.Linear(1, 1), nn.ModuleDict(), nn.Linear(1, 1)]})


def _tied(*, tie: bool = True) -> nn.Sequential:
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    if tie:
        module[1].weight = module[0].weight
    return module


def test_tied_names_are_stored_once_under_the_smallest() -> None:
    """The other name is an alias; untied tensors of equal content are not."""
    kept = keep({"m": _tied(), "u": _tied(tie=False)})
    assert ("m/0.weight", "m/1.weight", "u/0.weight", "u/1.weight") == kept.tensors.addresses
    assert [-1, 0, -1, -1] == kept.tensors.alias_of.tolist()
    assert {"m/0.weight", "u/0.weight", "u/1.weight"} == set(kept.data)


def test_tied_checkpoint_fills_an_untied_model() -> None:
    """All names of a tie load, each into memory of its own."""
    source, live = _tied(), _tied(tie=False)
    target = give(keep({"m": source}), {"m": live})
    assert torch.equal(source[0].weight, live[0].weight)
    assert torch.equal(source[0].weight, live[1].weight)
    assert () == target.ties


def test_untied_checkpoint_names_what_must_be_equal() -> None:
    """Two stored tensors for one live one are handed out for comparison, and filled once."""
    source, live = _tied(tie=False), _tied()
    with torch.no_grad():
        source[1].weight.copy_(source[0].weight)
    target = give(keep({"m": source}), {"m": live})
    assert [("m/0.weight", "m/1.weight")] == [(one.address, other.address) for one, other in target.ties]
    assert ("m/0.weight",) == target.names
    assert torch.equal(source[0].weight, live[1].weight)


def test_one_stored_name_is_enough_for_a_tied_model() -> None:
    """A live tied tensor is not missing if one of its names is stored."""
    live = _tied()
    target = give(keep({"m": {"1.weight": torch.ones(7, 4)}}), {"m": live})
    assert () == target.missing
    assert live[0].weight.eq(1).all()


class _Extra(nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra: Any = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [None, torch.arange(9, dtype=torch.uint8), torch.zeros(0), {"a": [torch.ones(2), 3]}, b"x" * 70_000]
)
def test_extra_state_comes_back_whole(extra: object) -> None:
    """Whatever `get_extra_state` returned is given to `set_extra_state`, whatever the live one is."""
    live = _Extra("old")
    give(keep({"m": _Extra(extra)}), {"m": live})
    assert repr(extra) == repr(live.extra)


def test_extra_state_may_be_a_byte_stream() -> None:
    """TransformerEngine returns `io.BytesIO`."""
    live = _Extra(io.BytesIO())
    give(keep({"m": _Extra(io.BytesIO(b"fp8 scales"))}), {"m": live})
    assert b"fp8 scales" == live.extra.getvalue()


def _without_extra() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    return module


@pytest.mark.parametrize(("saved", "live"), [(_Extra, _without_extra), (_without_extra, _Extra)])
def test_absent_or_surplus_extra_state_is_a_warning(saved: Any, live: Any) -> None:
    """A model without extra state and one with it load from each other; the report tells; strict_extra_state refuses."""
    make = {_Extra: lambda: _Extra(7), _without_extra: _without_extra}
    kept, module = keep({"m": make[saved]()}), make[live]()
    target = give(kept, {"m": module})
    assert ["m/_extra_state" in warning for warning in target.warnings] == [True]
    assert 7 == getattr(module, "extra", 7)
    with pytest.raises(StateMismatch, match="m/_extra_state"):
        give(kept, {"m": module}, strict=False, strict_extra_state=True)


def test_absent_extra_state_is_not_set() -> None:
    """`set_extra_state` is not called with what the module itself has just returned."""

    class Strict(_Extra):
        def set_extra_state(self, state: Any) -> None:
            pytest.fail("set_extra_state was called")

    give(keep({"m": _without_extra()}), {"m": Strict(7)})


class _Fused(nn.Module):
    """Exposes q and k of a fused parameter as tensors of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4))
        self._register_state_dict_hook(self._split)
        self._register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        qk = state.pop(f"{prefix}qk").detach()
        state[f"{prefix}q"], state[f"{prefix}k"] = qk[:2].clone(), qk[2:].clone()

    @staticmethod
    def _join(state: dict[str, Any], prefix: str, *_args: Any) -> None:
        state[f"{prefix}qk"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])


def test_tensors_made_by_hooks_arrive_through_hooks() -> None:
    """Filling the copies alone would leave the module as it was; `load_state_dict` puts them in."""
    source, live = _Fused(), _Fused()
    with torch.no_grad():
        source.qk.copy_(torch.arange(4.0))
    kept = keep({"m": source})
    assert ("m/k", "m/q") == kept.tensors.addresses
    give(kept, {"m": live})
    assert [0.0, 1.0, 2.0, 3.0] == live.qk.tolist()


def test_derived_buffers_are_refreshed_by_post_hooks() -> None:
    """A load_state_dict post hook sees the loaded weights (B004)."""
    live = nn.Linear(2, 1, bias=False)
    live.register_buffer("low", torch.zeros(1, 2, dtype=torch.bfloat16), persistent=False)
    live.register_load_state_dict_post_hook(lambda module, _: setattr(module, "low", module.weight.detach().bfloat16()))
    source = nn.Linear(2, 1, bias=False)
    target = give(keep({"m": source}), {"m": live})
    assert torch.equal(source.weight.bfloat16(), live.low)
    assert ["low" in warning for warning in target.warnings] == [True]


def test_non_persistent_buffers_are_reported_at_save() -> None:
    """They are not stored, and the report names them."""
    module = nn.Linear(1, 1)
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    kept = keep({"m": module})
    assert ("m: non-persistent buffers are not stored: cache",) == kept.warnings
    assert ("m/bias", "m/weight") == kept.tensors.addresses


def test_parametrized_weights_round_trip() -> None:
    """Weight norm stores its originals, and the weight computed from them is equal after the load."""
    source, live = (parametrizations.weight_norm(nn.Linear(3, 2)) for _ in range(2))
    give(keep({"m": source}), {"m": live})
    assert torch.equal(source.weight, live.weight)


def test_meta_module_is_refused_at_load() -> None:
    """A load into a meta module would be a silent nothing; the error says what to call."""
    with torch.device("meta"):
        live = nn.Linear(2, 2)
    with pytest.raises(InvalidAppState, match=r"m/(weight|bias): .* to_empty"):
        give(keep({"m": nn.Linear(2, 2)}), {"m": live})


def test_module_against_a_stored_value_is_a_difference_of_kind() -> None:
    """A name that held a number cannot fill a module."""
    with pytest.raises(StateMismatch) as caught:
        give(keep({"m": 3}), {"m": nn.Linear(1, 1)})
    assert [(Mismatch.KIND, "m")] == [(d.kind, d.address) for d in caught.value.differences]


def test_one_module_under_two_names_is_filled_once() -> None:
    """The engine and the bare module are the same memory: their stored tensors must be equal, and one of them is read."""
    module = nn.Linear(2, 1)
    state = {"engine": nn.DataParallel(module), "model": module}
    target = give(keep(state), state)
    expected = [("engine/bias", "model/bias"), ("engine/weight", "model/weight")]
    assert expected == [(one.address, other.address) for one, other in target.ties]
    assert 2 == len(target.destinations)


def test_modules_of_inference_mode_are_filled_and_handed_over() -> None:
    """A module that was built in inference mode takes its state, though nobody may change it outside of that mode."""
    saved = nn.Linear(2, 2)
    with torch.inference_mode():
        live = nn.Linear(2, 2)
    give(keep({"m": saved}), {"m": live})
    assert torch.equal(saved.weight, live.weight)

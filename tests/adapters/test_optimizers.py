"""Optimizers at save: state by FQN, groups by sets of FQNs, names from modules or from the optimizer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anyshard.errors import InvalidAppState
from tests.adapters.roundtrip import Kept, keep


def step(module: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 0) -> None:
    """One training step on numbers of its own."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def addresses(kept: Kept, prefix: str = "opt/") -> tuple[str, ...]:
    """What was stored of the optimizer."""
    return tuple(address.removeprefix(prefix) for address in kept.tensors.addresses if address.startswith(prefix))


def groups(kept: Kept, name: str = "opt") -> dict[str, Any]:
    """The stored groups by label."""
    groups: dict[str, Any] = kept.trees[name]["param_groups"]
    return groups


def names(kept: Kept, name: str = "opt") -> list[list[str]]:
    """The names of the parameters of each stored group."""
    return [list(group["params"]) for group in groups(kept, name).values()]


def test_state_goes_by_fqn() -> None:
    """Addresses hold the parameter's name, never its number."""
    module = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer)
    expected = tuple(f"state/{name}/{key}" for name in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq", "step"))
    assert expected == addresses(keep({"opt": optimizer, "model": module}))


def test_groups_are_options_and_sets_of_names() -> None:
    """Options as they are, names sorted, no positions of parameters, `param_names` left out; tensors in options are leaves."""
    module = nn.Linear(2, 1)
    pairs = [("weight", module.weight), ("bias", module.bias)]
    optimizer = torch.optim.AdamW([{"params": pairs, "lr": torch.tensor(0.5), "name": "all"}], foreach=False)
    kept = keep({"opt": optimizer, "model": module})
    (group,) = groups(kept).values()
    assert {"bias": None, "weight": None} == group["params"]
    assert ("param_groups/bias/lr",) == addresses(kept)
    assert ("all", (0.9, 0.999)) == (group["options"]["name"], group["options"]["betas"])
    assert "param_names" not in group["options"]


def test_optimizer_over_two_modules_names_them() -> None:
    """Equal FQNs of two modules are told apart by the module's address, in one component."""
    modules = {"gen": nn.Linear(1, 1), "disc": nn.Linear(1, 1)}
    params = [param for module in modules.values() for param in module.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for module in modules.values():
        step(module, optimizer)
    expected = {f"state/{module}~1{name}/momentum_buffer" for module in modules for name in ("weight", "bias")}
    assert expected == set(addresses(keep({**modules, "opt": optimizer})))


def test_names_do_not_depend_on_the_order_of_the_app_state() -> None:
    """A parameter of two modules goes by the smaller address, whichever comes first."""
    shared, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([shared.weight, other.weight], lr=0.1)
    state = {"z": nn.Sequential(shared), "a": nn.DataParallel(shared), "k": other, "opt": optimizer}
    for order in (list(state), list(state)[::-1]):
        assert [["a/weight", "k/weight"]] == names(keep({name: state[name] for name in order}))


def test_names_do_not_depend_on_parts_that_have_names_too() -> None:
    """The module that has all parameters of an optimizer names them, though a part of it is in the app state as well."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizers = {"all": torch.optim.SGD(model.parameters(), lr=0.1), "last": torch.optim.SGD(model[1].parameters(), lr=0.1)}
    whole, parted = keep({"model": model, **optimizers}), keep({"head": model[1], "model": model, "a": model[0], **optimizers})
    assert [["0.bias", "0.weight", "1.bias", "1.weight"]] == names(parted, "all")
    for name in optimizers:
        assert groups(whole, name) == groups(parted, name)


def test_module_that_is_there_twice_counts_once() -> None:
    """The engine and the bare module in one app state do not make an optimizer span two modules."""
    module = nn.Linear(1, 1)
    state = {"a": nn.DataParallel(module), "b": module, "opt": torch.optim.SGD(module.parameters(), lr=0.1)}
    assert [["bias", "weight"]] == names(keep(state))


def test_optimizer_without_module_goes_by_its_own_names() -> None:
    """`param_names` of torch 2.6 and later stand in for the module."""
    module = nn.Linear(1, 1)
    kept = keep({"opt": torch.optim.SGD(module.named_parameters(), lr=0.1)})
    assert [["bias", "weight"]] == names(kept)


def test_parameters_without_any_name_are_refused() -> None:
    """The error lists shapes and groups, and says what to do."""
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    with pytest.raises(InvalidAppState, match=r"opt: .* 2 of 2 in none: \(2, 3\) in group 0, .* named_parameters\(\)"):
        keep({"opt": optimizer, "model": nn.Linear(3, 2)})


def test_module_that_goes_by_its_own_methods_still_names_parameters() -> None:
    """A module that overrides `state_dict` is stored its own way; its parameters keep their FQNs for the optimizer."""

    class Own(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"mine": self.weight}

    module = Own(1, 1)
    kept = keep({"opt": torch.optim.SGD(module.parameters(), lr=0.1), "model": module})
    assert [["bias", "weight"]] == names(kept)


def test_parameters_hidden_by_state_dict_hooks_have_names() -> None:
    """A fused parameter whose pieces are in the state dict in its place is named as the module calls it."""
    module = nn.Linear(1, 1)
    module._register_state_dict_hook(lambda _m, state, prefix, _meta: state.update({"w": state.pop(f"{prefix}weight")}) or None)
    module._register_state_dict_hook(lambda _m, state, _prefix, _meta: state.update({"w": state["w"].detach().clone()}))
    kept = keep({"opt": torch.optim.SGD(module.parameters(), lr=0.1), "model": module})
    assert [["bias", "weight"]] == names(kept)


def test_tied_parameter_goes_by_its_smallest_name() -> None:
    """State of a tied parameter lies under the name under which the parameter is stored."""
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    module[1].weight = module[0].weight
    assert [["0.weight"]] == names(keep({"opt": torch.optim.SGD(module.parameters(), lr=0.1), "m": module}))


def test_optimizers_in_a_list_are_one_optimizer() -> None:
    """Their groups follow each other and their names are united."""
    module = nn.Linear(1, 1)
    optimizers = [torch.optim.SGD([module.weight], lr=0.1), torch.optim.SGD([module.bias], lr=0.2)]
    kept = keep({"opt": optimizers, "m": module})
    assert {"weight": 0.1, "bias": 0.2} == {label: group["options"]["lr"] for label, group in groups(kept).items()}
    assert [["weight"], ["bias"]] == names(kept)


def test_groups_are_labelled_by_their_smallest_name() -> None:
    """Whatever the order of parameters; groups without any are known by their position, and addresses escape the labels."""
    module = nn.ModuleDict({"\u00e9": nn.Linear(1, 1), "z": nn.Linear(1, 1)})
    lists = [[], list(module["\u00e9"].parameters()), [], list(module["z"].parameters())[::-1]]
    optimizer = torch.optim.SGD([{"params": params, "lr": torch.tensor(0.1)} for params in lists], foreach=False)
    kept = keep({"opt": optimizer, "m": module})
    assert ["~0", "\u00e9.bias", "~2", "z.bias"] == list(groups(kept))
    assert ("z.bias", "~00", "~02", "\u00e9.bias") == tuple(address.split("/")[1] for address in addresses(kept))


def test_no_parameter_has_the_label_of_an_empty_group() -> None:
    """A name that begins with `~` gets another one in front."""
    module = nn.ParameterDict({"~0": nn.Parameter(torch.zeros(1)), "~~0": nn.Parameter(torch.zeros(1))})
    optimizer = torch.optim.SGD([{"params": [], "lr": 0.1}, *({"params": [param]} for param in module.values())], lr=0.2)
    kept = keep({"opt": optimizer, "m": module})
    assert {"~0": [], "~~0": ["~0"], "~~~0": ["~~0"]} == {label: list(group["params"]) for label, group in groups(kept).items()}


def test_one_parameter_in_two_optimizers_of_a_list_is_refused() -> None:
    """Two states for one name cannot both be stored."""
    module = nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(InvalidAppState, match="opt: .* two called 'weight'"):
        keep({"opt": optimizers, "m": module})


def test_optimizers_in_a_dict_have_names_of_their_own() -> None:
    """One optimizer per parameter, each under its name (B065)."""
    module = nn.Linear(1, 1)
    optimizers = {name: torch.optim.Adam([param]) for name, param in module.named_parameters()}
    for optimizer in optimizers.values():
        step(module, optimizer)
    stored = addresses(keep({"opt": optimizers, "m": module}), prefix="")
    assert set() == {name.split("/")[1] for name in stored} - {"bias", "weight"}
    assert "weight/state/weight/step" in addresses(keep({"opt": optimizers, "m": module}))


def test_container_with_state_elsewhere_goes_by_its_own_methods() -> None:
    """An optimizer class that overrides `state_dict` holds its state where only it knows (torchtitan's container)."""
    module = nn.Linear(1, 1)
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    step(module, inner)

    class Container(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(list(module.parameters()), {})

        def state_dict(self) -> Any:
            return {"weight.momentum": inner.state[module.weight]["momentum_buffer"]}

    assert ("weight.momentum",) == addresses(keep({"opt": Container(), "m": module}))


def test_optimizer_without_any_state_is_reported() -> None:
    """0 of n parameters with state is legal and worth a line in the report."""
    module = nn.Linear(1, 1)
    kept = keep({"opt": torch.optim.AdamW(module.parameters()), "m": module})
    assert ["opt: 0 of 2 parameters have state" in warning for warning in kept.warnings] == [True]


def test_state_of_a_parameter_in_no_group_is_refused() -> None:
    """A stale entry would be lost without a word."""
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    optimizer.state[module.bias] = {"momentum_buffer": torch.zeros(1)}
    with pytest.raises(InvalidAppState, match=r"found state of a tensor of shape \(1,\)"):
        keep({"opt": optimizer, "m": module})


def test_save_changes_nothing() -> None:
    """Weights, gradients, state and options are the same objects with the same bytes after a capture (B060)."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
    step(module, optimizer)
    before = [(id(p), p.clone(), id(p.grad), p.grad.clone(), p._version) for p in module.parameters() if p.grad is not None]
    keep({"opt": optimizer, "m": module})
    after = [(id(p), p, id(p.grad), p.grad, p._version) for p in module.parameters() if p.grad is not None]
    for (old_id, old, old_grad_id, old_grad, old_version), (new_id, new, new_grad_id, new_grad, version) in zip(
        before, after, strict=True
    ):
        assert (old_id, old_grad_id, old_version) == (new_id, new_grad_id, version)
        assert torch.equal(old, new)
        assert torch.equal(old_grad, new_grad)
    assert 0 == len(optimizer.state)

"""Optimizers: state by the FQN of the parameter, groups as (options, set of FQNs). Positions never enter an address.

The tree is `{"state": {fqn: {...}}, "param_groups": {label: {"options": {...}, "params": {fqn: None}}}}`, and `"other"` for
state that belongs to no parameter. All of it is dicts, so that the trees of several ranks can be united. Nothing here takes a
step or calls the optimizer's own `state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from anyshard.adapters.collect import Collector
from anyshard.adapters.placements import is_sharded, regions_of
from anyshard.adapters.recognise import holds
from anyshard.adapters.survey import ModuleNames
from anyshard.adapters.tensors import is_dtensor
from anyshard.errors import InvalidAppState
from anyshard.records.addresses import component, join_address, show

NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """One parameter group of one of the optimizers under a name; `names` are parallel to its parameters."""

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    params: tuple[torch.Tensor, ...]
    names: tuple[str, ...]


def name_groups(optimizers: Sequence[torch.optim.Optimizer], address: str, modules: ModuleNames) -> tuple[LiveGroup, ...]:
    """The groups of all optimizers under one name, every parameter named.

    A parameter is called by its FQN in the largest module of the app state that has all these parameters; if there is none, in
    the largest that has this one, preceded by that module's address. One in no module is called by `param_names` of its group.
    Raises `InvalidAppState` for one without any name, and for two with the same.
    """
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    found = _find_names({id(param) for _, group in groups for param in group["params"]}, modules)
    names = [_list_names(group, found) for _, group in groups]
    _check_named(groups, names, address)
    made = tuple(
        LiveGroup(optimizer, group, tuple(group["params"]), tuple(map(str, of_group)))
        for (optimizer, group), of_group in zip(groups, names, strict=True)
    )
    _check_distinct([name for group in made for name in group.names], address)
    return made


def _find_names(params: set[int], modules: ModuleNames) -> dict[int, str]:
    """The name of each parameter that is in a module. It does not change when a part of a module gets a name of its own too."""
    ranked = sorted(modules, key=lambda module: (-len(modules[module]), module.encode()))
    known = params & set().union(*modules.values())
    for module in ranked:
        if known <= modules[module].keys():
            return {param: modules[module][param] for param in known}
    owners = {param: module for module in reversed(ranked) for param in known & modules[module].keys()}
    return {param: f"{module}/{modules[module][param]}" for param, module in owners.items()}


def _list_names(group: Mapping[str, Any], found: Mapping[int, str]) -> list[str | None]:
    own_names = group.get("param_names") or [None] * len(group["params"])
    return [found.get(id(param), own_name) for param, own_name in zip(group["params"], own_names, strict=True)]


def _check_named(groups: Sequence[tuple[object, Mapping[str, Any]]], names: Sequence[list[str | None]], address: str) -> None:
    nameless = [
        f"{tuple(param.shape)} in group {position}"
        for position, ((_, group), of_group) in enumerate(zip(groups, names, strict=True))
        for param, name in zip(group["params"], of_group, strict=True)
        if name is None
    ]
    if nameless:
        raise InvalidAppState(
            f"{show(address)}: expected every parameter in a module of the app state, found {len(nameless)} of "
            f"{sum(map(len, names))} in none: {', '.join(nameless[:20])}; put the module into the app state too, or build the "
            "optimizer from named_parameters()"
        )


def _check_distinct(names: Sequence[str], address: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidAppState(
                f"{show(address)}: expected each parameter once, found two called {name!r} (or one in two optimizers); "
                "give the optimizers names of their own in a dict"
            )
        seen.add(name)


def capture_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], address: str, modules: ModuleNames, collector: Collector
) -> dict[str, object]:
    """The tree of the optimizers under one name; warns where no parameter has state."""
    groups = name_groups(optimizers, address, modules)
    tree: dict[str, object] = {
        "state": _capture_state(groups, join_address(address, "state"), collector),
        "param_groups": {
            label: _capture_group(group, join_address(address, "param_groups", component(label, within=address)), collector)
            for label, group in zip(label_groups(groups), groups, strict=True)
        },
    }
    if other := _list_other_state(optimizers, groups, address):
        tree["other"] = collector.take(other, join_address(address, "other"))
    collector.branch(address, *(join_address(address, part) for part in ("state", "param_groups", "other")))
    _warn_if_empty(groups, tree, address, collector)
    return tree


def label_groups(groups: Sequence[LiveGroup]) -> list[str]:
    """The name of each group: its smallest parameter's, after a `~` if it begins with one; without parameters `~<position>`.

    A stage of a pipeline may have other groups without parameters than the next one, but in the same list of groups.
    """
    return [_label_group(group, position) for position, group in enumerate(groups)]


def _label_group(group: LiveGroup, position: int) -> str:
    if not group.names:
        return f"~{position}"
    name = min(group.names, key=str.encode)
    return f"~{name}" if name.startswith("~") else name


def _capture_state(groups: Sequence[LiveGroup], address: str, collector: Collector) -> dict[str, object]:
    captured: dict[str, object] = {}
    for group in groups:
        for param, name in zip(group.params, group.names, strict=True):
            if param in group.optimizer.state:
                place = join_address(address, component(name, within=address))
                captured[name] = collector.take(_name_shards(group.optimizer.state[param], param, place), place)
    return captured


def _name_shards(state: object, param: torch.Tensor, address: str) -> object:
    """A parameter's state in which each entry with a tensor that is per shard stands below the key of the shard."""
    if not is_dtensor(param):
        return state
    if type(state) is dict:
        return {name: _name_shard(entry, param, address) for name, entry in state.items()}
    return _name_shard(state, param, address)


def _name_shard(entry: object, param: torch.Tensor, address: str) -> object:
    # The entry as a whole, for of containers within it only dicts are united with those of other ranks.
    if not holds(entry, partial(is_per_shard, param=param)):
        return entry
    key = shard_key(param, address)
    return {key: entry} if key else {}


def is_per_shard(value: object, param: torch.Tensor) -> bool:
    """Whether a part of a parameter's state belongs to this rank's shard of it alone, and not to the whole parameter.

    That is a plain tensor with dims beside a sharded parameter, unless it has the shape of the whole (T15).
    """
    if not isinstance(value, torch.Tensor) or is_dtensor(value) or value.ndim == 0:
        return False
    return is_dtensor(param) and is_sharded(param) and value.shape != param.shape


def shard_key(param: torch.Tensor, address: str) -> str:
    """The key under which state of this rank's shard of a parameter is stored, equal for replicas; "" if it has no region here.

    It lists the regions: `~shard 0,0-2,5 4,0-2,5` is rows 0, 1, 4 and 5 of five columns.
    """
    if not is_dtensor(param):
        return ""
    regions = regions_of(param, address)
    written = [
        f" {','.join(map(str, offsets))}-{','.join(map(str, lengths))}"
        for offsets, lengths in zip(regions.offsets.tolist(), regions.lengths.tolist(), strict=True)
    ]
    return f"~shard{''.join(written)}" if written else ""


def _capture_group(group: LiveGroup, address: str, collector: Collector) -> dict[str, object]:
    collector.branch(address, join_address(address, "params"))
    return {
        "options": take_options(group.options, address, collector),
        "params": dict.fromkeys(sorted(group.names, key=str.encode)),
    }


def take_options(group: Mapping[str, object], address: str, collector: Collector) -> object:
    """The tree of the options of a group that has this address."""
    return collector.take({key: value for key, value in group.items() if key not in NOT_OPTIONS}, address)


def _list_other_state(
    optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[LiveGroup], address: str
) -> dict[str, object]:
    known = {id(param) for group in groups for param in group.params}
    other: dict[str, object] = {}
    for optimizer in optimizers:
        for key, value in optimizer.state.items():
            if isinstance(key, torch.Tensor) and id(key) in known:
                continue
            if not isinstance(key, str) or key in other:
                found = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
                raise InvalidAppState(
                    f"{show(address)}: expected state of parameters in the groups (or under names used once), found state of "
                    f"{found}; remove stale entries, or save the optimizer's own state_dict()"
                )
            other[key] = value
    return other


def _warn_if_empty(groups: Sequence[LiveGroup], tree: Mapping[str, object], address: str, collector: Collector) -> None:
    num_params = sum(param.requires_grad for group in groups for param in group.params)
    if num_params and not tree["state"]:
        collector.warn(
            f"{show(address)}: 0 of {num_params} parameters have state; right for optimizers that have none, and before the "
            "first step (but a rehearsal needs the structure that will be saved); else pass the inner optimizers"
        )
    if any(has_hooks(group.optimizer) for group in groups):
        collector.warn(f"{show(address)}: the hooks of the optimizer's state_dict are not run")


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has hooks on its state dict, which a save does not run."""
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return any(vars(optimizer).get(hook) for hook in hooks)

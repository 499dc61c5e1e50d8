"""Optimizers: state by the FQN of the parameter, groups as (options, set of FQNs). Positions never enter an address.

The tree is `{"state": {fqn: {...}}, "param_groups": [{"options": {...}, "params": [...]}]}`, and `"other"` for state that
belongs to no parameter. Nothing here takes a step or calls the optimizer's own `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyshard.adapters.collect import Collector
from anyshard.adapters.survey import ParameterName
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter in its group, before it has a name for the checkpoint."""

    group: int
    param: torch.Tensor
    found: ParameterName | None
    own_name: str | None


def name_groups(
    optimizers: Sequence[torch.optim.Optimizer], address: str, names: Mapping[int, ParameterName]
) -> tuple[LiveGroup, ...]:
    """The groups of all optimizers under one name, every parameter named.

    A parameter is called by its FQN, preceded by its module's address if the optimizers span several modules; one in no
    module by `param_names` of its group. Raises `InvalidAppState` for one without any name, and for two with the same.
    """
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    places = [place for position, (_, group) in enumerate(groups) for place in _list_places(position, group, names)]
    _check_named(places, address)
    is_plain = len({place.found.module for place in places if place.found}) <= 1
    by_group: list[list[tuple[torch.Tensor, str]]] = [[] for _ in groups]
    for place in places:
        by_group[place.group].append((place.param, _write_name(place, is_plain=is_plain)))
    _check_distinct([name for pairs in by_group for _, name in pairs], address)
    return tuple(
        LiveGroup(optimizer, group, tuple(param for param, _ in pairs), tuple(name for _, name in pairs))
        for (optimizer, group), pairs in zip(groups, by_group, strict=True)
    )


def _list_places(position: int, group: dict[str, Any], names: Mapping[int, ParameterName]) -> Iterator[_Place]:
    own_names = group.get("param_names") or [None] * len(group["params"])
    for param, own_name in zip(group["params"], own_names, strict=True):
        yield _Place(position, param, names.get(id(param)), own_name)


def _write_name(place: _Place, *, is_plain: bool) -> str:
    if place.found is None:
        return str(place.own_name)
    return place.found.fqn if is_plain else f"{place.found.module}/{place.found.fqn}"


def _check_named(places: Sequence[_Place], address: str) -> None:
    nameless = [place for place in places if place.found is None and place.own_name is None]
    if nameless:
        found = ", ".join(f"{tuple(place.param.shape)} in group {place.group}" for place in nameless[:20])
        raise InvalidAppState(
            f"{show(address)}: expected every parameter in a module of the app state, found {len(nameless)} of {len(places)} in "
            f"none: {found}; put the module into the app state too, or build the optimizer from named_parameters()"
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
    optimizers: Sequence[torch.optim.Optimizer], address: str, names: Mapping[int, ParameterName], collector: Collector
) -> dict[str, object]:
    """The tree of the optimizers under one name; warns where no parameter has state."""
    groups = name_groups(optimizers, address, names)
    tree: dict[str, object] = {
        "state": _capture_state(groups, join_address(address, "state"), collector),
        "param_groups": [
            _capture_group(group, join_address(address, "param_groups", str(position)), collector)
            for position, group in enumerate(groups)
        ],
    }
    if other := _list_other_state(optimizers, groups, address):
        tree["other"] = collector.take(other, join_address(address, "other"))
    _warn_if_empty(groups, tree, address, collector)
    return tree


def _capture_state(groups: Sequence[LiveGroup], address: str, collector: Collector) -> dict[str, object]:
    return {
        name: collector.take(group.optimizer.state[param], join_address(address, component(name, within=address)))
        for group in groups
        for param, name in zip(group.params, group.names, strict=True)
        if param in group.optimizer.state
    }


def _capture_group(group: LiveGroup, address: str, collector: Collector) -> dict[str, object]:
    options = {key: value for key, value in group.options.items() if key not in NOT_OPTIONS}
    return {"options": collector.take(options, address), "params": sorted(group.names, key=str.encode)}


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
            f"{show(address)}: 0 of {num_params} parameters have state; right before the first step and for optimizers without "
            "state, else pass the inner optimizers"
        )
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    if any(vars(group.optimizer).get(hook) for group in groups for hook in hooks):
        collector.warn(f"{show(address)}: the hooks of the optimizer's state_dict are not run")

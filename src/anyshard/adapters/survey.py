"""Looks over an app state once per save or load: where its modules are, and what their parameters are called."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch

from anyshard.adapters.modules import ModuleView, name_parameters
from anyshard.adapters.recognise import Kind, holds, is_object, parts_of, recognise, unwrap
from anyshard.errors import InvalidAppState, LimitExceeded
from anyshard.records.addresses import component, join_address, show
from anyshard.records.values import ValueLimits, ValueRegistry, label_item, list_items

_OBJECTS = frozenset({Kind.MODULES, Kind.OPTIMIZERS, Kind.STATEFUL})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor})

# The FQN of each parameter by its id, for each address at which the app state has modules.
ModuleNames: TypeAlias = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Survey:
    """The modules of an app state and the names of their parameters by address, and which containers hold objects."""

    registry: ValueRegistry
    views: Mapping[str, tuple[ModuleView, ...]]
    names: ModuleNames
    holders: AbstractSet[int]

    def holds_objects(self, container: object) -> bool:
        """Whether a module, an optimizer or another stateful lies in a container of the app state, or in those below it."""
        return id(container) in self.holders


def survey(app_state: Mapping[str, object], registry: ValueRegistry) -> Survey:
    """Look over an app state; calls `state_dict` of each plain module, and no other method of the user's objects."""
    surveyor = _Surveyor(registry)
    if not isinstance(app_state, Mapping):
        raise InvalidAppState(f"expected a mapping from names to objects as the app state, found {type(app_state).__name__}")
    for name, value in app_state.items():
        if not isinstance(name, str) or not name:
            raise InvalidAppState(f"expected top-level names of the app state to be non-empty str, found {name!r}; rename it")
        if holds(value, partial(is_object, registry=registry)):
            surveyor.visit(value, component(name), frozenset())
    return Survey(registry, surveyor.views, surveyor.names, surveyor.holders)


@final
class _Surveyor:
    def __init__(self, registry: ValueRegistry) -> None:
        self._registry = registry
        self._plain: set[int] = set()
        self.views: dict[str, tuple[ModuleView, ...]] = {}
        self.names: dict[str, dict[int, str]] = {}
        self.holders: set[int] = set()

    def visit(self, value: object, address: str, around: frozenset[int]) -> bool:
        """Look over one node; true if it is an object or holds one."""
        value = unwrap(value)
        kind = recognise(value, self._registry, address)
        if kind is Kind.CONTAINER:
            return self._visit_container(value, address, around)
        if kind is Kind.MODULES:
            self.views[address] = tuple(ModuleView(module, address) for module in parts_of(value))
            for view in self.views[address]:
                self._add_names(view.module, view.state, address)
        elif kind is Kind.STATEFUL and isinstance(value, torch.nn.Module):
            self._add_names(value, {}, address)
        return kind in _OBJECTS

    def _visit_container(self, container: Any, address: str, around: frozenset[int]) -> bool:
        if id(container) in self._plain:
            return False
        self._check_nesting(container, address, around)
        within = around | {id(container)}
        found = [
            self.visit(item, join_address(address, label_item(container, key)), within)
            for key, item in list_items(container)
            if type(item) not in _ATOMS
        ]
        (self.holders if any(found) else self._plain).add(id(container))
        return any(found)

    def _check_nesting(self, container: object, address: str, around: frozenset[int]) -> None:
        if id(container) in around:
            raise InvalidAppState(f"{show(address)}: expected a tree, found a container that contains itself; break the cycle")
        if len(around) >= ValueLimits().max_depth:
            raise LimitExceeded(f"{show(address)}: expected at most {len(around)} nested containers, found more; flatten them")

    def _add_names(self, module: torch.nn.Module, state: Mapping[str, object], address: str) -> None:
        self.names.setdefault(address, {}).update(name_parameters(module, state))

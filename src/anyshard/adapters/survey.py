"""Looks over an app state once per save or load: where its modules are, and what their parameters are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from anyshard.adapters.modules import ModuleView, name_parameters
from anyshard.adapters.recognise import Kind, holds, is_object, parts_of, recognise, unwrap
from anyshard.errors import InvalidAppState
from anyshard.records.addresses import component, join_address
from anyshard.records.values import ValueRegistry, list_components, list_items


@dataclass(frozen=True, slots=True)
class ParameterName:
    """What a parameter is called: the address of its module(s) in the app state, and its FQN there."""

    module: str
    fqn: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The modules of an app state by address, and the names of all their parameters by id."""

    registry: ValueRegistry
    views: Mapping[str, tuple[ModuleView, ...]]
    names: Mapping[int, ParameterName]

    def holds_objects(self, value: object) -> bool:
        """Whether a module, an optimizer or another stateful is this value or lies in the containers below it."""
        return holds(value, lambda item: is_object(item, self.registry))


def survey(app_state: Mapping[str, object], registry: ValueRegistry) -> Survey:
    """Look over an app state; calls `state_dict` of each plain module, and no other method of the user's objects."""
    surveyor = _Surveyor(registry)
    if not isinstance(app_state, Mapping):
        raise InvalidAppState(f"expected a mapping from names to objects as the app state, found {type(app_state).__name__}")
    for name, value in app_state.items():
        if not isinstance(name, str) or not name:
            raise InvalidAppState(f"expected top-level names of the app state to be non-empty str, found {name!r}; rename it")
        surveyor.visit(value, component(name), frozenset())
    return Survey(registry, surveyor.views, surveyor.names)


@final
class _Surveyor:
    def __init__(self, registry: ValueRegistry) -> None:
        self._registry = registry
        self.views: dict[str, tuple[ModuleView, ...]] = {}
        self.names: dict[int, ParameterName] = {}

    def visit(self, value: object, address: str, around: frozenset[int]) -> None:
        value = unwrap(value)
        kind = recognise(value, self._registry, address)
        if kind is Kind.MODULES:
            self.views[address] = tuple(ModuleView(module, address) for module in parts_of(value))
            for view in self.views[address]:
                self._add_names(view.module, view.state, address)
        elif kind is Kind.STATEFUL and isinstance(value, torch.nn.Module):
            self._add_names(value, {}, address)
        elif kind is Kind.CONTAINER:
            self._visit_items(value, address, around)

    def _visit_items(self, container: Any, address: str, around: frozenset[int]) -> None:
        if id(container) in around:
            raise InvalidAppState(f"{address}: expected a tree, found a container that contains itself; break the cycle")
        items = [(position, item) for position, (_, item) in enumerate(list_items(container)) if not _is_plain(item)]
        components = list_components(container, address=address) if items else []
        for position, item in items:
            self.visit(item, join_address(address, components[position]), around | {id(container)})

    def _add_names(self, module: torch.nn.Module, state: Mapping[str, object], address: str) -> None:
        for key, fqn in name_parameters(module, state).items():
            name, known = ParameterName(address, fqn), self.names.get(key)
            # A parameter of several modules goes by the smallest address, whatever the order of the app state.
            if known is None or address.encode() < known.module.encode():
                self.names[key] = name


def _is_plain(item: object) -> bool:
    return type(item) in (int, float, str, bool, bytes, type(None), torch.Tensor)

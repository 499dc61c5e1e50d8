"""Looks over an app state once per save or load: where its modules are, what their parameters are called, how its mesh is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, final

import torch

from anyshard.adapters.modules import ModuleView, name_parameters
from anyshard.adapters.per_rank import PerRank
from anyshard.adapters.recognise import Kind, holds, is_object, list_scattered, parts_of, recognise, unwrap
from anyshard.adapters.tensors import is_dtensor
from anyshard.errors import InvalidAppState, LimitExceeded
from anyshard.records.addresses import component, join_address, show
from anyshard.records.values import ValueLimits, ValueRegistry, iterate_leaves, label_item, list_items

_OBJECTS = frozenset({Kind.MODULES, Kind.OPTIMIZERS, Kind.STATEFUL, Kind.PER_RANK, Kind.RANDOM_STATE})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor})

# The FQN of each parameter by its id, for each address at which the app state has modules.
ModuleNames: TypeAlias = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Survey:
    """The modules of an app state and the names of their parameters by address, and which containers hold objects.

    `mesh` gives the size of each named axis of the meshes on which parameters and tensors lie; what other statefuls hold is not
    looked at. It is the same before a save and before a load of the same app state.
    """

    registry: ValueRegistry
    views: Mapping[str, tuple[ModuleView, ...]]
    names: ModuleNames
    holders: AbstractSet[int]
    mesh: Mapping[str, int]

    def holds_objects(self, container: object) -> bool:
        """Whether an object (a stateful, or a value per rank) lies in a container of the app state, or in those below it."""
        return id(container) in self.holders


def survey(app_state: Mapping[str, object], registry: ValueRegistry) -> Survey:
    """Look over an app state; calls `state_dict` of each plain module, and no other method of the user's objects."""
    check_app_state(app_state)
    surveyor = _Surveyor(registry)
    for name, value in app_state.items():
        if holds(value, lambda leaf: is_object(leaf, registry) or is_dtensor(leaf)):
            surveyor.visit(value, component(name), frozenset())
    surveyor.check_whole()
    return Survey(registry, surveyor.views, surveyor.names, surveyor.holders, surveyor.mesh)


def survey_parts(parts: Mapping[str, object], registry: ValueRegistry) -> Survey:
    """Look over single nodes of an app state by their addresses."""
    surveyor = _Surveyor(registry)
    for address, value in parts.items():
        surveyor.visit(value, address, frozenset())
    return Survey(registry, surveyor.views, surveyor.names, surveyor.holders, surveyor.mesh)


def check_app_state(app_state: object) -> None:
    """Raise `InvalidAppState` if this is no mapping from names."""
    if not isinstance(app_state, Mapping):
        raise InvalidAppState(f"expected a mapping from names to objects as the app state, found {type(app_state).__name__}")
    for name in app_state:
        if not isinstance(name, str) or not name:
            raise InvalidAppState(f"expected top-level names of the app state to be non-empty str, found {name!r}; rename it")


@final
class _Surveyor:
    def __init__(self, registry: ValueRegistry) -> None:
        self._registry = registry
        self._plain: set[int] = set()
        self.views: dict[str, tuple[ModuleView, ...]] = {}
        self.names: dict[str, dict[int, str]] = {}
        self.holders: set[int] = set()
        self.mesh: dict[str, int] = {}
        self._scattered: set[int] = set()
        self._optimized: dict[str, list[torch.Tensor]] = {}

    def check_whole(self) -> None:
        """Refuse optimizers of parameters that FSDP1 has spread over ranks, for nothing tells which part of what is whose."""
        for address, params in self._optimized.items():
            if any(id(param) in self._scattered for param in params):
                raise InvalidAppState(
                    f"{show(address)}: expected an optimizer of whole parameters or of DTensors, found parameters that FSDP1 "
                    "(FullyShardedDataParallel) has cut and spread over ranks, which this release cannot put together; use FSDP2 "
                    "(fully_shard), or leave the optimizer out"
                )

    def visit(self, value: Any, address: str, around: frozenset[int]) -> bool:
        """Look over one node; true if it is an object or holds one."""
        value = unwrap(value)
        kind = recognise(value, self._registry, address)
        match kind:
            case Kind.CONTAINER:
                return self._visit_container(value, address, around)
            case Kind.MODULES:
                self.views[address] = tuple(ModuleView(module, address) for module in parts_of(value))
                for view in self.views[address]:
                    self._add_names(view.module, view.state, address)
            case Kind.STATEFUL if isinstance(value, torch.nn.Module):
                self._add_names(value, {}, address)
            case Kind.OPTIMIZERS:
                params = [param for part in parts_of(value) for group in part.param_groups for param in group["params"]]
                self._optimized[address] = params
                self._note_mesh(params)
            case Kind.TENSOR:
                self._note_mesh([value])
            case Kind.PER_RANK:
                _check_own(value.value, address)
                self.visit(value.value, address, around)
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
        self._scattered.update(list_scattered(module))
        self._note_mesh(chain(state.values(), module.parameters()))

    def _note_mesh(self, tensors: Iterable[object]) -> None:
        for tensor in filter(is_dtensor, tensors):
            mesh = tensor.device_mesh
            for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
                self.mesh[axis] = max(size, self.mesh.get(axis, 0))


def _check_own(value: object, address: str) -> None:
    """Refuse what a rank cannot have for itself."""
    for refused in filter(_is_shared, map(unwrap, iterate_leaves(value))):
        raise InvalidAppState(
            f"{show(address)}: expected in anyshard.PerRank what this rank has for itself, found {type(refused).__name__}; "
            "put modules, optimizers and sharded tensors beside it, for they are stored once for all ranks, and have one PerRank "
            "around a value"
        )


def _is_shared(value: object) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, PerRank)) or is_dtensor(value)

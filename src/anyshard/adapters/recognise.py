"""What a value of the app state is, which decides how it is taken apart: wrappers, modules, optimizers, statefuls, containers.

Order: named wrappers are unwrapped; registered value types are values; `PerRank` and `RNGState` are known by their class; classes
that override `state_dict` or `load_state_dict` are taken by their own methods; then plain modules and optimizers, other
statefuls, containers, tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyshard.adapters.per_rank import PerRank
from anyshard.adapters.random_state import RNGState
from anyshard.errors import InvalidAppState
from anyshard.records.addresses import show
from anyshard.records.values import ValueRegistry, is_container, iterate_leaves

# (module, class) -> the attribute that holds what is wrapped. By name, so that nothing is imported for the sake of looking.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"): "_checkpoint_wrapped_module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper"): "_checkpoint_wrapped_module",
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("accelerate.scheduler", "AcceleratedScheduler"): "scheduler",
}

# What torch itself does to state dicts without changing what is in them. FSDP2's hook puts the sharded parameters back before.
_RESHARDING = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
)
_RENAMING = frozenset(
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", f"ActivationWrapper.{name}")
    for name in ("_post_state_dict_hook", "named_parameters")
)

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_METHODS = ("state_dict", "load_state_dict")  # what makes an object a stateful


class Kind(enum.Enum):
    """What a value is, after unwrapping."""

    MODULES = "modules"
    OPTIMIZERS = "optimizers"
    STATEFUL = "stateful"
    PER_RANK = "per rank"
    RANDOM_STATE = "random state"
    CONTAINER = "container"
    TENSOR = "tensor"
    GENERATOR = "generator"
    VALUE = "value"


def wrapped_attribute(value: object) -> str | None:
    """The attribute through which a named wrapper holds what it wraps, or None for anything else."""
    if type(value) in _ATOMS:
        return None
    for base in type(value).__mro__:
        if attribute := _WRAPPERS.get((base.__module__, base.__qualname__)):
            return attribute
    return None


def unwrap(value: object) -> Any:
    """The value inside all named wrappers around it, at any depth."""
    while attribute := wrapped_attribute(value):
        value = getattr(value, attribute)
    return value


def puts_shards_back(hook: object) -> bool:
    """Whether a hook before a module's state dict is FSDP2's, which does nothing but to put the sharded parameters in place."""
    return _name_of(hook) == _RESHARDING


def only_renames(function: object) -> bool:
    """Whether a hook behind a module's state dict, or a method that lists names, only takes the name of a wrapper out."""
    return _name_of(function) in _RENAMING


def _name_of(function: object) -> tuple[object, object]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def list_scattered(module: torch.nn.Module) -> Iterator[int]:
    """Ids of the parameters that FSDP1 has cut and spread over the ranks, so that each rank's piece looks like a whole tensor."""
    for part in module.modules():
        handle: Any = getattr(part, "_handle", None)
        if type(handle).__name__ == "FlatParamHandle" and handle.uses_sharded_strategy:
            flat = handle.flat_param
            yield from map(id, (flat, *(getattr(flat, "_params", None) or ())))


def recognise(value: object, registry: ValueRegistry, address: str) -> Kind:
    """What an unwrapped value is; raises `InvalidAppState` for a list that mixes modules or optimizers with anything else."""
    if type(value) in _ATOMS:
        return Kind.VALUE
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if isinstance(value, torch.Generator):
        return Kind.GENERATOR
    if registry.find_type(type(value)):
        return Kind.VALUE
    if is_container(value):
        return _recognise_parts(value, registry, address)
    return _recognise_object(value)


def is_object(value: object, registry: ValueRegistry) -> bool:
    """Whether a leaf, once unwrapped, is a module, an optimizer, another stateful, or per rank."""
    inner = unwrap(value)
    if isinstance(inner, (torch.Tensor, torch.Generator)) or registry.find_type(type(inner)):
        return False
    return _recognise_object(inner) is not Kind.VALUE


def _recognise_object(value: object) -> Kind:
    if isinstance(value, PerRank):
        return Kind.PER_RANK
    if isinstance(value, RNGState):
        return Kind.RANDOM_STATE
    for base, kind in ((torch.nn.Module, Kind.MODULES), (torch.optim.Optimizer, Kind.OPTIMIZERS)):
        if isinstance(value, base):
            return Kind.STATEFUL if _overrides(value, base) else kind
    # A class itself has the methods too, but is no object with a state.
    methods = (getattr(value, name, None) for name in _METHODS)
    return Kind.STATEFUL if all(map(callable, methods)) and not isinstance(value, type) else Kind.VALUE


def _overrides(value: object, base: type) -> bool:
    return any(name in vars(value) or getattr(type(value), name) is not getattr(base, name) for name in _METHODS)


def _recognise_parts(value: Any, registry: ValueRegistry, address: str) -> Kind:
    if type(value) not in (list, tuple) or not any(_is_object(item) for item in value):
        return Kind.CONTAINER
    kinds = {recognise(unwrap(item), registry, address) for item in value}
    for kind in (Kind.MODULES, Kind.OPTIMIZERS):
        if kinds == {kind}:
            return kind
        if kind in kinds:
            raise InvalidAppState(
                f"{show(address)}: expected a {type(value).__name__} of {kind.value} only (parts of one thing), found other "
                "values beside them; use a dict to give each a name"
            )
    return Kind.CONTAINER


def _is_object(item: object) -> bool:
    return type(item) not in _ATOMS and isinstance(unwrap(item), (torch.nn.Module, torch.optim.Optimizer))


def parts_of(value: object) -> tuple[Any, ...]:
    """The modules or optimizers of a value of that kind: itself, or the items of the list."""
    return tuple(unwrap(item) for item in value) if isinstance(value, (list, tuple)) else (value,)


def holds(value: object, is_wanted: Callable[[object], bool]) -> bool:
    """Whether a leaf of a value is wanted, one that is no number or text. Containers that contain themselves are no trouble."""
    return any(map(is_wanted, iterate_leaves(value)))

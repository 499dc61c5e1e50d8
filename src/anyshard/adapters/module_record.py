"""Records of modules: which tensors a module's state dict is made of, so that these can be found again without calling it.

A walk over the modules lists what `state_dict` reads, in the order of breadth. It is recorded only if the state dict held exactly
those tensors, and matches only if no module has a hook or a method of its own by which its state dict could become another one.
Two of torch's own are allowed for: the hook of FSDP2, which puts the sharded parameters back, is called as `state_dict` would
call it; checkpoint wrappers only rename keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from anyshard.adapters.modules import ModuleView, canonical_fqn
from anyshard.adapters.recognise import Kind, only_renames, parts_of, puts_shards_back, recognise, unwrap
from anyshard.adapters.replay import Changed, Replay
from anyshard.adapters.watch import Watch
from anyshard.records.addresses import component, join_address

# What decides how a module's state dict and lists of names come about. A class or module with its own is taken by asking it.
_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_buffers",
    "named_modules",
    "_named_members",
)
_END = ""  # behind the names of one kind of one module; no child, parameter or buffer can be called so


@dataclass(frozen=True, slots=True)
class _Walk:
    """What was met: modules and tensors with None where one is missing, and all names."""

    modules: list[torch.nn.Module | None]
    tensors: list[torch.Tensor | None]
    names: list[object]
    types: list[type]


def _walk(root: torch.nn.Module, max_modules: int | None = None) -> _Walk:
    """Walk over a module. It may have at most `max_modules` places for modules, else it is another one by now."""
    modules: list[torch.nn.Module | None] = [root]
    walk = _Walk(modules, [], [], [])
    names, tensors = walk.names, walk.tensors
    for module in modules:  # which grows meanwhile
        if module is None:
            continue
        own = vars(module)
        if not own.keys().isdisjoint(_METHODS):
            raise Changed("a module with methods of its own")
        if own["_state_dict_pre_hooks"] or own["_state_dict_hooks"]:
            _run_hooks(module)
        children, params = own["_modules"], own["_parameters"]
        if children:
            names.extend(children)
            modules.extend(children.values())
        names.append(_END)
        if params:
            names.extend(params)
            tensors.extend(params.values())
        names.append(_END)
        if own["_buffers"]:
            _list_buffers(own["_buffers"], own["_non_persistent_buffers_set"], walk)
        if max_modules is not None and len(modules) > max_modules:
            raise Changed("more modules")
    walk.types.extend(map(type, modules))
    _check_classes(set(walk.types) - {type(None)})
    return walk


def _list_buffers(buffers: dict[str, torch.Tensor | None], unsaved: set[str], walk: _Walk) -> None:
    for name, tensor in buffers.items():
        if name in unsaved:
            walk.names.append((name, tensor is None))  # of such a one the report knows no more
        else:
            walk.names.append(name)
            walk.tensors.append(tensor)
    walk.names.append(_END)


def _run_hooks(module: torch.nn.Module) -> None:
    before, after = (list(vars(module)[hooks].values()) for hooks in ("_state_dict_pre_hooks", "_state_dict_hooks"))
    if not all(map(puts_shards_back, before)) or not all(map(only_renames, after)):
        raise Changed("a hook that may change the state dict, or the module")
    for hook in before:
        hook(module, prefix="", keep_vars=True)


def _check_classes(classes: Iterable[type]) -> None:
    for kind in classes:
        for method in _METHODS:
            found = getattr(kind, method, None)
            if found is not getattr(torch.nn.Module, method) and not only_renames(found):
                raise Changed(f"a class with its own {method}")


@final
class ModulesNode:
    """The record of the modules under one name."""

    def __init__(self, views: Sequence[ModuleView], address: str, tree: object, watch: Watch) -> None:
        self._address = address
        self._tree = tree
        self._walks = [_ModuleWalk(view, address, watch) for view in views]

    def match(self, value: object, replay: Replay) -> None:
        """As `Node`."""
        value = unwrap(value)
        if recognise(value, replay.registry, self._address) is not Kind.MODULES:
            raise Changed("no modules")
        modules = parts_of(value)
        if len(modules) != len(self._walks):
            raise Changed("another number of modules")
        for module, walk in zip(modules, self._walks, strict=True):
            replay.tensors.extend(walk.match(module))

    def build(self, value: object, replay: Replay) -> object:
        """As `Node`."""
        del value, replay
        return self._tree

    def list_addresses(self) -> list[str]:
        """As `Node`."""
        return [address for walk in self._walks for address in walk.addresses]

    def list_keys(self) -> list[object]:
        """As `Node`."""
        return []

    def list_constants(self) -> Iterator[object]:
        """As `Node`."""
        yield self._tree


@final
class _ModuleWalk:
    """The walk over one module, as it was."""

    def __init__(self, view: ModuleView, address: str, watch: Watch) -> None:
        walk = _walk(view.module)
        fqns = _list_fqns(view.module)
        named = [(fqn, tensor) for fqn, tensor in zip(fqns, walk.tensors, strict=True) if tensor is not None]
        held = {fqn: id(tensor) for fqn, tensor in named}
        if len(held) != len(named) or held != {fqn: id(view.state[key]) for fqn, key in view.keys.items()}:
            raise Changed("a state dict with other tensors than the module's")
        self.addresses = [join_address(address, component(fqn, within=address)) for fqn, _ in named]
        self._modules, self._tensors = watch.note(walk.modules), list(map(id, walk.tensors))
        watch.note(walk.types)
        self._types, self._names = list(map(id, walk.types)), walk.names

    def match(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The tensors of the module, if it is what it was."""
        walk = _walk(module, len(self._modules))
        is_same = (
            list(map(id, walk.modules)) == self._modules
            and list(map(id, walk.types)) == self._types
            and list(map(id, walk.tensors)) == self._tensors
            and walk.names == self._names
        )
        if not is_same:
            raise Changed("another module")
        return [tensor for tensor in walk.tensors if tensor is not None]


def _list_fqns(root: torch.nn.Module) -> list[str]:
    """The FQNs of what `_walk` lists as tensors."""
    places, fqns = [("", root)], list[str]()
    for prefix, module in places:
        own = vars(module)
        if any(type(own[kind]) not in (dict, OrderedDict) for kind in ("_modules", "_parameters", "_buffers")):
            raise Changed("a module that is not made of dicts")
        places.extend((f"{prefix}{name}.", child) for name, child in own["_modules"].items() if child is not None)
        saved = [name for name in own["_buffers"] if name not in own["_non_persistent_buffers_set"]]
        fqns.extend(canonical_fqn(root, f"{prefix}{name}") for name in (*own["_parameters"], *saved))
    return fqns

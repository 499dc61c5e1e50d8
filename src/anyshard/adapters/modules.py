"""Modules: taken through `state_dict()`, named by canonical FQNs, filled, and handed back to `load_state_dict`.

Never `named_parameters()` for tensors: the framework's hooks on the state dict are what restores a sharded view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from anyshard.adapters.collect import Collector
from anyshard.adapters.recognise import wrapped_attribute
from anyshard.errors import InvalidAppState
from anyshard.records.addresses import component, join_address, show

EXTRA_STATE = "_extra_state"


def canonical_fqn(module: torch.nn.Module, key: str) -> str:
    """The FQN of a state dict key without the names that wrappers put in, found by looking at the objects on the way.

    A wrapper's attribute is passed over whether or not the wrapper's own hooks have taken it out of the key already; a child
    that a user called `module` stays.
    """
    kept: list[str] = []
    place: Any = module
    for part in key.split("."):
        while (attribute := wrapped_attribute(place)) and attribute != part:
            place = getattr(place, attribute)
        if attribute is None:
            kept.append(part)
        place = getattr(place, "_modules", {}).get(part)
    return ".".join(kept)


def is_extra_state(fqn: str) -> bool:
    """Whether an FQN names what `get_extra_state` of a module returned."""
    return fqn.rpartition(".")[2] == EXTRA_STATE


@final
class ModuleView:
    """One module's state dict at this moment, by canonical FQN; what is filled on load is filled into this very state dict."""

    def __init__(self, module: torch.nn.Module, address: str) -> None:
        self.module = module
        # keep_vars: parameters themselves, so that ties and the optimizer's parameters are found by identity.
        self.state: dict[str, Any] = module.state_dict(keep_vars=True)
        self.keys: dict[str, str] = {}
        for key in self.state:
            fqn = canonical_fqn(module, key)
            if fqn in self.keys:
                raise _clash(address, fqn, f"{self.keys[fqn]!r} and {key!r} of one module")
            self.keys[fqn] = key

    def list_buffers(self) -> list[str]:
        """FQNs of all buffers, by looking at the module, whether or not they are in the state dict."""
        return [canonical_fqn(self.module, name) for name, _ in self.module.named_buffers(remove_duplicate=False)]

    def list_unsaved_buffers(self) -> list[str]:
        """FQNs of the buffers that are not in the state dict (non-persistent ones)."""
        return [fqn for fqn in self.list_buffers() if fqn not in self.keys]


def name_parameters(module: torch.nn.Module, state: Mapping[str, object]) -> dict[int, str]:
    """The FQN of each parameter by its id: the smallest of a tied parameter's names, as its stored address is.

    `state` is the state dict (empty for a module that is taken by its own methods); parameters that hooks hide from it are
    named by `named_parameters()`, which is good enough for a name.
    """
    names: dict[int, str] = {}
    _name_each(names, ((canonical_fqn(module, key), value) for key, value in state.items()))
    hidden = ((canonical_fqn(module, key), value) for key, value in module.named_parameters(remove_duplicate=False))
    _name_each(names, [(fqn, value) for fqn, value in hidden if id(value) not in names])
    return names


def _name_each(names: dict[int, str], pairs: Iterable[tuple[str, object]]) -> None:
    for fqn, value in pairs:
        if isinstance(value, torch.nn.Parameter):
            names[id(value)] = min(names.get(id(value), fqn), fqn, key=str.encode)


def unite_views(views: Sequence[ModuleView], address: str) -> dict[str, ModuleView]:
    """Which of the modules under one name has which FQN; one that two of them have is an error."""
    owners: dict[str, ModuleView] = {}
    for view in views:
        for fqn in view.keys:
            if fqn in owners:
                positions = [position for position, each in enumerate(views) if each in (owners[fqn], view)]
                raise _clash(address, fqn, f"it in the modules at positions {' and '.join(map(str, positions))}")
            owners[fqn] = view
    return owners


def _clash(address: str, fqn: str, found: str) -> InvalidAppState:
    return InvalidAppState(
        f"{show(join_address(address, component(fqn)))}: expected one tensor or value with this name, found {found}; "
        "give the modules different names in a dict"
    )


def capture_modules(views: Sequence[ModuleView], address: str, collector: Collector) -> dict[str, object]:
    """The tree of the modules under one name: FQN -> mark or value."""
    owners = unite_views(views, address)
    buffers = {fqn for view in views for fqn in view.list_buffers()}
    for view in views:
        if unsaved := view.list_unsaved_buffers():
            collector.warn(f"{show(address)}: non-persistent buffers are not stored: {', '.join(unsaved)}")
    tree: dict[str, object] = {}
    collector.branch(address)
    for fqn, view in owners.items():
        take = collector.take_buffer if fqn in buffers else collector.take
        tree[fqn] = take(view.state[view.keys[fqn]], join_address(address, component(fqn, within=address)))
    return tree

"""Records of optimizers: which parameters have which state. Options, and plain values in the state, are taken anew each time.

Parameters are known by their ids. Those of modules are compared as tensors of these; of others only the type counts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from anyshard.adapters.optimizers import LiveGroup, has_hooks, label_groups, take_options
from anyshard.adapters.recognise import Kind, parts_of, recognise, unwrap
from anyshard.adapters.replay import Changed, Node, Replay
from anyshard.adapters.templates import ContainerNode, make_template
from anyshard.adapters.watch import Watch
from anyshard.records.addresses import component, join_address


@final
class OptimizersNode:
    """The record of the optimizers under one name. `tree` is what `capture_optimizers` gave of these groups."""

    def __init__(self, groups: Sequence[LiveGroup], address: str, tree: Any, watch: Watch) -> None:
        if "other" in tree:
            raise Changed("state that belongs to no parameter")
        self._address = address
        self._tree = tree
        self._groups_address = join_address(address, "param_groups")
        self._labels = label_groups(groups)
        names = {
            (id(group.optimizer), id(p)): name for group in groups for p, name in zip(group.params, group.names, strict=True)
        }
        optimizers = list({id(group.optimizer): group.optimizer for group in groups}.values())
        self._records = [_OptimizerRecord(optimizer, names, tree["state"], watch) for optimizer in optimizers]
        self._is_constant = all(record.is_constant for record in self._records)
        self._num_required = None if tree["state"] else _count_required(optimizers)

    def match(self, value: object, replay: Replay) -> None:
        """As `Node`."""
        value = unwrap(value)
        if recognise(value, replay.registry, self._address) is not Kind.OPTIMIZERS:
            raise Changed("no optimizers")
        optimizers = parts_of(value)
        if len(optimizers) != len(self._records):
            raise Changed("another number of optimizers")
        for optimizer, record in zip(optimizers, self._records, strict=True):
            record.match(optimizer, replay)
        if self._num_required is not None and _count_required(optimizers) != self._num_required:
            raise Changed("another warning")

    def build(self, value: object, replay: Replay) -> object:
        """As `Node`."""
        optimizers = parts_of(unwrap(value))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return {
            "state": self._tree["state"] if self._is_constant else self._build_state(optimizers, replay),
            "param_groups": {
                label: self._build_group(label, group, replay) for label, group in zip(self._labels, groups, strict=True)
            },
        }

    def _build_state(self, optimizers: Sequence[torch.optim.Optimizer], replay: Replay) -> dict[str, object]:
        built: dict[str, object] = {}
        for optimizer, record in zip(optimizers, self._records, strict=True):
            built.update(record.build(optimizer, replay))
        return {name: built[name] for name in self._tree["state"]}

    def _build_group(self, label: str, group: dict[str, object], replay: Replay) -> dict[str, object]:
        address = join_address(self._groups_address, component(label, within=self._address))
        return {
            "options": take_options(group, address, replay.collector),
            "params": self._tree["param_groups"][label]["params"],
        }

    def list_addresses(self) -> list[str]:
        """As `Node`."""
        return [address for record in self._records for address in record.list_addresses()]

    def list_keys(self) -> list[object]:
        """As `Node`."""
        return [key for record in self._records for key in record.list_keys()]

    def list_constants(self) -> Iterator[object]:
        """As `Node`."""
        for group in self._tree["param_groups"].values():
            yield group["params"]
        if self._is_constant:
            yield self._tree["state"]
        else:
            for record in self._records:
                yield from record.list_constants()


@final
class _OptimizerRecord:
    """The record of one optimizer: its parameters by groups, and whose state has which form."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[tuple[int, int], str], tree: dict[str, object], watch: Watch
    ) -> None:
        self._self = watch.note([optimizer])
        self._params = [list(map(id, group["params"])) for group in optimizer.param_groups]
        self._types = [list(map(type, group["params"])) for group in optimizer.param_groups]
        self._given_names = [list(group.get("param_names") or ()) for group in optimizer.param_groups]
        self._keys = list(map(id, optimizer.state))
        self._names = [names[id(optimizer), key] for key in self._keys]
        self._items: list[Node] = [
            make_template(state, tree[name]) for state, name in zip(optimizer.state.values(), self._names, strict=True)
        ]
        self._has_hooks = has_hooks(optimizer)
        self.is_constant = all(isinstance(item, ContainerNode) and item.is_constant for item in self._items)

    def match(self, optimizer: torch.optim.Optimizer, replay: Replay) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        is_same = (
            [id(optimizer)] == self._self
            and [list(map(id, group["params"])) for group in groups] == self._params
            and [list(map(type, group["params"])) for group in groups] == self._types
            and [list(group.get("param_names") or ()) for group in groups] == self._given_names
            and list(map(id, state)) == self._keys
            and has_hooks(optimizer) == self._has_hooks
        )
        if not is_same:
            raise Changed("an optimizer with other parameters, or state of others")
        for item, value in zip(self._items, state.values(), strict=True):
            item.match(value, replay)

    def build(self, optimizer: torch.optim.Optimizer, replay: Replay) -> dict[str, object]:
        """What is new of the tree: the state of each parameter by name."""
        values = zip(self._names, self._items, optimizer.state.values(), strict=True)
        return {name: item.build(value, replay) for name, item, value in values}

    def list_addresses(self) -> list[str]:
        return [address for item in self._items for address in item.list_addresses()]

    def list_keys(self) -> list[object]:
        return [key for item in self._items for key in item.list_keys()]

    def list_constants(self) -> Iterator[object]:
        for item in self._items:
            yield from item.list_constants()


def _count_required(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    return sum(param.requires_grad for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])

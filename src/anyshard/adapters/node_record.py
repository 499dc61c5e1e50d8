"""Makes the record of each node of an app state, by what the node is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch

from anyshard.adapters.module_record import ModulesNode
from anyshard.adapters.optimizer_record import OptimizersNode
from anyshard.adapters.optimizers import name_groups
from anyshard.adapters.recognise import Kind, holds, is_object, parts_of, recognise, unwrap
from anyshard.adapters.replay import Changed, Node, Replay
from anyshard.adapters.survey import Survey
from anyshard.adapters.templates import ContainerNode, check_walkable, make_template
from anyshard.adapters.tensors import is_dtensor
from anyshard.adapters.watch import Watch
from anyshard.records.addresses import join_address
from anyshard.records.values import list_components, list_items


def record_node(value: object, tree: object, address: str, *, surveyed: Survey, watch: Watch) -> Node:
    """The record of a node of which `tree` was made. Raises `Changed` for a module that is taken by its own methods."""
    inner = unwrap(value)
    kind = recognise(inner, surveyed.registry, address)
    match kind:
        case Kind.MODULES:
            return ModulesNode(surveyed.views[address], address, tree, watch)
        case Kind.OPTIMIZERS:
            return _record_optimizers(parts_of(inner), tree, address, surveyed, watch)
        case Kind.STATEFUL | Kind.PER_RANK | Kind.RANDOM_STATE:
            return FreshNode(kind, inner, address)
        case Kind.CONTAINER if surveyed.holds_objects(inner):
            return _record_container(inner, tree, address, surveyed, watch)
        case _:
            try:
                return make_template(inner, tree)
            except Changed:
                return FreshNode(kind, inner, address)


def _record_optimizers(optimizers: Any, tree: object, address: str, surveyed: Survey, watch: Watch) -> Node:
    groups = name_groups(optimizers, address, surveyed.names)
    known = set().union(*surveyed.names.values())
    if any(is_dtensor(param) and id(param) not in known for group in groups for param in group.params):
        raise Changed("a sharded parameter that is in no module")
    return OptimizersNode(groups, address, tree, watch)


def _record_container(container: Any, tree: Any, address: str, surveyed: Survey, watch: Watch) -> Node:
    places = zip(list_components(container, address=address), list_items(container), list_items(tree), strict=True)
    nodes = [
        record_node(item, part, join_address(address, name), surveyed=surveyed, watch=watch)
        for name, (_, item), (_, part) in places
    ]
    return ContainerNode(container, nodes, tree, has_objects=True)


@final
class FreshNode:
    """The record of what is taken anew each time: other statefuls, what is per rank, random state, kinds without a template."""

    def __init__(self, kind: Kind, value: object, address: str) -> None:
        if kind is Kind.STATEFUL and isinstance(value, torch.nn.Module):
            raise Changed("a module that is taken by its own methods, on which the names of parameters depend")
        _check_unsharded(kind, value)
        self._kind = kind
        self._address = address

    def match(self, value: object, replay: Replay) -> None:
        """As `Node`."""
        inner = unwrap(value)
        if recognise(inner, replay.registry, self._address) is not self._kind or isinstance(inner, torch.nn.Module):
            raise Changed("another kind of value")
        _check_unsharded(self._kind, inner)
        if self._kind is Kind.CONTAINER:
            if holds(inner, lambda leaf: is_object(leaf, replay.registry)):
                raise Changed("an object where there was none")
            check_walkable(inner)
        replay.fresh[self._address] = value

    def build(self, value: object, replay: Replay) -> object:
        """As `Node`."""
        del value
        return replay.trees[self._address]

    def list_addresses(self) -> list[str]:
        """As `Node`."""
        return []

    def list_keys(self) -> list[object]:
        """As `Node`."""
        return []

    def list_constants(self) -> Iterator[object]:
        """As `Node`."""
        return iter(())


def _check_unsharded(kind: Kind, value: object) -> None:
    if kind in (Kind.CONTAINER, Kind.TENSOR) and holds(value, is_dtensor):
        raise Changed("a sharded tensor, which may bring another mesh")

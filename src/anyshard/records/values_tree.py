"""Walks over value trees that keep container types: for adapters, which put marks in, and for loads, which take them out.

The containers are those whose items have addresses: lists, tuples, deques, dicts of all kinds, named tuples, namespaces. All
else is a leaf, sets and registered types too.
"""

from __future__ import annotations

import argparse
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from anyshard.errors import LimitExceeded, UnsupportedValue
from anyshard.records.addresses import component, join_address, show
from anyshard.records.values_kinds import is_named_tuple
from anyshard.records.values_types import NamedTupleRecord, TensorMark, ValueLimits

_SEQUENCES = (list, tuple, deque, NamedTupleRecord)
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_CONTAINERS = frozenset((*_SEQUENCES, *_MAPPINGS, *_NAMESPACES))
_ATOMS = frozenset({type(None), bool, int, float, complex, str})

LeafFunction: TypeAlias = Callable[[object, str], object]


def is_container(value: object) -> bool:
    """Whether a value's items have addresses of their own."""
    kind = type(value)
    return kind in _CONTAINERS or (issubclass(kind, tuple) and is_named_tuple(value))


def list_items(container: Any) -> list[tuple[object, object]]:
    """The (key, item) pairs of a container; of lists, tuples and deques the (position, item) pairs."""
    if type(container) in _MAPPINGS:
        return list(container.items())
    if type(container) in _NAMESPACES:
        return list(vars(container).items())
    return list(enumerate(container))


def iterate_leaves(tree: object) -> Iterator[object]:
    """All leaves but None, numbers and text, in tree order; a container that is met again is passed over."""
    pending, seen = [tree], set[int]()
    while pending:
        item = pending.pop()
        if not is_container(item):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            pending.extend([child for child in reversed(_list_values(item)) if type(child) not in _ATOMS])


def _list_values(container: Any) -> Any:
    if type(container) in _MAPPINGS:
        return container.values()
    return vars(container).values() if type(container) in _NAMESPACES else container


def list_components(container: Any, *, address: str) -> list[str]:
    """The address components of a container's items, in the order of `list_items`."""
    if type(container) in _MAPPINGS or type(container) in _NAMESPACES:
        return [component(key, within=address) for key, _ in list_items(container)]
    return [str(position) for position in range(len(container))]


def label_item(container: Any, key: object) -> str:
    """The address component of one item, for messages: a key that no address can hold is described by its type."""
    if type(container) not in _MAPPINGS and type(container) not in _NAMESPACES:
        return str(key)
    try:
        return component(key)
    except UnsupportedValue:
        return f"~?{type(key).__qualname__}"


def rebuild_container(container: Any, items: list[object]) -> Any:
    """A new container of the same type, keys and settings with other items, in the order of `list_items`."""
    kind = type(container)
    if kind is deque:
        return deque(items, container.maxlen)
    if kind is NamedTupleRecord:
        return NamedTupleRecord(items, container.__dict__["type_name"], container._fields)
    if is_named_tuple(container):
        return kind._make(items)
    if kind in _MAPPINGS:
        made: Any = defaultdict(container.default_factory) if kind is defaultdict else kind()
        # One by one: the constructor of Counter counts.
        for key, item in zip(container, items, strict=True):
            made[key] = item
        return made
    if kind in _NAMESPACES:
        namespace = kind()
        vars(namespace).update(zip(vars(container), items, strict=True))
        return namespace
    return kind(items)


def map_leaves(tree: object, function: LeafFunction, *, address: str) -> object:
    """The tree with each leaf replaced by `function(leaf, its address)`; containers whose leaves all stay the same are kept.

    Raises `UnsupportedValue` for a container that contains itself.
    """
    return _map_leaves(tree, function, (address, frozenset()))


def _map_leaves(tree: object, function: LeafFunction, where: tuple[str, frozenset[int]]) -> object:
    address, around = where
    if not is_container(tree):
        return function(tree, address)
    if id(tree) in around:
        raise UnsupportedValue(f"{show(address)}: expected a tree, found a container that contains itself", address=address)
    if len(around) >= ValueLimits().max_depth:
        raise LimitExceeded(f"{show(address)}: expected at most {len(around)} nested containers, found more; flatten them")
    around |= {id(tree)}
    items = [item for _, item in list_items(tree)]
    components = list_components(tree, address=address)
    mapped = [
        _map_leaves(item, function, (join_address(address, name), around)) for name, item in zip(components, items, strict=True)
    ]
    is_same = all(new is old for new, old in zip(mapped, items, strict=True))
    return tree if is_same else rebuild_container(tree, mapped)


def map_marks(tree: object, function: Callable[[TensorMark], object]) -> object:
    """The tree with each mark replaced by `function(mark)`; containers without marks are kept as they are."""
    if type(tree) is TensorMark:
        return function(tree)
    if not is_container(tree):
        return tree
    items = [item for _, item in list_items(tree)]
    mapped = [map_marks(item, function) for item in items]
    return tree if all(new is old for new, old in zip(mapped, items, strict=True)) else rebuild_container(tree, mapped)


def collect_marks(tree: object) -> tuple[TensorMark, ...]:
    """All marks of a tree, in tree order."""
    return tuple(leaf for leaf in iterate_leaves(tree) if type(leaf) is TensorMark)

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

LeafFunction: TypeAlias = Callable[[object, str], object]


def is_container(value: object) -> bool:
    """Whether a value's items have addresses of their own."""
    return type(value) in _SEQUENCES or type(value) in _MAPPINGS or type(value) in _NAMESPACES or is_named_tuple(value)


def list_items(container: Any) -> list[tuple[object, object]]:
    """The (key or position, item) pairs of a container; `is_sequence` says which of the two."""
    if type(container) in _MAPPINGS:
        return list(container.items())
    if type(container) in _NAMESPACES:
        return list(vars(container).items())
    return list(enumerate(container))


def list_components(container: Any, *, address: str) -> list[str]:
    """The address components of a container's items, in the order of `list_items`."""
    if type(container) in _MAPPINGS or type(container) in _NAMESPACES:
        return [component(key, within=address) for key, _ in list_items(container)]
    return [str(position) for position in range(len(container))]


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
    return tuple(_iterate_marks(tree))


def _iterate_marks(tree: object) -> Iterator[TensorMark]:
    if type(tree) is TensorMark:
        yield tree
    elif is_container(tree):
        for _, item in list_items(tree):
            yield from _iterate_marks(item)

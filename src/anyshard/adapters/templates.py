"""Records of plain values: containers, the tensors in them, and what is taken as it is each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, final

import torch

from anyshard.adapters.collect import is_stored_leaf
from anyshard.adapters.recognise import holds, is_object
from anyshard.adapters.replay import Changed, Node, Replay
from anyshard.errors import AnyshardError
from anyshard.records.values import TensorMark, is_container, iterate_leaves, list_items, map_leaves, rebuild_container

_MAPPINGS = (dict, OrderedDict)
_SEQUENCES = (list, tuple)
_KEYS = frozenset({str, int})
_ATOMS = frozenset({type(None), bool, int, float, complex, str})


def make_template(value: object, tree: object) -> Node:
    """The record of a value made of plain containers, of which `tree` was made. Raises `Changed` for kinds that have none.

    These are subclasses of tensors that are stored by parts, large arrays and byte strings beside tensors, and containers of
    other types than dicts, lists and tuples with tensors in them.
    """
    if isinstance(value, torch.Tensor):
        return TensorNode(_check_mark(tree))
    if not _holds_mark(tree):
        return ValueNode()
    items = [make_template(item, part) for item, part in zip(_list_values(value), _list_values(tree), strict=True)]
    return ContainerNode(value, items, tree)


def _holds_mark(tree: object) -> bool:
    return any(type(leaf) is TensorMark for leaf in iterate_leaves(tree))


def _check_mark(tree: object) -> TensorMark:
    if type(tree) is not TensorMark:
        raise Changed("a tensor that is stored by parts")
    return tree


def _list_values(container: object) -> list[object]:
    if not is_container(container):
        raise Changed(f"a leaf of type {type(container).__name__} with a mark")
    return [item for _, item in list_items(container)]


def check_walkable(value: object) -> None:
    """Raise `Changed` for a container that the slow way would refuse, by its address."""
    try:
        map_leaves(value, lambda leaf, _: leaf, address="")
    except (AnyshardError, RecursionError) as error:
        raise Changed("a container that cannot be walked over") from error


@final
class TensorNode:
    """The record of a tensor."""

    def __init__(self, mark: TensorMark) -> None:
        self._mark = mark

    def match(self, value: object, replay: Replay) -> None:
        """As `Node`."""
        replay.tensors.append(value)  # type: ignore[arg-type]  # the frame finds out if it is none

    def build(self, value: object, replay: Replay) -> object:
        """As `Node`."""
        del value, replay
        return self._mark

    def list_addresses(self) -> list[str]:
        """As `Node`."""
        return [self._mark.address]

    def list_keys(self) -> list[object]:
        """As `Node`."""
        return []

    def list_constants(self) -> Iterator[object]:
        """As `Node`."""
        yield self._mark


@final
class ValueNode:
    """The record of a value without tensors and objects. It may have become any other one."""

    def match(self, value: object, replay: Replay) -> None:
        """As `Node`."""
        if type(value) in _ATOMS:
            return
        if holds(value, lambda leaf: is_stored_leaf(leaf) or is_object(leaf, replay.registry)):
            raise Changed("a tensor or an object where there was none")
        check_walkable(value)

    def build(self, value: object, replay: Replay) -> object:
        """As `Node`."""
        del replay
        return value

    def list_addresses(self) -> list[str]:
        """As `Node`."""
        return []

    def list_keys(self) -> list[object]:
        """As `Node`."""
        return []

    def list_constants(self) -> Iterator[object]:
        """As `Node`."""
        return iter(())


@final
class ContainerNode:
    """The record of a container with a tensor in it, or with an object. One of tensors alone has the same tree each time."""

    def __init__(self, container: Any, items: list[Node], tree: object, *, has_objects: bool = False) -> None:
        self._kind = type(container)
        if self._kind not in (*_MAPPINGS, *_SEQUENCES):
            raise Changed(f"a {self._kind.__name__} with tensors or objects")
        self._keys = list(container) if self._kind in _MAPPINGS else None
        if not _KEYS.issuperset(map(type, self._keys or ())):
            raise Changed("keys that may be equal to others")
        self._items = items
        self._tree = tree
        self._is_flat = all(type(item) is TensorNode for item in items)
        self.is_constant = not has_objects and all(map(_is_constant, items))

    def match(self, value: Any, replay: Replay) -> None:
        """As `Node`."""
        if type(value) is not self._kind or len(value) != len(self._items):
            raise Changed("another container")
        items = value
        if self._keys is not None:
            replay.keys.extend(value)
            items = value.values()
        if self._is_flat:
            replay.tensors.extend(items)
            return
        for node, item in zip(self._items, items, strict=True):
            node.match(item, replay)

    def build(self, value: Any, replay: Replay) -> object:
        """As `Node`."""
        if self.is_constant:
            return self._tree
        items = value if self._keys is None else value.values()
        return rebuild_container(value, [node.build(item, replay) for node, item in zip(self._items, items, strict=True)])

    def list_addresses(self) -> list[str]:
        """As `Node`."""
        return [address for item in self._items for address in item.list_addresses()]

    def list_keys(self) -> list[object]:
        """As `Node`."""
        return [*(self._keys or ()), *(key for item in self._items for key in item.list_keys())]

    def list_constants(self) -> Iterator[object]:
        """As `Node`."""
        if self.is_constant:
            yield self._tree
        else:
            for item in self._items:
                yield from item.list_constants()


def _is_constant(node: Node) -> bool:
    return type(node) is TensorNode or (type(node) is ContainerNode and node.is_constant)

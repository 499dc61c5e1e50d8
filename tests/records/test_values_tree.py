"""Walks over value trees: marks in and out, container types kept, untouched containers kept as they are."""

from __future__ import annotations

import argparse
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import pytest

from anyshard.errors import LimitExceeded, UnsupportedValue
from anyshard.records.values import (
    NamedTupleRecord,
    TensorMark,
    collect_marks,
    is_container,
    iterate_leaves,
    label_item,
    list_components,
    map_leaves,
    map_marks,
    rebuild_container,
)
from tests.records.value_facts import describe

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the untyped form is one of the cases

CONTAINERS = [
    [1, 2],
    (1, 2),
    deque([1, 2], maxlen=4),
    {"a": 1, 2: 2},
    OrderedDict(b=1, a=2),
    Counter(a=1, b=2),
    defaultdict(int, a=1, b=2),
    Pair(1, 2),
    NamedTupleRecord((1, 2), "Pair", ("left", "right")),
    types.SimpleNamespace(a=1, b=2),
    argparse.Namespace(a=1, b=2),
]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda c: type(c).__name__)
def test_containers_keep_type_keys_and_settings(container):
    """Rebuilding with the same items gives an equal container; mapping to the same leaves gives the very same one."""
    rebuilt = rebuild_container(container, [1, 2])
    assert describe(container) == describe(rebuilt)
    assert type(container) is type(rebuilt)
    assert container is map_leaves(container, lambda leaf, _: leaf, address="x")


@pytest.mark.parametrize(
    "leaf", [{1, 2}, frozenset(), "ab", b"ab", range(3), None, argparse, TensorMark("a", "tensor")], ids=repr
)
def test_all_else_is_a_leaf(leaf):
    """Sets, texts and objects are not taken apart."""
    assert not is_container(leaf)
    assert [("x", leaf)] == visit(leaf)


def visit(tree):
    seen = []
    map_leaves(tree, lambda leaf, address: seen.append((address, leaf)) or leaf, address="x")
    return seen


def test_leaves_come_with_their_addresses():
    """Keys are escaped, other keys marked, positions decimal, attributes by name."""
    tree = {"a/b": [10, (11,)], 1: types.SimpleNamespace(c=12), "p": Pair(13, 14)}
    expected = [("x/a~1b/0", 10), ("x/a~1b/1/0", 11), ("x/~i1/c", 12), ("x/p/0", 13), ("x/p/1", 14)]
    assert expected == visit(tree)
    assert ["a~1b", "~i1", "p"] == list_components(tree, address="x")


def test_only_changed_containers_are_copied():
    """Replacing one leaf copies the containers around it and shares all others."""
    kept = [1]
    tree = {"kept": kept, "changed": (2,)}
    mapped = map_leaves(tree, lambda leaf, _: 3 if leaf == 2 else leaf, address="x")
    assert {"kept": [1], "changed": (3,)} == mapped
    assert kept is mapped["kept"]
    assert (2,) == tree["changed"]


def test_marks_are_found_and_replaced_in_tree_order():
    """Each mark is seen once, wherever it lies, and its replacement takes its place."""
    tree = {"w": TensorMark("m/w", "tensor"), "rest": [1, (TensorMark("m/b", "bytes"), {2})]}
    assert ("m/w", "m/b") == tuple(mark.address for mark in collect_marks(tree))
    assert {"w": "tensor", "rest": [1, ("bytes", {2})]} == map_marks(tree, lambda mark: mark.kind)


def test_trees_without_marks_are_kept():
    """Nothing is copied where nothing is replaced."""
    tree = {"a": [1, (2,)]}
    assert tree is map_marks(tree, lambda _: None)
    assert () == collect_marks(tree)


def test_cycles_are_named():
    """A container that contains itself is an error at the address where it comes round."""
    tree = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(UnsupportedValue, match="contains itself") as caught:
        visit(tree)
    assert "x/a/0" == caught.value.address


def test_shared_containers_are_no_cycle():
    """The same list at two places is two places."""
    shared = [1]
    assert [("x/0/0", 1), ("x/1/0", 1)] == visit([shared, shared])


def test_depth_is_bounded():
    """65 nested containers are refused like in the codec."""
    tree = 0
    for _ in range(65):
        tree = [tree]
    with pytest.raises(LimitExceeded, match="at most 64 nested"):
        visit(tree)


def test_leaves_are_listed_once_and_in_order():
    """Numbers, text and None are passed over, shared containers listed once, cycles end."""
    shared = [b"s"]
    tree = {"a": [1, b"x", (None, "t", 2j)], "n": types.SimpleNamespace(b=shared, c=[{3}]), "s": shared, "q": deque([b"y"])}
    tree["cycle"] = tree
    assert [b"x", b"s", {3}, b"y"] == list(iterate_leaves(tree))
    assert [b"top"] == list(iterate_leaves(b"top"))


def test_labels_of_items_never_fail():
    """Positions and keys as in addresses; a key that no address can hold is shown by its type."""
    labels = [label_item([5], 0), label_item({"a/b": 1}, "a/b"), label_item({Path("x"): 1}, Path("x"))]
    assert ["0", "a~1b", f"~?{type(Path()).__name__}"] == labels

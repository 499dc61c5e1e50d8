"""Constant trees: what was worked out of them is used again, and nothing comes out otherwise than without it."""

from __future__ import annotations

from typing import Any

import pytest

from anyshard.errors import AnyshardError, LimitExceeded, UnsupportedValue
from anyshard.records.constant_trees import ConstantTrees
from anyshard.records.section_values import SectionValues, encode_section
from anyshard.records.value_parts import list_parts, list_paths
from anyshard.records.values import TensorMark, ValueLimits, ValueRegistry
from anyshard.records.values_encoder import Encoder

REGISTRY = ValueRegistry()


def make_tree(num: int = 3) -> dict[str, Any]:
    """A tree of marks, as a module has it."""
    return {f"layer{number}": {"w": TensorMark(f"model/layer{number}.w", "tensor"), "none": None} for number in range(num)}


def nest(tree: object, depth: int) -> object:
    """A tree within lists."""
    for _ in range(depth):
        tree = [tree]
    return tree


def test_a_kept_encoding_is_used_and_gives_the_same_bytes() -> None:
    """The payload is the same without, with a first, and with a kept encoding, whatever changes beside the constant tree."""
    tree = make_tree()
    constants = ConstantTrees([tree])
    for step in range(3):
        values = SectionValues({"model": tree, "step": step, "again": [tree]})
        expected = encode_section(values, section="a", registry=REGISTRY)
        assert expected == encode_section(values, section="a", registry=REGISTRY, constants=constants)
    assert [id(tree)] == list(constants.encoded)


def test_a_constant_tree_is_not_looked_at_again() -> None:
    """Nobody may change one, so nobody would see it: that shows that the encoding and the parts are the kept ones."""
    tree = make_tree()
    constants = ConstantTrees([tree])
    values = SectionValues({"model": tree})
    expected = encode_section(values, section="a", registry=REGISTRY, constants=constants)
    parts = list_paths({"a": {"model": tree}}, constants=constants)
    del tree["layer0"]
    assert expected == encode_section(values, section="a", registry=REGISTRY, constants=constants)
    assert parts == list_paths({"a": {"model": tree}}, constants=constants)


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"deep": {"x": object()}}, UnsupportedValue),
        (nest({"w": TensorMark("a", "tensor")}, 40), LimitExceeded),
        ({"text": "x" * 600}, LimitExceeded),
        ([None] * 600, LimitExceeded),
    ],
)
def test_errors_name_the_same_address(tree: object, error: type[AnyshardError]) -> None:
    """What cannot be stored, or exceeds a limit only where it stands, is refused as without what was kept."""
    limits = ValueLimits(max_nbytes=1000, max_depth=64, max_nodes=1000)
    value = {"first": "x" * 500, "list": [None] * 500, "constant": nest(tree, 30), "second": 1}
    messages = []
    for constants in (None, ConstantTrees([tree]), ConstantTrees([tree])):
        with pytest.raises(error) as caught:
            Encoder("root", REGISTRY, limits, constants=constants).encode(value)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] == messages[2]


def test_limits_count_what_is_kept() -> None:
    """A constant tree takes as much of the limits as it would otherwise."""
    tree = make_tree()
    plain, quick = (Encoder("root", REGISTRY, ValueLimits(), constants=each) for each in (None, ConstantTrees([tree])))
    expected, found = (encoder.encode_tree([tree, "text", (1, tree)]) for encoder in (plain, quick))
    assert (expected.num_nodes, expected.nbytes, expected.depth) == (found.num_nodes, found.nbytes, found.depth)
    assert bytes(expected.data) == bytes(found.data)


def test_parts_are_listed_in_the_same_order() -> None:
    """Those of constant trees stand where they would stand otherwise, with the same digests."""
    state, params = make_tree(), {"b": None, "a": None}
    marks = [TensorMark("o/list/0", "tensor")]
    trees = {"o": {"state": state, "groups": {"g": {"options": {"lr": 0.1}, "params": params}}, "list": marks}, "n": 1}
    branches = ["o", "o/state", "o/groups", "o/groups/g", "o/groups/g/params"]
    constants = ConstantTrees([state, params, marks])
    for _ in range(2):
        expected = list_parts(trees, registry=REGISTRY, branches=branches)
        found = list_parts(trees, registry=REGISTRY, branches=branches, constants=constants)
        assert [list(parts.items()) for parts in expected.parts.values()] == [
            list(parts.items()) for parts in found.parts.values()
        ]
    assert 3 == len(constants.parts)


def test_facts_stay_as_long_as_the_parts_are_the_same() -> None:
    """Other values keep what was worked out of the structure; another path, or a dict that became empty, does not."""
    tree = make_tree()
    constants = ConstantTrees([tree])

    def count_facts(**rest: object) -> int:
        list_paths({"a": {"model": tree, **rest}}, constants=constants)
        constants.facts.setdefault("seen", "yes")
        constants.facts[len(constants.facts)] = ""
        return len(constants.facts)

    assert [2, 3, 2, 2] == [count_facts(x=1), count_facts(x=2), count_facts(x={}), count_facts(y={})]

"""The payload of a values slot: errors name the address in the app state, and nothing but what was written is read."""

from __future__ import annotations

import msgspec
import pytest

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedValue
from anyshard.records.section_values import ABSENT, SectionValues, decode_section, encode_section
from anyshard.records.values import PerRankMark, TensorMark, ValueRegistry

REGISTRY = ValueRegistry()


def encode(values: SectionValues) -> bytes:
    return encode_section(values, section="a/b", registry=REGISTRY)


def decode(data: bytes) -> SectionValues:
    return decode_section(data, registry=REGISTRY, file="values")


@pytest.mark.parametrize(
    ("values", "address"),
    [
        (SectionValues({"x": object()}), "a~1b/x"),
        (SectionValues({}, {"a~1b/y": [object()]}), "a~1b/y/0"),
        (SectionValues({}, {"a~1b/y": {"z": object()}}), "a~1b/y/z"),
    ],
)
def test_a_bad_value_is_named_by_its_address(values, address):
    """The name of the section is escaped as in every address, and what is per rank has its own."""
    with pytest.raises(UnsupportedValue, match=f"^{address}: ") as caught:
        encode(values)
    assert address == caught.value.address


@pytest.mark.parametrize(
    "values",
    [
        SectionValues(),
        SectionValues(None),
        SectionValues({"x": 1, "rng": PerRankMark("a~1b/rng")}),
        SectionValues({"x": 1}, {"a~1b/rng": TensorMark("a~1b/rng/~r3", "tensor"), "a~1b": None}),
        SectionValues([1], {}, (1, 2**31 - 1), {"a~1b/rng": {b"k": 0, b"": 5}}),
    ],
)
def test_a_section_comes_back(values):
    """What is written is read, and a tree that is None is not the same as none."""
    assert values == decode(encode(values))


def test_a_lone_rank_writes_the_shared_tree_alone():
    """The payload of one process has one member, as in every release."""
    assert msgspec.msgpack.encode({"shared": {"x": 1}}) == encode(SectionValues({"x": 1}))
    assert b"\x80" == encode(SectionValues())


def test_members_that_are_not_known_are_ignored():
    """A later release may add members."""
    assert SectionValues(ABSENT) == decode(msgspec.msgpack.encode({"later": [1]}))


@pytest.mark.parametrize("nested", [63, 62])
def test_limits_hold_for_the_payload_as_a_whole(nested):
    """The map around the trees counts too, so that nothing is saved that a reader would refuse."""
    tree: object = 1
    for _ in range(nested):
        tree = [tree]
    assert SectionValues(tree) == decode(encode(SectionValues(tree)))
    with pytest.raises(LimitExceeded):
        encode(SectionValues([tree] if nested == 63 else 1, {"a~1b/y": [tree]}))


@pytest.mark.parametrize(
    "members",
    [
        [1],
        {"also": 1},
        {"also": [1, 1]},
        {"also": [2, 1]},
        {"also": [True]},
        {"also": [-1]},
        {"also": [2**31]},
        {"also": [[]]},
        {"also": ["1"]},
        {"per_rank": [1]},
        {"keys": [1]},
        {"keys": {"x": 1}},
        {"keys": {"x": [1]}},
        {"keys": {"x": [[b"k", 0, 0]]}},
        {"keys": {"x": [["k", 0]]}},
        {"keys": {"x": [[b"k", 0.0]]}},
        {"keys": {"x": [[b"k", 0], [b"k", 1]]}},
    ],
)
def test_members_of_another_form_are_damage(members):
    """Whatever the bytes claim, a reader gets maps, ranks and keys, or an error that names the file."""
    with pytest.raises(CheckpointDamaged, match="values: expected") as caught:
        decode(msgspec.msgpack.encode(members))
    assert "values" == caught.value.file

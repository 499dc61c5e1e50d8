"""Registered types: stored under a name, found by that name and by nothing else."""

from __future__ import annotations

import enum
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from anyshard.errors import UnsupportedValue
from anyshard.records.values import InvalidRegistration, RegisteredType, Unregistered, ValueRegistry, decode_value, encode_value


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[int, ...]


class Color(enum.Enum):
    RED = "red"


class Other:
    pass


def make_registry() -> ValueRegistry:
    registry = ValueRegistry()
    registry.register("app.Point", Point, lambda p: [p.x, p.y], lambda fields: Point(*fields))
    registry.register("app.Color", Color, lambda c: c.value, Color)
    return registry


def encode(value, registry):
    return encode_value(value, address="extra", registry=registry)


def decode(data, registry):
    return decode_value(data, registry=registry, file="blob")


def test_registered_types_come_back():
    """A dataclass and an enum come back as themselves, as items and as dict keys."""
    value = {"p": [Point(1, (2, 3))], Color.RED: Color.RED}
    assert value == decode(encode(value, make_registry()), make_registry())


def test_an_unknown_name_is_kept_whole():
    """Without the registration the payload is kept under its name, and saving it again changes no byte."""
    data = encode({"p": Point(1, (2,))}, make_registry())
    found = decode(data, ValueRegistry())
    assert ("app.Point", [1, (2,)]) == (found["p"].name, found["p"].payload)
    assert data == encode(found, ValueRegistry())


def test_names_in_a_file_import_nothing():
    """A name that looks like a module or class is never imported."""
    data = encode(Unregistered("antigravity.Thing", 1, b""), ValueRegistry())
    script = (
        "import sys; from anyshard.records.values import *\n"
        f"found = decode_value(bytes.fromhex({data.hex()!r}), registry=ValueRegistry(), file='b')\n"
        "print(found.name, 'antigravity' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": "src"}, capture_output=True, text=True, check=True, timeout=60
    )
    assert "antigravity.Thing False" == result.stdout.strip()


def test_a_subclass_of_a_registered_type_is_refused():
    """Only exactly the registered class is encoded."""

    class Point3(Point):
        pass

    with pytest.raises(UnsupportedValue, match="Point3"):
        encode(Point3(1, ()), make_registry())


def test_a_failing_encoder_gets_the_address():
    """An error of the user's encoder becomes one that says where the value lies."""
    registry = ValueRegistry()
    registry.register("app.Other", Other, lambda _: 1 / 0, Other)
    with pytest.raises(UnsupportedValue, match=r"'app\.Other' failed: ZeroDivisionError") as caught:
        encode({"a": [Other()]}, registry)
    assert "extra/a/0" == caught.value.address


def test_an_encoder_must_give_plain_values():
    """What an encoder returns is checked like any other value, and may not contain the value itself."""
    registry = ValueRegistry()
    registry.register("app.Other", Other, lambda o: [o], Other)
    with pytest.raises(UnsupportedValue, match="contains itself"):
        encode(Other(), registry)


def test_unknown_members_of_sets_and_keys_are_kept_whole():
    """What stood in a set or as a key still can without the registration, even if its payload cannot be hashed."""
    registry = ValueRegistry()
    registry.register("app.Point", Point, lambda p: {"x": p.x}, lambda fields: Point(**fields))
    data = encode([{Point(1, ()), Point(2, ())}, {Point(1, ()): "a"}], registry)
    found = decode(data, ValueRegistry())
    assert [{"x": 1}, {"x": 2}] == sorted((member.payload for member in found[0]), key=lambda payload: payload["x"])
    assert set(found[1]) < found[0]
    assert data == encode(found, ValueRegistry())


def test_a_failing_decoder_is_named():
    """An error of the user's decoder says whose it is and where the payload came from; the file is not called damaged."""
    data = encode(Point(1, ()), make_registry())
    registry = ValueRegistry()
    registry.register("app.Point", Point, lambda p: p, lambda p: p["x"])
    with pytest.raises(InvalidRegistration, match=r"blob: the decoder registered as 'app\.Point' failed.*register_value"):
        decode(data, registry)


def test_a_reserved_value_that_cannot_be_made_here_is_kept_whole():
    """A dtype or device that this process lacks is no damage: it comes as a record, and saving that changes no byte."""
    entry = RegisteredType("torch.Other", Other, lambda _: ["cuda:0"], lambda _: 1 / 0)
    registry = ValueRegistry().extended([entry])
    data = encode({"a": [Other(), 5]}, registry)
    found = decode(data, registry)
    assert ("torch.Other", ["cuda:0"], 5) == (found["a"][0].name, found["a"][0].payload, found["a"][1])
    assert data == encode(found, registry)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("torch.Size", Other, "reserved"),
        ("app.Point", Other, "Point registered as 'app.Point' already"),
        ("app.Point2", Point, "one name per class"),
        ("app.dict", dict, "stored by anyshard itself"),
        ("app.float64", np.float64, "stored by anyshard itself"),
        ("no spaces", Other, "letters, digits"),
        ("", Other, "letters, digits"),
        ("app.x", 5, "expected a class"),
    ],
)
def test_bad_registrations_are_refused(name, kind, reason):
    """Reserved and taken names, built-in types and what is no class are refused, and nothing changes."""
    registry = make_registry()
    with pytest.raises(InvalidRegistration, match=reason):
        registry.register(name, kind, str, str)
    assert Point is registry.find_name("app.Point").type
    assert registry.find_type(kind if isinstance(kind, type) and kind is not Point else Other) is None


def test_the_same_class_may_be_registered_again():
    """A class defined anew under its old name takes the place of the old one, as in a notebook."""

    def define():
        class Cell:
            pass

        return Cell

    first, second = define(), define()
    registry = ValueRegistry()
    registry.register("app.Cell", first, lambda _: 1, lambda _: first())
    registry.register("app.Cell", second, lambda _: 2, lambda _: second())
    assert registry.find_type(first) is None
    assert second is type(decode(encode(second(), registry), registry))


def test_an_extended_registry_sees_both():
    """Adapters add reserved names without changing the registry below, whose later entries are seen."""
    below = ValueRegistry()
    above = below.extended([RegisteredType("torch.Other", Other, lambda _: None, lambda _: Other())])
    below.register("app.Point", Point, lambda p: [p.x, p.y], lambda fields: Point(*fields))
    assert Point(1, ()) == decode(encode(Point(1, ()), above), above)
    assert Other is type(decode(encode(Other(), above), above))
    assert below.find_name("torch.Other") is None

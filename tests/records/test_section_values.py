"""The payload of a values slot: errors name the address in the app state."""

from __future__ import annotations

import pytest

from anyshard.errors import UnsupportedValue
from anyshard.records.section_values import decode_section, encode_section
from anyshard.records.values import ValueRegistry


def test_a_bad_value_is_named_by_its_address():
    """The name of the section is escaped as in every address."""
    with pytest.raises(UnsupportedValue, match="^a~1b/x: ") as caught:
        encode_section({"x": object()}, section="a/b", registry=ValueRegistry())
    assert "a~1b/x" == caught.value.address


def test_a_section_comes_back():
    """What is written is read, whatever the name of the section."""
    data = encode_section({"x": 1}, section="a/b", registry=ValueRegistry())
    assert {"x": 1} == decode_section(data, registry=ValueRegistry(), file="values")

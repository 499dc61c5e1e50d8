"""Addresses: components, globs, what is shown, and section directories."""

from __future__ import annotations

import enum
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.errors import UnsupportedValue
from anyshard.records.addresses import (
    SECTION_DIRECTORY,
    Globs,
    check_directories,
    component,
    escape,
    join_address,
    section_directory,
    section_of,
    show,
    split_address,
    unescape,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
KEYS = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none() | st.binary(max_size=3) | st.floats(allow_nan=False),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("a/b~c", "a~1b~0c"),
        ("", ""),
        (1, "~i1"),
        (-3, "~i-3"),
        (True, "~bTrue"),
        (None, "~n"),
        (0.5, "~f0.5"),
        (b"\x00\xff", "~y00ff"),
        ((), "~t()"),
        ((0, ("a,b", None)), "~t(~i0,~t(a~2b,~n,),)"),
        ("~r3", "~0r3"),
    ],
)
def test_component_of_key(key: object, expected: str) -> None:
    """Each kind of key is written as the format says."""
    assert expected == component(key)


@given(KEYS, KEYS)
def test_components_never_clash(one: object, other: object) -> None:
    """Keys of other types or values have other components, so {1: a, "1": b} keeps both."""
    assert (repr(one) == repr(other)) == (component(one) == component(other))


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_addresses_split_into_what_was_joined(keys: list[str]) -> None:
    """Joining and splitting lose nothing, whatever the keys hold."""
    address = join_address(*(component(key) for key in keys))
    assert keys == [unescape(written) for written in split_address(address)]
    assert keys[0] == section_of(address)


class Colour(enum.IntEnum):
    """An int subclass, which must not pass for its base."""

    RED = 1


class Name(str):
    """A str subclass, which must not pass for its base."""

    __slots__ = ()


@pytest.mark.parametrize("key", [Colour.RED, Name("x"), object(), frozenset(), (1, Colour.RED), 1j])
def test_other_keys_are_refused(key: object) -> None:
    """A key of any other type, subclasses included, is an error that names the container."""
    with pytest.raises(UnsupportedValue, match="model/x: expected keys of type str") as caught:
        component(key, within="model/x")
    assert "model/x" == caught.value.address


@pytest.mark.parametrize("key", ["bad\udc80", ("bad\udc80",)])
def test_names_that_are_not_utf8_are_refused(key: object) -> None:
    """A lone surrogate is an error whose message can itself be printed."""
    with pytest.raises(UnsupportedValue, match="valid UTF-8") as caught:
        component(key, within="model")
    assert str(caught.value).isascii()


def test_shown_addresses_are_printable() -> None:
    """Control characters are allowed in addresses but never reach a terminal."""
    assert "model/a\\x1b[31m\\n\\u202eb c" == show("model/a\x1b[31m\n\u202eb c")
    assert "model/\u00e9" == show("model/\u00e9")


@pytest.mark.parametrize(
    ("glob", "address", "expected"),
    [
        ("model/*", "model/a", True),
        ("model/*", "model/a/b", False),
        ("model/**", "model/a/b", True),
        ("**/exp_avg", "optimizer/state/w/exp_avg", True),
        ("model/?", "model//", False),
        ("model/layers.[0-2].*", "model/layers.1.weight", True),
        ("model/layers.[!0-2].*", "model/layers.1.weight", False),
        ("a[!x]b", "a/b", False),
        ("a[]]b", "a]b", True),
        ("a[!]b", "a!b", True),
        ("a[]b", "a[]b", True),
        ("a[z-a]b", "a-b", True),
        ("a[--/]b", "a.b", True),
        ("a[[&~|]b", "a[b", True),
        ("a*b", "a\nb", True),
        ("model", "model/a", False),
        ("a.b", "axb", False),
    ],
)
def test_globs(glob: str, address: str, expected: bool) -> None:
    """`*` and `?` and sets stay within a component, `**` crosses, all else is literal and whole."""
    assert expected == Globs([glob]).match(address)


def test_globs_match_any_of_several_and_none_of_none() -> None:
    """Several globs are alternatives; no glob matches nothing."""
    globs = Globs(["a", "b/*"])
    assert [True, True, False] == [globs.match(address) for address in ("a", "b/c", "c")]
    assert not Globs([]).match("")


@given(TEXTS, TEXTS)
def test_escape_matches_only_its_text(text: str, other: str) -> None:
    """An escaped text is a glob for itself alone."""
    assert Globs([escape(text)]).match(text)
    assert (text == other) == Globs([escape(text)]).match(other)


@pytest.mark.parametrize("name", ["model", "optimizer.0", "a-b", "_x", "model-12345678x"])
def test_safe_sections_keep_their_name(name: str) -> None:
    """A path-safe lower-case name is its own directory."""
    assert name == section_directory(name)


@pytest.mark.parametrize("name", ["Model", "..", ".hidden", "", "a/b", "x" * 65, "\u00e9", "model.", "model-0123abcd", "a\x00b"])
def test_other_sections_get_a_hashed_directory(name: str) -> None:
    """Any other name becomes a safe stem with a hash."""
    directory = section_directory(name)
    assert SECTION_DIRECTORY.fullmatch(directory)
    assert re.search(r"-[0-9a-f]{8}$", directory)
    assert directory != name


@given(st.sets(TEXTS | st.sampled_from(["model", "Model", "MODEL", section_directory("Model")]), max_size=6))
def test_sections_never_share_a_directory(names: set[str]) -> None:
    """Different sections have different directories, also where case is ignored."""
    assert len(names) == len({section_directory(name).lower() for name in names})
    check_directories(names)


def test_shared_directory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sections whose hashes collide are refused by name."""
    monkeypatch.setattr("anyshard.records.addresses.section_directory", lambda _: "same")
    with pytest.raises(ValueError, match="'A' and 'B' would share a directory"):
        check_directories(["A", "B"])

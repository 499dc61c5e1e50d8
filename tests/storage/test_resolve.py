"""From a place to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyshard.errors import InvalidPath
from anyshard.storage.memory import MemoryStore
from anyshard.storage.resolve import open_store


@pytest.mark.parametrize(
    ("place", "root"),
    [
        ("/runs/a", "/runs/a"),
        (Path("/runs/a"), "/runs/a"),
        ("runs/a/", "/here/runs/a"),
        ("~/a", "/home/me/a"),
        ("/with:colon//double", "/with:colon/double"),
        ("/literal%20percent", "/literal%20percent"),
        ("file:///runs/a", "/runs/a"),
        ("FILE://localhost/runs/a", "/runs/a"),
        ("file:///with%20space", "/with space"),
    ],
)
def test_places_of_the_local_store(monkeypatch: pytest.MonkeyPatch, place: str | Path, root: str) -> None:
    """Paths and file URLs become the absolute path of a local store; only URLs are percent-decoded."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    assert root == open_store(place).url


def test_nothing_is_made(tmp_path: Path) -> None:
    """Opening a store touches nothing."""
    open_store(tmp_path / "a" / "b")
    assert [] == list(tmp_path.iterdir())


def test_store_is_itself() -> None:
    """A store object is taken as it is."""
    store = MemoryStore()
    assert store is open_store(store)


@pytest.mark.parametrize("place", ["", "a\0b", "s3x://bucket/a", "file://host/a", "file:///a?b", "file:///a#b", "file://"])
def test_other_places_are_refused(place: str) -> None:
    """What no store understands is `InvalidPath` that says what would be."""
    with pytest.raises(InvalidPath, match="expected"):
        open_store(place)


@pytest.mark.parametrize("place", [None, 5, b"bytes", ["a"]])
def test_other_objects_are_refused(place: object) -> None:
    """What is neither a path nor a store is `InvalidPath` that names its type."""
    with pytest.raises(InvalidPath, match=type(place).__name__):
        open_store(place)  # type: ignore[arg-type]


def test_credentials_are_not_repeated() -> None:
    """The message about an unknown scheme names the scheme and nothing else of the URL."""
    with pytest.raises(InvalidPath, match="'nope'") as caught:
        open_store("nope://user:secret@host/a")
    assert "secret" not in str(caught.value)

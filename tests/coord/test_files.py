"""The file key-value store and long messages, beyond the contract."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anyshard.coord.files import FileKeyValueStore
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.messages import read_message, write_message
from anyshard.coord.protocol import MAX_VALUE_NBYTES
from anyshard.errors import KeyValueStoreLost


def test_nothing_is_left_beside_the_keys(tmp_path: Path) -> None:
    """Files that were written beside are gone afterwards, whoever won."""
    store = FileKeyValueStore(tmp_path)
    store.set("a/b", b"1")
    store.set_if_absent("a/b", b"2")
    store.set_if_absent("c", b"3")
    assert ["a%2Fb", "c"] == sorted(os.listdir(tmp_path))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """All verbs say that the directory is missing, none that the key is."""
    store = FileKeyValueStore(tmp_path / "nowhere")
    for verb in (lambda: store.get("a"), lambda: store.set("a", b"1"), lambda: store.set_if_absent("a", b"1")):
        with pytest.raises(KeyValueStoreLost, match="Make it before the job starts"):
            verb()


def test_a_directory_that_does_not_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links is named as such, and nothing is left beside."""

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(KeyValueStoreLost, match="key a/b in .*Operation not permitted.*hard links"):
        FileKeyValueStore(tmp_path).set_if_absent("a/b", b"1")
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize("nbytes", [0, 1, MAX_VALUE_NBYTES - 4, MAX_VALUE_NBYTES - 3, 2 * MAX_VALUE_NBYTES])
def test_messages_of_any_length(nbytes: int) -> None:
    """A message comes back whole, its pieces have at most the largest size, and its keys are those that it says."""
    store = MemoryKeyValueStore()
    payload = os.urandom(nbytes)
    keys = write_message(store, "a", payload)
    values = store.get_many(keys)
    assert values[0] is not None
    assert payload == read_message(store, "a", values[0])
    assert sorted(keys) == list(store.keys())
    assert max(len(value or b"") for value in values) <= MAX_VALUE_NBYTES


def test_a_message_deleted_while_it_is_read() -> None:
    """A message whose later pieces are gone is no message any more, never a short one."""
    store = MemoryKeyValueStore()
    first, second = write_message(store, "a", bytes(MAX_VALUE_NBYTES))
    value = store.get(first)
    store.delete(second)
    assert value is not None
    assert read_message(store, "a", value) is None

"""What the memory store offers to tests beyond the contract."""

from __future__ import annotations

import pytest

from anyshard.errors import BlobExists
from anyshard.storage.memory import MemoryStore
from anyshard.testing.store_fixtures import write_blob


def test_snapshot_is_a_copy() -> None:
    """What is done to a snapshot or to the store later does not reach the other."""
    store = MemoryStore({"a": b"1"})
    snapshot = store.snapshot()
    snapshot["b"] = b"2"
    store.delete(("a",))
    assert ({"a": b"1", "b": b"2"}, {}) == (snapshot, store.snapshot())


def test_store_of_a_changed_snapshot() -> None:
    """A damaged copy of a store is made of its snapshot with one blob changed."""
    store = MemoryStore()
    write_blob(store, "data/a", b"good")
    damaged = MemoryStore({**store.snapshot(), "data/a": b"evil"})
    assert (b"good", b"evil") == (store.read("data/a", max_nbytes=4), damaged.read("data/a", max_nbytes=4))


def test_key_taken_while_writing() -> None:
    """A key that another writer took meanwhile is `BlobExists` at `finish`."""
    store = MemoryStore()
    with store.create_blob("a", nbytes=0) as writer:
        store.create("a", b"first", token="t")
        with pytest.raises(BlobExists):
            writer.finish()
    assert {"a": b"first"} == store.snapshot()


def test_ages_follow_the_given_clock() -> None:
    """Tests set the time: `now_s` and `modified_s` are by the clock of the constructor."""
    times = iter([10.0, 20.0])
    store = MemoryStore(clock=lambda: next(times))
    store.create("a", b"", token="t")
    assert (10.0, 20.0) == (store.list("").entries[0].modified_s, store.now_s())

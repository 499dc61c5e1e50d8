"""Giving up an attempt of several ranks: what all of them raise stays what it is, and each looks at its own storage only."""

from __future__ import annotations

import pytest

from anyshard.commit.attempt import abandoning, begin, own_error
from anyshard.errors import OperationFailed, StorageError, StorageStuck, make_failure
from anyshard.storage.memory import MemoryStore
from tests.commit.steps import save, write_attempt


def fail(kind: str) -> OperationFailed:
    return make_failure("save was given up:", {1: f"write: {kind}: boom"}, kinds=[kind])


def give_up(store: MemoryStore, failure: OperationFailed, *, cause: Exception | None = None, is_late: bool = False) -> list[str]:
    """Give up an attempt because of a failure, and check that it is raised; its notes."""
    attempt = begin(store, sections=("model",), overwrite=False)
    write_attempt(store, attempt)
    if is_late:
        save(store)
    with pytest.raises(OperationFailed) as caught, abandoning(store, attempt):
        raise failure from cause
    assert failure is caught.value
    return getattr(failure, "__notes__", [])


def test_a_conflict_is_a_note() -> None:
    """The other ranks have raised the failure of storage, so the one that finds the reason raises it too, and says so."""
    (note,) = give_up(MemoryStore(), fail("StorageError"), is_late=True)
    assert note.startswith("Probably the reason: memory:: expected to commit generation 1, found generation 1 there already")


def test_a_storage_that_hangs_elsewhere_does_not_hang_here() -> None:
    """What the coordinator can remove it removes."""
    store = MemoryStore()
    assert [] == give_up(store, fail("StorageStuck"))
    assert {} == store.snapshot()


def test_a_storage_that_hangs_here_is_left_alone() -> None:
    """Whatever the failure is called that all ranks raise: it may be that of another rank."""
    store, stuck = MemoryStore(), StorageStuck("no answer", file="x")
    (note,) = give_up(store, fail("StorageError"), cause=stuck)
    assert "a later clean removes them" in note
    assert {} != store.snapshot()


def test_the_error_of_this_process() -> None:
    """It is the cause of a failure that all ranks raise, or nothing; and an error that is none is itself."""
    own, failure, other = StorageError("boom", file="x"), fail("StorageError"), fail("StorageError")
    failure.__cause__ = own
    assert (own, own, None) == (own_error(own), own_error(failure), own_error(other))

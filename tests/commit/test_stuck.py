"""A storage that hangs: nothing is deleted that may yet count, and nobody waits for it twice."""

from __future__ import annotations

import threading

import pytest

from anyshard.commit.attempt import abandoning, begin
from anyshard.commit.publish import Patience, publish
from anyshard.commit.resolve import resolve
from anyshard.errors import CommitOutcomeUnknown, StorageStuck
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, TimedStore, Verb, do_before
from tests.commit.steps import write_attempt


def test_a_hanging_storage_is_left_alone() -> None:
    """After `StorageStuck` the attempt asks the store for nothing more, and says who removes what is left."""
    store = CountingStore(MemoryStore())
    attempt = begin(store, sections=("model",), overwrite=False)
    asked = [store.count(verb) for verb in Verb]
    with pytest.raises(StorageStuck) as raised, abandoning(store, attempt):
        raise StorageStuck("no answer", file="x")
    assert asked == [store.count(verb) for verb in Verb]
    assert f"files of attempt {attempt.id}" in raised.value.__notes__[0]


def test_a_record_that_may_still_be_created_keeps_its_files() -> None:
    """A creation that hangs is an unknown outcome; when it is done after all, the checkpoint is whole."""
    gate, inner = threading.Event(), MemoryStore()
    store = TimedStore(FaultStore(inner, [Rule(Verb.CREATE, "manifest-1.json", do_before(gate.wait))]), 0.05)
    attempt = begin(store, sections=("model",), overwrite=False)
    manifest = write_attempt(store, attempt)
    with pytest.raises(CommitOutcomeUnknown, match="may or may not exist"), abandoning(store, attempt):
        publish(store, manifest, patience=Patience(timeout_s=0.2, poll_s=0.05))
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "anyshard-storage":
            thread.join(timeout=30)
    assert manifest == resolve(inner).manifest

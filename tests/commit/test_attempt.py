from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anyshard.commit.attempt import abandon, abandoning, begin
from anyshard.commit.listing import list_step
from anyshard.commit.publish import publish
from anyshard.commit.tombstone import delete_step
from anyshard.errors import (
    BlobNotFound,
    CheckpointExists,
    CommitConflict,
    CommitOutcomeUnknown,
    InvalidPath,
    LimitExceeded,
    NotACheckpoint,
    StorageError,
    StorageFull,
)
from anyshard.monitor.events import Emitter, Event
from anyshard.records.manifest import encode_manifest
from anyshard.records.names import MAX_GENERATION, manifest_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import Call, FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import fail
from tests.commit.steps import ATTEMPTS, make_manifest, run_until, save, save_slowly, verdict, write_attempt

A, B = ATTEMPTS[:2]


class Names:
    """A sink that keeps the names of events."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def emit(self, event: Event) -> None:
        self.names.append(event.name)


def test_a_first_attempt_aims_at_generation_one(tmp_path: Path) -> None:
    """A new place gets its directories and generation 1."""
    attempt = begin(LocalStore(tmp_path / "run" / "step"), sections=("model", "Optimizer"), overwrite=False)
    assert (1, None) == (attempt.generation, attempt.previous)
    assert 3 == len([path for path in (tmp_path / "run" / "step").rglob("*") if path.is_dir()])


def test_a_committed_step_is_refused_without_overwrite() -> None:
    """The error names the step and overwrite=True; nothing is written."""
    store = MemoryStore()
    save(store)
    before = store.snapshot()
    with pytest.raises(CheckpointExists, match=r"step 100.*overwrite=True"):
        begin(store, sections=("model",), overwrite=False)
    assert before == store.snapshot()


def test_overwriting_aims_at_the_next_generation() -> None:
    """The attempt carries the checkpoint that it will replace."""
    store = MemoryStore()
    first = save(store)
    attempt = begin(store, sections=("model",), overwrite=True)
    assert (2, first) == (attempt.generation, attempt.previous)


def test_a_deleted_step_may_be_saved_again() -> None:
    """After a tombstone a save needs no overwrite and replaces nothing."""
    store = MemoryStore()
    save(store)
    delete_step(store)
    attempt = begin(store, sections=("model",), overwrite=False)
    assert (3, None) == (attempt.generation, attempt.previous)


def test_a_damaged_step_is_replaced_only_on_request() -> None:
    """A damaged newest record counts as something that is there."""
    store = MemoryStore({manifest_name(4): b"{}"})
    with pytest.raises(CheckpointExists, match="damaged"):
        begin(store, sections=("model",), overwrite=False)
    attempt = begin(store, sections=("model",), overwrite=True)
    assert (5, None) == (attempt.generation, attempt.previous)


def test_leftovers_of_a_dead_save_do_not_stop_the_next_one() -> None:
    """A save after an unfinished one takes the same generation with another attempt."""
    store = MemoryStore()
    run_until(save_slowly(store), "index")
    assert 1 == save(store).generation


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    """Saving into somebody else's directory is an error and writes nothing."""
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(NotACheckpoint, match=r"model\.safetensors.*Nothing was written"):
        begin(LocalStore(tmp_path), sections=("model",), overwrite=True)
    assert ["model.safetensors"] == [path.name for path in tmp_path.iterdir()]


def test_a_file_is_no_place_for_a_checkpoint(tmp_path: Path) -> None:
    """A path that is a file is an invalid path."""
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InvalidPath):
        begin(LocalStore(tmp_path / "file"), sections=("model",), overwrite=False)


def test_the_last_generation_is_an_error() -> None:
    """Generations have nine digits; nothing comes after the last."""
    store = MemoryStore({manifest_name(MAX_GENERATION): encode_manifest(make_manifest(MAX_GENERATION, A))})
    with pytest.raises(LimitExceeded, match="last one"):
        begin(store, sections=("model",), overwrite=True)


def test_b053_a_failed_attempt_takes_its_files_along() -> None:
    """After a full disk exactly this attempt's files are gone, another attempt's stay, and the error comes through."""
    store = MemoryStore()
    run_until(save_slowly(store), "index")
    before = store.snapshot()
    attempt = begin(store, sections=("model",), overwrite=False)
    write_attempt(store, attempt)
    with pytest.raises(StorageFull), abandoning(store, attempt):
        raise StorageFull("full", file="data/model")
    assert before == store.snapshot()


def test_b130_a_failed_overwrite_leaves_the_old_checkpoint() -> None:
    """The first checkpoint loads after the second save failed."""
    store = MemoryStore()
    save(store)
    before = store.snapshot()
    attempt = begin(store, sections=("model",), overwrite=True)
    write_attempt(store, attempt)
    with pytest.raises(KeyboardInterrupt), abandoning(store, attempt):
        raise KeyboardInterrupt
    assert (before, 1) == (store.snapshot(), verdict(store))


def test_a_published_attempt_is_never_abandoned() -> None:
    """An error after the commit deletes nothing."""
    store = MemoryStore()
    attempt = begin(store, sections=("model",), overwrite=False)
    manifest = write_attempt(store, attempt)
    publish(store, manifest)
    assert ((), 1) == (abandon(store, attempt), verdict(store))


def test_nothing_is_deleted_while_the_outcome_is_unknown() -> None:
    """`CommitOutcomeUnknown` passes through and every file stays."""
    store = MemoryStore()
    attempt = begin(store, sections=("model",), overwrite=False)
    write_attempt(store, attempt)
    with pytest.raises(CommitOutcomeUnknown), abandoning(store, attempt):
        raise CommitOutcomeUnknown("unknown")
    assert 2 == sum(len(entries) for entries in list_step(store).files.values())


def test_nothing_is_deleted_while_the_record_cannot_be_read() -> None:
    """An unreadable record may be ours, so abandoning keeps the files."""
    inner = MemoryStore()
    attempt = begin(inner, sections=("model",), overwrite=False)
    write_attempt(inner, attempt)
    store = FaultStore(inner, [Rule(Verb.READ, "manifest-*", fail(StorageError("down", file="x")))])
    assert (2, ()) == (len(inner.snapshot()), abandon(store, attempt))
    assert (2, 1) == (len(inner.snapshot()), len(store.fired))


def test_trouble_with_deleting_does_not_hide_the_error(caplog: pytest.LogCaptureFixture) -> None:
    """The body's error is raised, the failed removal is logged."""
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(Verb.DELETE, "*", fail(StorageError("down", file="x")))])
    attempt = begin(store, sections=("model",), overwrite=False)
    write_attempt(store, attempt)
    with pytest.raises(ValueError, match="the body's"), abandoning(store, attempt):
        raise ValueError("the body's")
    assert [f"memory:: the files of attempt {attempt.id} could not be removed"] == [record.message for record in caplog.records]


def test_trouble_that_comes_from_a_conflict_is_called_one() -> None:
    """If storage fails because somebody took the generation and removed our files, the error says that."""
    store = MemoryStore()
    attempt = begin(store, sections=("model",), overwrite=False)
    save(store)
    with pytest.raises(CommitConflict, match="found generation 1") as caught, abandoning(store, attempt):
        raise StorageError("the file that was being written is gone", file="x")
    assert isinstance(caught.value.__cause__, StorageError)


def test_each_change_of_state_is_an_event() -> None:
    """Begun, publishing, published and abandoned are told to the sinks."""
    sink = Names()
    events, store = Emitter([sink], operation="x", rank=0), MemoryStore()
    attempt = begin(store, sections=("model",), overwrite=False, events=events)
    publish(store, write_attempt(store, attempt), events=events)
    abandon(store, begin(store, sections=("model",), overwrite=True, events=events), events=events)
    expected = ["save.attempt.begun", "save.publish.begin", "save.published", "save.attempt.begun", "save.abandoned"]
    assert expected == sink.names


def test_a_failed_first_save_leaves_no_directories(tmp_path: Path) -> None:
    """What `begin` made goes with the files, once it is empty."""
    store = LocalStore(tmp_path / "step")
    attempt = begin(store, sections=("model", "other"), overwrite=False)
    write_attempt(store, attempt)
    with pytest.raises(StorageFull), abandoning(store, attempt):
        raise StorageFull("full", file="data/model")
    assert [] == list((tmp_path / "step").iterdir())


def test_directories_that_were_there_stay(tmp_path: Path) -> None:
    """Abandoning removes only directories that its own attempt made."""
    store = LocalStore(tmp_path)
    (tmp_path / "data" / "model").mkdir(parents=True)
    abandon(store, begin(store, sections=("model", "other"), overwrite=False))
    assert ["data", "data/model"] == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_directories_that_another_save_may_need_stay(tmp_path: Path) -> None:
    """While another attempt has files, an empty directory may be the one that it writes to next."""
    store = LocalStore(tmp_path)
    attempt = begin(store, sections=("model", "other"), overwrite=False)
    running = save_slowly(store)
    run_until(running, "blob")
    abandon(store, attempt)
    assert (tmp_path / "data" / "other").is_dir()
    run_until(running, "removed")


def test_preparing_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Directories that were made before the error are gone after it."""

    def fail_half_way(_call: Call, run: Callable[[], object]) -> object:
        run()
        raise StorageFull("no inodes", file="data/model")

    store = FaultStore(LocalStore(tmp_path / "step"), [Rule(Verb.PREPARE, "*", fail_half_way)])
    with pytest.raises(StorageFull):
        begin(store, sections=("model",), overwrite=False)
    assert [] == list((tmp_path / "step").iterdir())


def test_a_directory_that_goes_away_while_it_is_prepared_is_made_again() -> None:
    """A delete or clean may remove a directory between its making and its use."""
    gone = Rule(Verb.PREPARE, "*", fail(BlobNotFound("gone", file="data/model")), times=2)
    store = FaultStore(MemoryStore(), [gone])
    begin(store, sections=("model",), overwrite=False)
    assert 2 == len(store.fired)

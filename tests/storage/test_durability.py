"""What a crash leaves: the order in which the local store makes things durable, and SIGKILL at each of its points."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from anyshard.errors import BlobExists
from anyshard.monitor.events import Emitter, Event
from anyshard.monitor.sinks import RecordingSink
from anyshard.storage.local import LocalStore
from anyshard.storage.posix.publish import PRIMITIVES, Primitive, by_link
from anyshard.testing.store_fixtures import keys_below, write_blob


class Killer:
    """A sink that ends this process, without any cleaning up, at the first event of a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def emit(self, event: Event) -> None:
        if event.name == self._name:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed_at(point: str, root: Path, work: Callable[[LocalStore], object], *, primitive: Primitive = by_link) -> None:
    """Do `work` on a store in a child that is killed at event `storage.<point>`; a child that survives fails the test."""
    child = os.fork()
    if child == 0:
        try:
            events = Emitter((Killer(f"storage.{point}"),), operation="test", rank=0)
            work(LocalStore(root, events=events, primitives=(primitive,)))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert (True, signal.SIGKILL) == (os.WIFSIGNALED(status), os.WTERMSIG(status))


def create_first(store: LocalStore) -> None:
    """What the killed process was doing."""
    store.create("a", b"first", token="t1")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of events and `sync <path>` for each synced descriptor, in order."""
    lines: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        lines.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return lines


class _Lines:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def emit(self, event: Event) -> None:
        self._lines.append(event.name.removeprefix("storage."))


def make_logged_store(root: Path, log: list[str], *, primitive: Primitive = by_link) -> LocalStore:
    return LocalStore(root, events=Emitter((_Lines(log),), operation="test", rank=0), primitives=(primitive,))


def test_prepare_syncs_each_directory_it_made_and_its_parent(quick_path: Path, log: list[str]) -> None:
    """New directories are durable from the leaf's own content up to the directory that was there before."""
    make_logged_store(quick_path / "runs" / "a" / "step_1", log).prepare(("data/model/",))
    made = ["step_1", "a", "runs", quick_path.name]
    below = ["step_1", "data", "model"]
    assert [f"sync {name}" for name in made] == log[: len(made)]
    assert [*(f"sync {name}" for name in below), "prepare.done"] == log[-len(below) - 1 :]


def test_prepare_syncs_each_directory_once(quick_path: Path, log: list[str]) -> None:
    """Many sections cost one sync each, and do not sync the directories above them again and again."""
    sections = [f"s{i}" for i in range(20)]
    make_logged_store(quick_path / "step_1", log).prepare(("data/", *(f"data/{section}/" for section in sections)))
    assert ["sync step_1", "sync data", *(f"sync {section}" for section in sections), "prepare.done"] == log[-23:]


def test_prepare_syncs_what_an_earlier_process_made(quick_path: Path, log: list[str]) -> None:
    """A directory that was there is synced again, with its parent: who made it may have died before it did so."""
    (quick_path / "step_1" / "data").mkdir(parents=True)
    make_logged_store(quick_path / "step_1", log).prepare(("data/",))
    assert {f"sync {name}" for name in (quick_path.name, "step_1", "data")} <= set(log)


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_create_syncs_content_before_name_before_directory(quick_path: Path, log: list[str], primitive: Primitive) -> None:
    """The content is durable before the final name appears, and the directory before success is reported."""
    make_logged_store(quick_path, log, primitive=primitive).create("a", b"content", token="t")
    assert ["sync a.t.tmp", "create.temporary"] == log[:2]
    assert ["create.renamed", f"sync {quick_path.name}", "create.durable"] == log[-3:]


def test_blob_syncs_content_before_directory(quick_path: Path, log: list[str]) -> None:
    """A blob is synced once after all its writes, then its directory."""
    write_blob(make_logged_store(quick_path, log), "a", b"content")
    expected = ["blob.created", "blob.written", "sync a", "blob.synced", f"sync {quick_path.name}", "blob.durable"]
    assert expected == log


def test_events_name_key_and_bytes(quick_path: Path) -> None:
    """Events carry the key and how many bytes they are about."""
    sink = RecordingSink()
    store = LocalStore(quick_path, events=Emitter((sink,), operation="test", rank=0))
    with store.create_blob("a", nbytes=4) as writer:
        writer.write_at(0, memoryview(b"12"))
    found = [(event.name, event.file, event.nbytes) for event in sink.events]
    names = [("blob.created", 4), ("blob.written", 2), ("blob.discarded", None)]
    assert [(f"storage.{name}", "a", nbytes) for name, nbytes in names] == found


def test_deletion_has_an_event(quick_path: Path) -> None:
    """One event for each blob that was there and is deleted."""
    sink = RecordingSink()
    store = LocalStore(quick_path, events=Emitter((sink,), operation="test", rank=0))
    write_blob(store, "a", b"")
    store.delete(("b", "a"))
    assert ["a"] == [event.file for event in sink.events if event.name == "storage.deleted"]


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_killed_before_the_name(quick_path: Path, primitive: Primitive) -> None:
    """A process killed before it publishes leaves only its temporary name, and the next one can create."""
    run_killed_at("create.temporary", quick_path, create_first, primitive=primitive)
    store = LocalStore(quick_path)
    assert keys_below(store, "") == ("a.t1.tmp",)
    store.create("a", b"second", token="t2")
    assert store.read("a", max_nbytes=9) == b"second"


@pytest.mark.parametrize("point", ["create.renamed", "create.durable"])
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_killed_after_the_name(quick_path: Path, primitive: Primitive, point: str) -> None:
    """A process killed after it published has published: the content is whole and the key is taken."""
    run_killed_at(point, quick_path, create_first, primitive=primitive)
    store = LocalStore(quick_path)
    with pytest.raises(BlobExists):
        store.create("a", b"second", token="t2")
    assert store.read("a", max_nbytes=9) == b"first"


@pytest.mark.parametrize("point", ["created", "written", "synced", "durable"])
def test_killed_while_writing_a_blob(quick_path: Path, point: str) -> None:
    """A process killed while it writes leaves one file under the blob's key, which can be deleted and written again."""
    run_killed_at(f"blob.{point}", quick_path, lambda store: write_blob(store, "a", b"first"))
    store = LocalStore(quick_path)
    assert keys_below(store, "") == ("a",)
    store.delete(("a",))
    write_blob(store, "a", b"second")
    assert store.read("a", max_nbytes=9) == b"second"

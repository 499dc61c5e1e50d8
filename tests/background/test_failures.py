"""Asynchronous saves that fail: who raises it, once; nothing half visible; the next save is whole."""

from __future__ import annotations

import errno
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import anyshard
from anyshard import async_saving, background, staged_snapshot
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before, fail
from tests.background import scenes
from tests.background.scenes import SOON_S, contents, is_there, list_threads, make_small, saved_now

FULL = anyshard.StorageFull("no space left", file="data/model", errno=errno.ENOSPC)
DENIED = anyshard.StorageDenied("may not", file="data/model", errno=errno.EACCES)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def broken(url: str, error: BaseException = FULL, verb: Verb = Verb.WRITE_AT, key: str = "*") -> tuple[FaultStore, MemoryStore]:
    """A store that fails, and the place behind it."""
    inner = MemoryStore(url=url)
    return FaultStore(inner, [Rule(verb, key, fail(error), times=99)]), inner


def end(pending: anyshard.PendingSave) -> None:
    """Wait for the end without asking how it was."""
    background.Saver.await_idle(scenes.background().saver, SOON_S)
    assert pending.is_done


Raiser = Callable[[], object]
RAISERS: dict[str, Raiser] = {
    "async_save": lambda: anyshard.async_save(MemoryStore(url="memory:a/step_2"), make_small("b")),
    "save": lambda: anyshard.save(MemoryStore(url="memory:a/step_2"), make_small("b")),
    "wait_all": lambda: anyshard.wait_all(SOON_S),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("raiser", RAISERS)
def test_a_failure_is_raised_once_by_the_next_call(raiser: str, is_first: bool) -> None:
    """What nobody waited for is raised by the next call of any kind; that one saves nothing, the one after it is whole."""
    if not is_first:
        anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))
    store, inner = broken("memory:a/step_1")
    end(anyshard.async_save(store, make_small("a")))
    with pytest.raises(anyshard.StorageFull) as caught:
        RAISERS[raiser]()
    assert (FULL, {}) == (caught.value, inner.snapshot())
    anyshard.wait_all(SOON_S)
    RAISERS[raiser]()
    anyshard.async_save(inner, make_small("c")).committed(SOON_S)
    assert contents(inner) == saved_now(make_small("c"))


def test_a_failure_that_a_wait_has_raised() -> None:
    """A wait raises it as often as it is asked for, and no call raises it then."""
    store, inner = broken("memory:a/step_1")
    pending = anyshard.async_save(store, make_small("a"))
    for wait in (pending.committed, pending.durable, pending.result, pending.committed):
        with pytest.raises(anyshard.StorageFull):
            wait(SOON_S)
    pending.staged(SOON_S)  # which it was
    anyshard.wait_all(SOON_S)
    anyshard.async_save(inner, make_small("b")).committed(SOON_S)
    assert contents(inner) == saved_now(make_small("b"))


def test_wait_all_tells_of_every_failure() -> None:
    """The first failure is raised, the others are notes of it; saves between them are committed."""
    options = anyshard.SaveOptions(max_in_flight=3)
    hold = threading.Event()
    anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))
    failing = broken("memory:a/step_1")[0], broken("memory:a/step_3", DENIED)[0]
    stores: list[Store] = [failing[0], MemoryStore(url="memory:a/step_2"), failing[1]]
    stores[0] = FaultStore(stores[0], [Rule(Verb.LIST, "*", do_before(lambda: hold.wait(SOON_S)))])
    for store in stores:
        anyshard.async_save(store, make_small("a"), options=options)
    hold.set()
    with pytest.raises(anyshard.StorageFull) as caught:
        anyshard.wait_all(SOON_S)
    assert [f"a further save failed: StorageDenied: {DENIED}"] == caught.value.__notes__
    assert is_there(stores[1])
    del caught.value.__notes__


@pytest.mark.parametrize(
    ("verb", "key"),
    [(Verb.LIST, "*"), (Verb.PREPARE, "*"), (Verb.CREATE_BLOB, "*"), (Verb.FINISH, "*"), (Verb.CREATE, "index*")],
)
def test_wherever_storage_fails_nothing_is_left(verb: Verb, key: str, tmp_path: Path) -> None:
    """A failure at any call of the storage is that error; no file is left, and the old checkpoint stays."""
    anyshard.save(tmp_path / "step_1", make_small("old"))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    store = FaultStore(LocalStore(str(tmp_path / "step_1")), [Rule(verb, key, fail(DENIED))])
    pending = anyshard.async_save(store, make_small("new"), overwrite=True)
    with pytest.raises(anyshard.StorageDenied):
        pending.committed(SOON_S)
    assert before == sorted(path.name for path in tmp_path.rglob("*"))
    assert contents(tmp_path / "step_1") == saved_now(make_small("old"))


def test_a_checkpoint_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    """Without overwrite the save fails in the background; the old one stays."""
    anyshard.save(tmp_path / "step_1", make_small("old"))
    pending = anyshard.async_save(tmp_path / "step_1", make_small("new"))
    with pytest.raises(anyshard.CheckpointExists):
        pending.committed(SOON_S)
    assert contents(tmp_path / "step_1") == saved_now(make_small("old"))


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_value_that_cannot_be_saved_is_raised_by_the_call(is_first: bool) -> None:
    """The call raises it with the address, no later call does, and the saves before and after it are whole."""
    before, store = MemoryStore(url="memory:a/step_0"), MemoryStore(url="memory:a/step_1")
    if not is_first:
        anyshard.async_save(before, {**make_small("0"), "x": 1})
    with pytest.raises(anyshard.UnsupportedValue) as caught:
        anyshard.async_save(store, {**make_small("a"), "x": object()})
    assert "x" == caught.value.address
    anyshard.async_save(store, {**make_small("b"), "x": 2}).committed(SOON_S)
    assert {**contents(store)} == saved_now({**make_small("b"), "x": 2})
    assert is_first or is_there(before)


def test_a_stuck_storage_ends_in_time(tmp_path: Path) -> None:
    """A storage that never answers is `StorageStuck` after `timeout_s`, in the background; another place works at once."""
    gate = threading.Event()
    options = anyshard.SaveOptions(timeout_s=0.3)
    stuck = FaultStore(LocalStore(str(tmp_path / "step_1")), [Rule(Verb.WRITE_AT, "*", do_before(gate.wait), times=99)])
    try:
        pending = anyshard.async_save(stuck, make_small("a"), options=options)
        with pytest.raises(anyshard.StorageStuck, match=r"waiting for: .*write data/model/0\.0"):
            pending.committed(SOON_S)
        anyshard.async_save(tmp_path / "step_2", make_small("b")).committed(SOON_S)
    finally:
        gate.set()
    assert contents(tmp_path / "step_2") == saved_now(make_small("b"))
    assert not is_there(LocalStore(str(tmp_path / "step_1")))


class Interrupted:
    """A stateful whose state_dict meets Ctrl-C."""

    def state_dict(self) -> dict[str, object]:
        raise KeyboardInterrupt

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_an_interrupt_within_the_call(is_first: bool) -> None:
    """Ctrl-C in a state_dict leaves the call as Ctrl-C; nothing is stored, no thread stays, and the next save is whole."""
    store = MemoryStore(url="memory:a/step_1")
    if not is_first:
        anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))
    with pytest.raises(KeyboardInterrupt):
        anyshard.async_save(store, {**make_small("a"), "job": Interrupted()})
    anyshard.wait_all(SOON_S)
    assert {} == store.snapshot()
    anyshard.async_save(store, make_small("b")).committed(SOON_S)
    assert contents(store) == saved_now(make_small("b"))


CALL = {module.__file__ for module in (async_saving, staged_snapshot, background)}
PER_ITEM = ("<listcomp>", "counts")  # as many lines as there were saves, so that each try would make the next call longer


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line of this thread in the files of the call."""

    def __init__(self, nth: int) -> None:
        self._nth = nth
        self.num_seen = 0

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, what: str, argument: object) -> Any:
        if frame.f_code.co_filename not in CALL or frame.f_code.co_name in PER_ITEM:
            return None
        # Tracing stops at a `with` before its lock is let go, where no signal can.
        if what == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.num_seen += 1
            if self.num_seen == self._nth:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.slow
@pytest.mark.parametrize(("is_first", "step"), [(True, 3), (False, 2)], ids=["first", "later"])
def test_an_interrupt_at_any_line_of_the_call(is_first: bool, step: int) -> None:
    """Wherever Ctrl-C meets the call, it ends, its save is whole or absent, and the next save is whole."""
    expected, after = saved_now(make_small("a")), saved_now(make_small("b"))
    nth, is_over = 0, False
    while not is_over:
        nth += step
        if is_first:
            scenes.forget_all()
        store, other = MemoryStore(url="memory:a/step_1"), MemoryStore(url="memory:a/step_2")
        interrupt = InterruptAt(nth)
        try:
            with interrupt:
                anyshard.async_save(store, make_small("a"))
        except KeyboardInterrupt:
            pass
        is_over = interrupt.num_seen < nth
        print(nth)
        anyshard.wait_all(SOON_S)
        anyshard.async_save(other, make_small("b")).committed(SOON_S)
        assert after == contents(other)
        assert not is_there(store) or expected == contents(store)
    assert 50 < nth


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system starts no thread, the call says so and how to save all the same; the next one works."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "anyshard-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    store = MemoryStore(url="memory:a/step_1")
    with monkeypatch.context() as patch, pytest.raises(anyshard.LimitExceeded, match=r"or use anyshard\.save"):
        patch.setattr(threading.Thread, "start", refuse)
        anyshard.async_save(store, make_small("a"))
    anyshard.async_save(store, make_small("b")).committed(SOON_S)
    assert contents(store) == saved_now(make_small("b"))


def test_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A failed save is an error in the log when it happens, with the place."""
    store, _ = broken("memory:a/step_1", DENIED)
    pending = anyshard.async_save(store, make_small("a"))
    with pytest.raises(anyshard.StorageDenied):
        pending.committed(SOON_S)
    (record,) = [record for record in caplog.records if record.name == "anyshard.background"]
    assert ("ERROR", True) == (record.levelname, "memory:a/step_1: the asynchronous save failed" in record.message)


def test_threads_and_descriptors_after_thirty_saves(tmp_path: Path) -> None:
    """Thirty saves, every third of which fails, leave as many threads, descriptors and arenas as three do."""
    seen = []
    for number in range(30):
        inner = LocalStore(str(tmp_path / f"step_{number}"))
        store: Store = FaultStore(inner, [Rule(Verb.FINISH, "*", fail(DENIED))]) if number % 3 == 0 else inner
        pending = anyshard.async_save(store, make_small("a"))
        try:
            pending.committed(SOON_S)
        except anyshard.StorageDenied:
            assert 0 == number % 3
        scenes.join_threads()
        seen.append((list_threads(), len(os.listdir("/proc/self/fd")), scenes.background().means.arenas.nbytes))
    assert [seen[2]] * 28 == seen[2:]
    assert ([], 29) == (seen[-1][0], scenes.background().means.arenas.num_hits)

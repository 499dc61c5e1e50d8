"""Ctrl-C at the worst moments of a call: caches stay whole, threads that have begun are waited for, nothing waits for ever."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import anyshard
from anyshard import staged_snapshot
from anyshard.engine.images import ImageLayout
from anyshard.engine.stage import _Views
from anyshard.engine.tiny_rows import TinyRows
from anyshard.staged_snapshot import StagedSnapshot
from anyshard.storage.memory import MemoryStore
from tests.background import scenes
from tests.background.scenes import LAZY, SOON_S, contents, is_there, make_job, make_small, saved_now

NBYTES = [8, 4, 16]
POSITION = [0, 64, 128]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def interrupt_at(nth: int, function: Callable[..., object], act: Callable[[], object]) -> bool:
    """`act`, interrupted at the n-th line of a function; false if that has not so many."""
    left = nth

    def trace(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code is not function.__code__:
            return None
        left -= what == "line"
        if left == 0 and what == "line":
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            act()
    finally:
        sys.settrace(None)
    return left <= 0


def make_layout() -> ImageLayout:
    return ImageLayout((0,), (256,), np.array(POSITION), np.array(NBYTES), 256, ())


# Caches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 6))
def test_tiny_rows(nth: int) -> None:
    """An interrupt while it is found where rows go leaves no half of it: the next copy is whole."""
    memory, source = memoryview(bytearray(256)), np.arange(1, 9, dtype=np.uint32)
    tiny, number, first = TinyRows(make_layout(), memory), np.array([0, 2]), np.array([1])
    address = source.ctypes.data + np.array([0, 8])
    tiny.copy(first, address[:1])
    interrupt_at(nth, TinyRows._lay_out, lambda: tiny.copy(number, address))
    tiny.copy(number, address)
    assert source[:2].tobytes() + source[2:6].tobytes() == bytes(memory[:8]) + bytes(memory[128:144])


@pytest.mark.parametrize("nth", range(1, 4))
def test_views_of_an_arena(nth: int) -> None:
    """Targets and words of rows are those of just these rows, whatever was interrupted before."""
    memory = memoryview(bytearray(256))
    views, fresh, number = _Views(make_layout(), memory), _Views(make_layout(), memory), np.array([2, 0])
    tensors, first = [torch.zeros(4), torch.zeros(2)], np.array([0])
    dtypes = [torch.float32] * 2
    views.find_targets(first, tensors[1:], dtypes=dtypes[1:])
    views.choose_words(first)
    interrupt_at(nth, _Views.find_targets, lambda: views.find_targets(number, tensors, dtypes=dtypes))
    interrupt_at(nth, _Views.choose_words, lambda: views.choose_words(number))
    expected = [target.data_ptr() for target in fresh.find_targets(number, tensors, dtypes=dtypes)]
    assert expected == [target.data_ptr() for target in views.find_targets(number, tensors, dtypes=dtypes)]
    assert repr(fresh.choose_words(number)) == repr(views.choose_words(number))


# Threads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [True, False])
def test_the_start_of_the_copier(has_begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails; a copier that has begun all the same keeps the arena until it has ended; steps wait no more."""
    start, held, gate, used = threading.Thread.start, threading.Event(), threading.Event(), list[object]()
    finish = staged_snapshot.Staging.finish

    def begin(thread: threading.Thread) -> None:
        if thread.name != "anyshard-copy":
            return start(thread)
        if has_begun:
            start(thread)
            assert held.wait(SOON_S)
        raise KeyboardInterrupt

    def hold(staging: staged_snapshot.Staging, check: Callable[[], None]) -> None:
        held.set()
        assert gate.wait(SOON_S)
        used.append(scenes.background().means.arenas.num_hits)
        finish(staging, check)

    model, optimizer = make_job()
    state, store = {"model": model, "optimizer": optimizer}, MemoryStore(url="memory:a/step_1")
    anyshard.async_save(MemoryStore(url="memory:a/step_0"), state, options=LAZY).committed(SOON_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", begin)
        patch.setattr(staged_snapshot.Staging, "finish", hold)
        with pytest.raises(KeyboardInterrupt):
            anyshard.async_save(store, state, options=LAZY)
        jobs = scenes.background().saver.jobs
        gate.set()
        anyshard.wait_all(SOON_S)
    assert (has_begun, False) == (bool(jobs and used), is_there(store))
    optimizer.step()
    anyshard.async_save(store, state, options=LAZY).committed(SOON_S)
    assert contents(store) == saved_now(state)


class Interrupted:
    """A stateful whose state_dict meets Ctrl-C when it is told to."""

    def __init__(self) -> None:
        self.is_armed = False

    def state_dict(self) -> dict[str, object]:
        if self.is_armed:
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_second_interrupt(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C again before the snapshot is given up: the save ends all the same, in time, and the next one is whole."""
    store, options = MemoryStore(url="memory:a/step_1"), anyshard.SaveOptions(timeout_s=0.2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if not is_first:
        anyshard.async_save(MemoryStore(url="memory:a/step_0"), make_small("0")).committed(SOON_S)
    with monkeypatch.context() as patch:
        patch.setattr(staged_snapshot, "_MIN_WAIT_S", 0.2, raising=False)
        patch.setattr(StagedSnapshot, "stage", interrupt)
        patch.setattr(StagedSnapshot, "fail", interrupt)
        with pytest.raises(KeyboardInterrupt):
            anyshard.async_save(store, make_small("a"), options=options)
        anyshard.wait_all(SOON_S)
    assert not is_there(store)
    anyshard.async_save(store, make_small("b")).committed(SOON_S)
    assert contents(store) == saved_now(make_small("b"))

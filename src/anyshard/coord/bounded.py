"""Calls with an end: a key-value store whose server is frozen answers no call, and torch gives its calls no timeout."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from anyshard.coord.protocol import KeyValueStore
from anyshard.errors import KeyValueStoreLost
from anyshard.threads import start_thread

T = TypeVar("T")

_Tasks = SimpleQueue[Callable[[], None] | None]

MAX_ANSWER_S = 30.0  # a key-value store that takes longer for one call is lost

_TURNS = 10  # in which a wait is cut


class Caller:
    """Makes calls one after the other on one thread, so that whoever asks can stop waiting. The thread ends with the object.

    When the interpreter is ending and starts no more threads, calls run on that of whoever asks, who cannot stop then.
    """

    def __init__(self) -> None:
        self._tasks: _Tasks = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        weakref.finalize(self, self._tasks.put, None).atexit = False  # calls made at exit are still served

    def ask(self, call: Callable[[], T], timeout_s: float) -> T:
        """What `call` returns or raises, or `KeyValueStoreLost` after `timeout_s`; the call itself may still happen later."""
        if self._is_closed:
            raise KeyValueStoreLost("expected to ask the key-value store, found that the process ends", {})
        if not self._has_thread():
            return call()
        answers: SimpleQueue[Future[T]] = SimpleQueue()
        self._tasks.put(partial(_answer, call, answers))
        answer = _await(answers, timeout_s)
        if answer is None:
            raise KeyValueStoreLost(
                f"expected an answer of the key-value store within {timeout_s:g} s, found none. The process that holds it (rank "
                "0, or the agent of the launcher) is frozen, dead or cut off",
                {},
            )
        return answer.result()

    def close(self, timeout_s: float) -> None:
        """Make no further call: who asks gets `KeyValueStoreLost`. Returns when none is under way, or after `timeout_s`.

        For the end of the process. Python up to 3.13 ends its daemon threads there as soon as they come back from C, and one that
        comes back from torch then ends the process by a signal.
        """
        self._is_closed = True
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _has_thread(self) -> bool:
        """Whether there is one, which is started by the first call."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=_serve, args=(self._tasks,), name="anyshard-coord", daemon=True)
                self._thread = thread if start_thread(thread) else None
            return self._thread is not None


def _await(answers: SimpleQueue[Future[T]], timeout_s: float) -> Future[T] | None:
    """The answer, in turns: after a time in which this process itself was frozen, the store still has the turns that are left."""
    for _ in range(_TURNS):
        with suppress(Empty):
            return answers.get(timeout=timeout_s / _TURNS)
    return None


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()


def _answer(call: Callable[[], T], answers: SimpleQueue[Future[T]]) -> None:
    answer: Future[T] = Future()
    try:
        answer.set_result(call())
    except Exception as error:  # noqa: BLE001 - the border of a thread: whoever asked raises it
        answer.set_exception(error)
    answers.put(answer)


class BoundedKeyValueStore:
    """A `KeyValueStore` that passes every verb to `store` on the caller's thread and gives up after `timeout_s`."""

    def __init__(self, store: KeyValueStore, caller: Caller, *, timeout_s: float) -> None:
        self._store = store
        self._caller = caller
        self._timeout_s = timeout_s

    @property
    def can_hang(self) -> bool:
        """Never longer than the timeout."""
        return False

    def set(self, key: str, value: bytes) -> None:
        """As the store."""
        self._ask(partial(self._store.set, key, value))

    def get(self, key: str) -> bytes | None:
        """As the store."""
        return self._ask(partial(self._store.get, key))

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        """As the store."""
        return self._ask(partial(self._store.get_many, keys))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """As the store."""
        return self._ask(partial(self._store.set_if_absent, key, value))

    def delete(self, key: str) -> None:
        """As the store."""
        self._ask(partial(self._store.delete, key))

    def clone(self) -> BoundedKeyValueStore:
        """A clone of the store, with a thread of its own."""
        return BoundedKeyValueStore(self._ask(self._store.clone), Caller(), timeout_s=self._timeout_s)

    def _ask(self, call: Callable[[], T]) -> T:
        return self._caller.ask(call, self._timeout_s)

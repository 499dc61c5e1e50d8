"""Actors that run one store call at a time, when they are told to: any interleaving of writers and cleaners, without any luck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from anyshard.errors import AnyshardError
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, WrapperStore

T = TypeVar("T")

WAIT_S = 60.0


class Died(BaseException):
    """The actor's process is gone; no handler of the code under test may keep it."""


class Actor(WrapperStore):
    """A thread that acts on a store and stops before each call; `outcome` is what it returned, or its error, when it is done."""

    def __init__(self, inner: Store, act: Callable[[Store], object]) -> None:
        super().__init__(inner)
        self.outcome: object = None
        self.is_done = False
        self._is_dead = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()
        assert self._stopped.acquire(timeout=WAIT_S)

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Stop until told to go on, then do the call."""
        self._stop()
        return run()

    def step(self) -> None:
        """Let it do its next call, and run up to the one after that or to its end."""
        if not self.is_done:
            self._go.release()
            assert self._stopped.acquire(timeout=WAIT_S)

    def kill(self) -> None:
        """End it before its next call."""
        self._is_dead = True
        while not self.is_done:
            self.step()

    def _run(self, act: Callable[[Store], object]) -> None:
        try:
            self.outcome = act(self)
        except (AnyshardError, Died) as error:
            self.outcome = error
        self.is_done = True
        self._stopped.release()

    def _stop(self) -> None:
        if not self._is_dead:
            self._stopped.release()
            assert self._go.acquire(timeout=WAIT_S)
        if self._is_dead:
            raise Died

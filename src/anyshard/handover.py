"""Handovers: a value that one thread gives to others, who wait for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar, final

from anyshard.engine.bell import Bell
from anyshard.errors import StillPending

T = TypeVar("T")

_POLL_S = 0.05
_MAX_WAITERS = 4  # that are woken at once: the saver, and steps of optimizers, each of which costs training what it waits


def _go_on() -> None:
    pass


@final
class Handover(Generic[T]):
    """A value that one thread gives to another one, or the error that it got instead."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_there = False
        self._bell = Bell()

    @property
    def is_there(self) -> bool:
        """Whether it was given, or failed."""
        return self._is_there

    def give(self, value: T) -> None:
        """Give it, once."""
        self._value = value
        self._settle()

    def fail(self, error: BaseException) -> None:
        """Say that it will not come; too late after `give`."""
        if not self._is_there:
            self._error = error
            self._settle()

    def settle(self, timeout_s: float = math.inf) -> bool:
        """Return once it was given or has failed; false if neither came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._is_there:
            if time.monotonic() >= deadline:
                return False
            self._bell.wait(_POLL_S)
        return True

    def receive(self, what: str, timeout_s: float, *, check: Callable[[], None] = _go_on) -> T:
        """The value, or the error raised, or `StillPending` after `timeout_s`; `check` is called while that takes long."""
        deadline = time.monotonic() + timeout_s
        while not self._is_there:
            if time.monotonic() >= deadline:
                raise StillPending(f"expected {what} from another thread within {timeout_s:g} s, found that it did not come")
            check()
            self._bell.wait(_POLL_S)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # given

    def drop(self) -> None:
        """Forget the value, which holds memory, and the error, whose frames do."""
        self._value = self._error = None

    def _settle(self) -> None:
        self._is_there = True
        for _ in range(_MAX_WAITERS):
            self._bell.ring()

"""Signals seen by another thread than the main one, which may sit in a collective where no handler of Python's runs.

Knows processes and file descriptors, nothing of runs and ranks.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final, TypeAlias, final

logger = logging.getLogger(__name__)

_WAKE: Final = b"\0"  # no signal has this number
_AT_ONCE: Final = 4096
_UNHANDLED: Final = (signal.SIG_DFL, signal.SIG_IGN)
_FORKER: Final = "multiprocessing.popen_fork"  # the module that forks for multiprocessing

Numbers: TypeAlias = Sequence[int]
_Disposition: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


@final
class _Handler:
    """What Python calls on the main thread, for one signal: it wakes the tap, then calls what was there before."""

    def __init__(self, previous: _Disposition, note: Callable[[int], None]) -> None:
        self.previous = previous
        self.is_over = False
        self._note = note

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_over:
            self._note(number)
        # Python's own for Ctrl-C would end the loop, which the default of any other signal does not do here either.
        if callable(self.previous) and (self.is_over or self.previous is not signal.default_int_handler):
            self.previous(number, frame)


@final
class SignalTap:
    """Hears signals of this process from `install` to `remove`; what was there before goes on hearing them too.

    `install`, `keep` and `remove` are for the main thread, `wait` for one thread of its own, `wake` and `lapse` for any. A fork
    hears nothing and has the handlers of before.
    """

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = tuple(numbers)
        self._reading = self._writing = -1
        self._handlers: dict[int, _Handler] = {}
        self._other = _Descriptor(-1)  # the one that the interpreter wrote to before
        self._is_installed = False
        self.is_left = False  # this is a fork of a process in which it was installed

    @property
    def is_hearing(self) -> bool:
        """Whether there is still something to put back."""
        return bool(self._handlers)

    def install(self) -> None:
        """Put the handlers in. On another thread than the main one there must be no numbers to hear."""
        self._reading, self._writing = os.pipe()
        self._is_installed = True
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        _forks().taps.add(self)
        if not self.numbers:
            return
        self._other = _Descriptor(signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False))
        for number in self.numbers:
            previous = signal.getsignal(number)
            if previous is None:
                logger.warning("signal %d: its handler is not Python's; it is not called, and not put back later", number)
            self._handlers[number] = _Handler(previous, self._note)
            signal.signal(number, self._handlers[number])

    def keep(self) -> None:
        """Take the wakeup descriptor back if another library has taken it since (asyncio does), which goes on hearing."""
        if self._handlers:
            current = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            if current != self._writing:
                self._other = _Descriptor(current)

    def wait(self, timeout_s: float | None) -> tuple[int, ...]:
        """The signals that have come since the last time; returns early at `wake`."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        with suppress(BlockingIOError):
            data = os.read(self._reading, _AT_ONCE)
            numbers = tuple(number for number in data if number in self.numbers)
            self._other.write(bytes(number for number in data if number))
            return numbers
        return ()

    def wake(self) -> None:
        """Let `wait` return."""
        with suppress(OSError):  # full: then it returns anyway. Closed: nobody waits any more
            os.write(self._writing, _WAKE)

    def remove(self) -> None:
        """Put back what was there before, unless something else is there by now. Again is nothing."""
        if not self._is_installed:
            return
        _forks().taps.discard(self)
        self._put_back_descriptor()
        self._put_back_handlers()
        self._close()

    def lapse(self) -> None:
        """From any thread, without waiting: let signals do what they did before. `remove` may come later, or never."""
        if is_main_thread():
            self._put_back_descriptor()
            self._put_back_handlers()
            return
        for number, handler in tuple(self._handlers.items()):
            handler.is_over = True
            before = _find_living(handler.previous)
            if before in _UNHANDLED and signal.getsignal(number) is handler:
                _set_disposition(number, before)  # Python's own way is for the main thread

    def __del__(self) -> None:
        """Close what a tap that has lapsed has left; who wakes or waits has a reference, so nobody does."""
        if self._is_installed and not self._handlers:
            self._close()

    def leave_in_child(self) -> None:
        """In a fork, which shares the descriptors: be as if there had been no tap."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
        self.is_left = True
        self._put_back_handlers()
        self._close()

    def _put_back_descriptor(self) -> None:
        if self._handlers:
            current = signal.set_wakeup_fd(-1)
            if current == self._writing:
                current = self._other.number if self._other.is_open else -1
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _put_back_handlers(self) -> None:
        for number, handler in self._handlers.items():
            handler.is_over = True
            before = _find_living(handler.previous)
            if signal.getsignal(number) is handler:
                signal.signal(number, before)
        self._handlers = {}

    def _close(self) -> None:
        self._is_installed = False
        for end in (self._reading, self._writing):
            os.close(end)
        self._reading = self._writing = -1

    def _note(self, number: int) -> None:
        with suppress(OSError):
            os.write(self._writing, bytes((number,)))


@final
class _Descriptor:
    """A descriptor of another owner, who may close it, and whose number may then be that of something else."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = self._identify()

    @property
    def is_open(self) -> bool:
        """Whether it is still the same file, as far as can be seen."""
        return self._identity is not None and self._identify() == self._identity

    def write(self, data: bytes) -> None:
        """Write if it is open; what it does not take at once is dropped, as the interpreter does."""
        if data and self.is_open:
            with suppress(OSError):
                os.write(self.number, data)

    def _identify(self) -> tuple[int, int] | None:
        if self.number < 0:
            return None
        try:
            status = os.fstat(self.number)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def is_main_thread() -> bool:
    """Whether this thread may set handlers."""
    return threading.current_thread() is threading.main_thread()


def end_by(number: int) -> None:
    """End this process by a signal's default, from any thread, at once: the main one may be where no handler of Python's runs."""
    _set_disposition(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)  # at this thread


def _set_disposition(number: int, disposition: int) -> None:
    """What the process does at a signal, behind the back of the interpreter, which lets only the main thread set it."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, int(disposition))


def _find_living(disposition: Any) -> Any:  # as Python itself types them
    """What a handler stands for, if that is one of a tap that was removed while another was in place."""
    if isinstance(disposition, _Handler) and disposition.is_over:
        return _find_living(disposition.previous)
    return signal.SIG_DFL if disposition is None else disposition


@final
class _Forks:
    """The installed taps of this process, which its forks must leave. No signal comes in the midst of that."""

    def __init__(self) -> None:
        self.taps: weakref.WeakSet[SignalTap] = weakref.WeakSet()
        self._masks = threading.local()  # of threads that fork

    def prepare(self) -> None:
        """Before a fork: let this thread take no signal that a tap hears."""
        numbers = {number for tap in tuple(self.taps) for number in tap.numbers}
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def go_on(self) -> None:
        """After it, in the parent."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def leave(self) -> None:
        """After it, in the child. One of multiprocessing goes on taking no signal: `data_workers` says what it does then."""
        for tap in tuple(self.taps):
            tap.leave_in_child()
        self.taps.clear()
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") != _FORKER:
            frame = frame.f_back
        if frame is None:
            self.go_on()


@functools.cache
def _forks() -> _Forks:
    """Those of this process: Python can be told once whom to call, and never be told otherwise."""
    forks = _Forks()
    os.register_at_fork(before=forks.prepare, after_in_parent=forks.go_on, after_in_child=forks.leave)
    return forks

"""Faults by table: which call of which verb on which keys goes wrong, and how."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from anyshard.errors import StorageError
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

T = TypeVar("T")

# (the call, how to do it): what happens instead. May run the call, change its buffer or result, raise.
Action = Callable[[Call, Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls `nth` to `nth + times - 1` (from 1) of `verb` on keys that match the glob go wrong; `*` in it matches `/` too."""

    verb: Verb
    key: str
    action: Action
    nth: int = 1
    times: int = 1

    def matches(self, call: Call) -> bool:
        """Whether this call is counted."""
        return call.verb == self.verb and fnmatchcase(call.key, self.key)


class FaultStore(WrapperStore):
    """A store that follows a table of rules; `fired` lists the calls that went wrong, so that a test can prove that they did."""

    def __init__(self, inner: Store, rules: Sequence[Rule]) -> None:
        super().__init__(inner)
        self._rules = tuple(rules)
        self._seen = [0] * len(self._rules)
        self._fired: list[Call] = []
        self._lock = threading.Lock()

    @property
    def fired(self) -> tuple[Call, ...]:
        """The calls that went wrong so far, in order."""
        with self._lock:
            return tuple(self._fired)

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call, or what the first rule that fires says."""
        action = self._fire(call)
        if action is None:
            return run()
        result: T = action(call, run)
        return result

    def _fire(self, call: Call) -> Action | None:
        action: Action | None = None
        with self._lock:
            for number, rule in enumerate(self._rules):
                if rule.matches(call):
                    self._seen[number] += 1
                    if action is None and rule.nth <= self._seen[number] < rule.nth + rule.times:
                        action = rule.action
            if action is not None:
                self._fired.append(call)
        return action


def fail(error: BaseException) -> Action:
    """The call fails and nothing is done."""

    def act(_call: Call, _run: Callable[[], Any]) -> Any:
        raise error

    return act


def lose_answer(error: BaseException) -> Action:
    """The call is done, but its answer is lost: the caller sees `error`."""

    def act(_call: Call, run: Callable[[], Any]) -> Any:
        run()
        raise error

    return act


def answer(value: object) -> Action:
    """The call is not done and gives `value`."""

    def act(_call: Call, _run: Callable[[], Any]) -> Any:
        return value

    return act


def flip_bit(bit: int) -> Action:
    """The call is done; one bit of what it read is wrong. Bits beyond the end wrap around."""

    def act(call: Call, run: Callable[[], Any]) -> Any:
        result = run()
        if call.buffer is not None:
            _flip(call.buffer.cast("B"), bit)
            return result
        data = bytearray(result)
        _flip(memoryview(data), bit)
        return bytes(data)

    return act


def read_short(missing: int) -> Action:
    """A `read` gives `missing` bytes less; a `read_into` fails as on a blob that was cut there, with its buffer changed."""

    def act(call: Call, run: Callable[[], Any]) -> Any:
        result = run()
        if call.buffer is None:
            return result[: max(len(result) - missing, 0)]
        raise StorageError(
            f"{call.key}: expected {call.nbytes} bytes at {call.position}, found {max(call.nbytes - missing, 0)}", file=call.key
        )

    return act


def do_before(step: Callable[[], object]) -> Action:
    """`step` is done first, then the call: to block, to delete behind the caller's back, to stop the process."""

    def act(_call: Call, run: Callable[[], Any]) -> Any:
        step()
        return run()

    return act


def _flip(data: memoryview, bit: int) -> None:
    bit %= len(data) * 8
    data[bit // 8] ^= 1 << (bit % 8)

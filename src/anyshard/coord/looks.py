"""Waiting by looking: a wait is a row of short looks at the key-value store with growing pauses, and has an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anyshard.errors import InvalidOption

_MIN_PAUSE_S = 0.0005
_RARELY_S = 1.0  # how soon a rank in the midst of its work hears that another one has failed
_MAX_PAUSE_S = 0.5  # how soon a failure elsewhere is seen
_PAUSE_S_PER_RANK = 20e-6  # thousands of ranks share one store, which takes about 50,000 looks a second
_PAUSES_PER_WAIT = 20  # a wait is at most a twentieth longer than it had to be


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a rank waits for others in one phase: a log line every `report_s`, an error after `timeout_s`."""

    timeout_s: float = 1800.0
    report_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or not self.report_s > 0:
            raise InvalidOption(f"patience: expected seconds above 0, found {self}")


def looks(patience: Patience, *, num_ranks: int) -> Iterator[float]:
    """Yield the seconds waited, ever more rarely, for one look each; the last look is at the deadline."""
    began_s = time.monotonic()
    while True:
        looked_s = time.monotonic() - began_s
        yield looked_s
        if looked_s >= patience.timeout_s:
            return
        waited_s = time.monotonic() - began_s
        time.sleep(max(0.0, min(find_pause_s(waited_s, num_ranks=num_ranks), patience.timeout_s - waited_s)))


def find_pause_s(waited_s: float, *, num_ranks: int) -> float:
    """How long to pause before the next look, of as many ranks, for what has been awaited for so long."""
    return min(max(_MIN_PAUSE_S, _PAUSE_S_PER_RANK * num_ranks, waited_s / _PAUSES_PER_WAIT), _MAX_PAUSE_S)


class Every:
    """Says at which looks a period is over."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_s = period_s

    def is_due(self, waited_s: float) -> bool:
        """Whether `waited_s` lies in a new period."""
        if waited_s < self._next_s:
            return False
        self._next_s = waited_s + self._period_s
        return True


class Rarely:
    """Calls `act` when it is called, but only once per period: a look at the key-value store costs more than a small work."""

    def __init__(self, act: Callable[[], None], *, period_s: float = _RARELY_S) -> None:
        self._act = act
        self._period_s = period_s
        self._next_s = 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self._next_s:
            self._act()
            self._next_s = time.monotonic() + self._period_s

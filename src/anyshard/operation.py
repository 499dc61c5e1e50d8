"""One operation: the store it works on, the ranks that take part, how it is named in events. Made once per call and passed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from anyshard.coord.agreement import Agreement
from anyshard.coord.group import Group
from anyshard.coord.looks import Patience
from anyshard.monitor.events import Emitter
from anyshard.storage.protocol import Store

# A rank whose storage is stuck gives up after the same time as those that wait for it, and shall still be heard.
_LAST_WORD_S = 30.0

_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Operation:
    """What a save and a load have in common."""

    store: Store
    group: Group
    events: Emitter
    started_s: float = field(default_factory=time.perf_counter)

    def describe(self, what: str) -> str:
        """What the operation is called on all its ranks, in messages: of a part of the job, with the numbers of its ranks."""
        ranks = self.group.ranks
        if ranks == tuple(range(len(ranks))):
            return f"{what} {self.store.url}"
        shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
        return f"{what} {self.store.url} by ranks {shown} of the job (below, a difference between ranks counts them from 0)"

    @property
    def duration_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started_s

    @contextmanager
    def phase(self, agreement: Agreement, name: str, *, nbytes: int | None = None) -> Iterator[None]:
        """Work of this rank for a save: an error of it is the failure of this phase on all ranks, and it is a span of events."""
        with agreement.phase(name), self.events.span(f"save.{name}", nbytes=nbytes):
            yield

    def agree(self, subject: str, *, timeout_s: float, is_made_once: bool = False) -> Agreement:
        """Begin to agree with the other ranks, each of which waits up to `timeout_s` for its storage; see `Group.agree`."""
        return self.group.agree(subject, patience=patience_with_ranks(timeout_s), is_made_once=is_made_once)


def patience_with_ranks(timeout_s: float) -> Patience:
    """How long a rank waits for the others, each of which waits up to `timeout_s` for its storage."""
    return Patience(timeout_s + min(timeout_s / 2, _LAST_WORD_S))

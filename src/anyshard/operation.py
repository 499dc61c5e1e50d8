"""One operation: the store it works on, how it is named in events, and when it began. Made once per call and passed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from anyshard.monitor.events import Emitter
from anyshard.storage.protocol import Store


@dataclass(frozen=True, slots=True)
class Operation:
    """What a save and a load have in common."""

    store: Store
    events: Emitter
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def duration_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started_s

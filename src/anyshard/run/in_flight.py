"""The saves of one Run that are under way, as this rank has begun them."""

from __future__ import annotations

import logging
import time
from typing import final

from anyshard.errors import AnyshardError
from anyshard.pending import PendingSave

logger = logging.getLogger(__name__)


@final
class InFlight:
    """Asynchronous saves that are not known to be committed, and which step was saved last in either way."""

    def __init__(self) -> None:
        self._pending: list[PendingSave] = []
        self._last: tuple[int, PendingSave | None] | None = None

    @property
    def is_any(self) -> bool:
        """Whether a save is under way now."""
        return any(not one.is_done for one in self._pending)

    @property
    def last_step(self) -> int | None:
        """The step that was saved last, or is being saved."""
        return None if self._last is None else self._last[0]

    def add(self, step: int, pending: PendingSave | None) -> None:
        """A step was saved, or (with a handle) is being saved."""
        self._last = step, pending
        if pending is not None:
            self._pending = [*(one for one in self._pending if not one.is_committed), pending]

    def forget_last(self) -> None:
        """Another step was loaded, so that any may be saved again."""
        self._last = None

    def forget_failed(self) -> None:
        """A call has raised what saves have failed with."""
        self._pending = [one for one in self._pending if not one.is_done]

    def has_saved(self, step: int) -> bool:
        """Whether the last save was of this step, and is committed."""
        return self._last is not None and self._last[0] == step and (self._last[1] is None or self._last[1].is_committed)

    def settle(self, timeout_s: float) -> bool:
        """Wait for all of them, so long in all; false if some go on. Failures are only logged, and raised by no later call."""
        pending = self._await_all(timeout_s)
        for one in pending:
            try:
                one.committed(0)
            except AnyshardError as error:
                logger.warning("%s: before the last save of the run: %s", one.url, error)
        return all(one.is_done for one in pending)

    def finish(self, timeout_s: float) -> None:
        """Wait for all of them, then raise what the first has failed with of which nobody was told, or that it goes on."""
        for one in self._await_all(timeout_s):
            if not one.is_committed and (not one.is_done or one.take_failure()):
                one.committed(0)

    def _await_all(self, timeout_s: float) -> list[PendingSave]:
        """All of them, which are none of these any more, once they have ended or the time is over."""
        pending, self._pending = self._pending, []
        deadline = time.monotonic() + timeout_s
        for one in pending:
            one.wait_ended(max(0.0, deadline - time.monotonic()))
        return pending

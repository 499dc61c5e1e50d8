"""The keeper: one thread of a run that applies retention after saves, so that no save waits for a slow delete."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, final

from anyshard.engine.bell import Bell
from anyshard.threads import start_thread, yield_to_training

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class Ending(Protocol):
    """A save that goes on, as far as the keeper cares: when it is over."""

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Return once it is over, committed or failed; false if it is not within `timeout_s`. Raises no failure of it."""
        ...

    @property
    def is_committed(self) -> bool:
        """Whether it has made a step, once it is over."""
        ...


@final
class Keeper:
    """Calls `prune` after each save for which it was asked; requests that come meanwhile are served by one further call.

    The thread is a daemon that lives while there is something to do: a pass may be cut off by the end of the process, and the
    next one finishes it. What `prune` raises is logged and never reaches a save. `prune` is called on that thread only.
    """

    def __init__(self, prune: Callable[[], object]) -> None:
        self._prune = prune
        self._requests: deque[Ending | None] = deque()
        self._thread: threading.Thread | None = None
        self._deadline_s: float | None = None  # once it is closed
        self._lock = threading.Lock()
        self._bell = Bell()

    def request(self, pending: Ending | None = None) -> None:
        """Have a pass made soon, once this pending save is committed; returns at once. Nothing if it fails, or after `close`."""
        with self._lock:
            if self._deadline_s is not None:
                return
            self._requests.append(pending)
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._work, name="anyshard-keeper", daemon=True)
        try:
            is_started = start_thread(thread)
        except RuntimeError:
            logger.warning("no thread could be started for retention; it is made up for after a later save", exc_info=True)
            is_started = False
        if not is_started:  # or the interpreter is ending: the next run of the job prunes
            with self._lock:
                self._thread = None
                self._requests.clear()

    def close(self, timeout_s: float) -> bool:
        """Take no further request and let those that are there be served; false if that has not ended within `timeout_s`.

        Then what it is at may still go on in the background, but no further pass begins.
        """
        with self._lock:
            self._deadline_s = deadline_s = time.monotonic() + timeout_s
        while (is_busy := self._is_busy()) and (left_s := deadline_s - time.monotonic()) > 0:
            self._bell.wait(min(left_s, _POLL_S))
        return not is_busy

    def _is_busy(self) -> bool:
        with self._lock:
            return self._thread is not None

    def _work(self) -> None:
        yield_to_training()
        while self._take():
            try:
                self._prune()
            except Exception:
                logger.exception("retention failed; nothing of it is lost, a pass after a later save goes on with it")
        self._bell.ring()

    def _take(self) -> bool:
        """Wait for the first save that was announced and drop all requests that are met by one pass now; false: no more to do.

        A save that has failed asks for none: nothing has taken the place of what is there.
        """
        while True:
            with self._lock:
                if not self._requests or self._is_late():
                    self._requests.clear()
                    self._thread = None
                    return False
                first = self._requests[0]
            if first is not None and not first.wait_ended(_POLL_S):
                continue
            with self._lock:
                ended = [one for one in self._requests if one is None or one.wait_ended(0)]
                self._requests = deque(one for one in self._requests if one not in ended)
            if any(one is None or one.is_committed for one in ended):
                return True

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

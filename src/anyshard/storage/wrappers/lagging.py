"""Lag: a store that shows what was just made only after a while, as listings of some object stores and caches of mounts do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from anyshard.errors import BlobNotFound
from anyshard.storage.protocol import Listing, Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

T = TypeVar("T")

_MAKING = frozenset({Verb.CREATE, Verb.PUT, Verb.FINISH})
_READING = frozenset({Verb.READ, Verb.OPEN_BLOB})


class LaggingStore(WrapperStore):
    """A store that lists a key `listing_s` and reads it `reads_s` after it was made through this object, by `clock`.

    Whoever shares the object sees the same lag; what is made through another one is seen at once, as on another host.
    """

    def __init__(
        self, inner: Store, *, listing_s: float = 0.0, reads_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._listing_s = listing_s
        self._reads_s = reads_s
        self._clock = clock
        self._made_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call; note what it made, and find nothing under a key that is too new to be read."""
        if call.verb in _READING and self._is_younger(call.key, self._reads_s):
            raise BlobNotFound(f"expected a blob at {self.url}/{call.key}, found nothing yet (a lag for tests)", file=call.key)
        result = run()
        if call.verb in _MAKING:
            with self._lock:
                self._made_s.setdefault(call.key, self._clock())
        elif call.verb is Verb.DELETE:
            with self._lock:
                self._made_s.pop(call.key, None)
        return result

    def list(self, prefix: str) -> Listing:
        """Forward; without the keys that are too new, and without the prefixes below which there are only such."""
        found = super().list(prefix)
        entries = tuple(entry for entry in found.entries if not self._is_younger(entry.key, self._listing_s))
        return Listing(entries, tuple(below for below in found.prefixes if self._is_listed(below)))

    def _is_listed(self, prefix: str) -> bool:
        nothing = Listing((), ())
        return self.list(prefix) != nothing or self.inner.list(prefix) == nothing  # an empty directory

    def _is_younger(self, key: str, age_s: float) -> bool:
        with self._lock:
            made_s = self._made_s.get(key)
        return made_s is not None and self._clock() - made_s < age_s

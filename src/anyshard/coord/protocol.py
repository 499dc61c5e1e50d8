"""The KeyValueStore protocol: the small rendezvous store through which ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_VALUE_NBYTES = 4 << 20  # torch's TCPStore drops the connection at more than 8 MiB


class KeyValueStore(Protocol):
    """Keys and values that all ranks of a job see. No verb waits for another rank, so that nobody has to be interrupted.

    Keys are ASCII letters, digits and `/ . _ -`, begin with a letter and have at most 200 characters. Values have between 1 and
    `MAX_VALUE_NBYTES` bytes. What one object writes, others see in the same order. A store that does not answer any more is
    `KeyValueStoreLost`. One thread at a time may use an object; another thread takes a `clone`.
    """

    @property
    def can_hang(self) -> bool:
        """Whether a verb may not come back when another process or a network is broken."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, whatever was there."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value under `key`, or None if there is none now."""
        ...

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        """The values under `keys`, each as of `get`, not necessarily of one moment."""
        ...

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Store `value` if the key has none, atomically, and return what is stored now: of several callers one wins."""
        ...

    def delete(self, key: str) -> None:
        """Forget the key; one that is not there is passed over."""
        ...

    def clone(self) -> KeyValueStore:
        """The same store through a connection of its own."""
        ...

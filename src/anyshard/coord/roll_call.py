"""The roll call: how the ranks of a group find each other, and nobody takes the keys of a dead job for those of this one.

The key-value store may be older than the job (an agent keeps it over restarts). So each rank says hello with a nonce of its
process, the coordinator welcomes the nonce into an incarnation, a random name in the keys of everything that follows, and the
rank accepts. A welcome that answers another nonce is of a former job, and is not taken.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from anyshard.coord.keys import GroupKeys
from anyshard.coord.looks import Patience, looks
from anyshard.coord.members import Members
from anyshard.coord.protocol import KeyValueStore


@dataclass(frozen=True, slots=True)
class Welcome:
    """The incarnation that a rank belongs to, and the first operation that it may take part in."""

    incarnation: str
    sequence: int


class Host:
    """The coordinator's part: it knows whom it has welcomed."""

    def __init__(self, members: Members, keys: GroupKeys) -> None:
        self._keys = keys
        self._nonces: dict[int, str] = {}
        self._absent = set(members.others)
        self.incarnation = secrets.token_hex(8)

    def welcome(self, store: KeyValueStore, ranks: tuple[int, ...], *, sequence: int) -> None:
        """Welcome those of `ranks` that have come, or come again as new processes, since the last time."""
        for rank, hello in zip(ranks, store.get_many([self._keys.hello(rank) for rank in ranks]), strict=True):
            nonce = None if hello is None else hello.decode("ascii")
            if nonce is not None and nonce != self._nonces.get(rank):
                record = {"incarnation": self.incarnation, "sequence": sequence, "nonce": nonce}
                store.set(self._keys.welcome(rank), json.dumps(record).encode("ascii"))
                self._nonces[rank] = nonce

    def find_absent(self, store: KeyValueStore, *, sequence: int) -> tuple[int, ...]:
        """Who has not accepted by now, of those who never had before; whoever came meanwhile is welcomed. Does not wait."""
        absent = tuple(sorted(self._absent))
        self.welcome(store, absent, sequence=sequence)
        answers = store.get_many([self._keys.accepted(rank) for rank in absent])
        mine = self.incarnation.encode("ascii")
        self._absent -= {rank for rank, answer in zip(absent, answers, strict=True) if answer == mine}
        return tuple(sorted(self._absent))


class Guest:
    """Every other rank's part."""

    def __init__(self, members: Members, keys: GroupKeys) -> None:
        self._members = members
        self._keys = keys
        self._nonce = secrets.token_hex(8)
        self._has_come = False
        self._welcome: Welcome | None = None

    def join(self, store: KeyValueStore, patience: Patience) -> Welcome | None:
        """The newest welcome, waited for the first time only; None if the coordinator did not come by the deadline."""
        if not self._has_come:
            store.set(self._keys.hello(self._members.rank), self._nonce.encode("ascii"))
            self._has_come = True
        for _ in looks(patience, num_ranks=self._members.size):
            welcome = self._read(store) or self._welcome
            if welcome is not None:
                return self._accept(store, welcome)
        return None

    def _read(self, store: KeyValueStore) -> Welcome | None:
        data = store.get(self._keys.welcome(self._members.rank))
        record = {} if data is None else json.loads(data)
        return Welcome(record["incarnation"], record["sequence"]) if record.get("nonce") == self._nonce else None

    def _accept(self, store: KeyValueStore, welcome: Welcome) -> Welcome:
        if welcome != self._welcome:
            store.set(self._keys.accepted(self._members.rank), welcome.incarnation.encode("ascii"))
            self._welcome = welcome
        return welcome

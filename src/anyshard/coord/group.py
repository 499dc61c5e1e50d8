"""The group: the ranks that save or load together, and the row of operations on which they agree."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial

from anyshard.coord.agreement import Agreement
from anyshard.coord.bounded import BoundedKeyValueStore, Caller
from anyshard.coord.keys import OperationKeys, keys_of_group
from anyshard.coord.looks import Patience, looks
from anyshard.coord.members import COORDINATOR, Members
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.protocol import KeyValueStore
from anyshard.coord.roll_call import Guest, Host
from anyshard.coord.verdict import Verdict, decode_verdict, give_up_on
from anyshard.coord.watch import Terms

_KEPT = 2  # operations whose keys stay for ranks that are late
_GRACE_S = 1.0  # for a rank that others have given up for missing
_MAX_ANSWER_S = 30.0  # a key-value store that takes longer for one call is lost


class Group:
    """The ranks that take part in one operation after the other; made once per process and kept.

    `rank` counts within the group, `ranks` gives the numbers in the job. All ranks make the same calls of `agree` in the same
    order, one thread at a time; an agreement may then live on in another thread. Rank 0 of the group is the coordinator.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], store: KeyValueStore) -> None:
        self._members = Members(rank, ranks)
        self._keys = keys_of_group(ranks)
        self._store = store
        self._caller = Caller()
        self._host = Host(self._members, self._keys)
        self._guest = Guest(self._members, self._keys)
        self._incarnation = self._host.incarnation if self.is_coordinator else ""
        self._next = 1
        self._ended: list[tuple[int, tuple[str, ...]]] = []

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._members.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' numbers in the job."""
        return self._members.ranks

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return self._members.size

    @property
    def is_coordinator(self) -> bool:
        """Whether this process makes the global decisions."""
        return self._members.is_coordinator

    def agree(self, subject: str, *, patience: Patience | None = None) -> Agreement:
        """Begin the operation that all ranks call `subject` (a line for messages, the same on every rank).

        Returns without waiting for anybody, but for the roll call before the first operation: `RankMissing` if it fails. Raises
        the failure of the operation if the others have given it up before this rank came.
        """
        patience = patience or Patience()
        store = self._bound(patience)
        if not self.is_coordinator:
            self._join(store, subject, patience)
        sequence, verdict = self._find_or_await_operation(store, subject, patience)
        self._next = sequence + 1
        self._forget(store, sequence)
        terms = Terms(self._members, store, self._keys_of(sequence), subject, patience)
        agreement = Agreement(terms, admit=partial(self._admit, store, sequence), end=partial(self._note_end, sequence))
        with ExitStack() as stack:
            stack.enter_context(agreement)
            agreement.begin(verdict)
            if self.is_coordinator:
                agreement.call_roll(partial(self._host.find_absent, store, sequence=sequence))
            stack.pop_all()
        return agreement

    def _bound(self, patience: Patience) -> KeyValueStore:
        if not self._store.can_hang:
            return self._store
        return BoundedKeyValueStore(self._store, self._caller, timeout_s=min(_MAX_ANSWER_S, patience.timeout_s))

    def _keys_of(self, sequence: int) -> OperationKeys:
        return self._keys.of_operation(self._incarnation, sequence)

    def _join(self, store: KeyValueStore, subject: str, patience: Patience) -> None:
        welcome = self._guest.join(store, patience)
        if welcome is None:
            coordinator = (self.ranks[COORDINATOR],)
            raise give_up_on(subject, "begin", coordinator, timeout_s=patience.timeout_s).error(self.size)
        if welcome.incarnation != self._incarnation:
            self._incarnation, self._next = welcome.incarnation, welcome.sequence
            self._forget(store, None)

    def _find_or_await_operation(self, store: KeyValueStore, subject: str, patience: Patience) -> tuple[int, Verdict | None]:
        """As `_find_operation`. But others that gave up for want of this rank may be trying again just now."""
        found = self._find_operation(store, subject)
        is_missed = found[1] is not None and self._members.job_rank in found[1].failures
        if is_missed and not self.is_coordinator:  # the coordinator could not see them
            for _ in looks(Patience(min(_GRACE_S, patience.timeout_s)), num_ranks=self.size):
                found = self._find_operation(store, subject)
                if found[1] is None:
                    break
        return found

    def _find_operation(self, store: KeyValueStore, subject: str) -> tuple[int, Verdict | None]:
        """Number of the operation that this call is about, and how it ended if it has.

        Usually the next one. But a rank that did not come to some operations finds them given up: those about other subjects are
        passed over, so that all ranks meet again in the next operation that they all come to.
        """
        ours: tuple[int, Verdict | None] | None = None
        sequence = self._next
        while True:
            keys = self._keys_of(sequence)
            newest, begin, decision = store.get_many((keys.newest, keys.begin, keys.decision))
            if decision is not None:
                verdict = decode_verdict(decision)
                if verdict.concerns(subject):
                    ours = sequence, verdict
                elif self.is_coordinator:
                    self._note_end(sequence, (keys.decision,))
            elif begin is not None:  # under way; the subjects are compared by the agreement
                is_ours = json.loads(begin)["subject"] == subject
                return (sequence, None) if is_ours or ours is None else ours
            elif newest is None or int(newest) < sequence or store.get(keys.begin) is not None:
                return ours or (sequence, None)
            sequence += 1

    def _forget(self, store: KeyValueStore, sequence: int | None) -> None:
        """Delete this rank's keys of operations that are over, all or those long before `sequence`."""
        for end in [end for end in self._ended if sequence is None or end[0] < sequence - _KEPT]:
            self._ended.remove(end)  # not by making a new list: another thread may add to this one
            for key in end[1]:
                store.delete(key)

    def _note_end(self, sequence: int, keys: tuple[str, ...]) -> None:
        self._ended.append((sequence, keys))

    def _admit(self, store: KeyValueStore, sequence: int, ranks: tuple[int, ...]) -> None:
        self._host.welcome(store, ranks, sequence=sequence)


def make_lone_group(rank: int = 0) -> Group:
    """A group of one rank, which agrees with itself in memory, without waiting."""
    return Group(0, (rank,), MemoryKeyValueStore())

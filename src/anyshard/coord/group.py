"""The group: the ranks that save or load together, and the row of operations on which they agree."""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from anyshard.coord.agreement import Agreement
from anyshard.coord.bounded import MAX_ANSWER_S, BoundedKeyValueStore, Caller
from anyshard.coord.keys import OperationKeys, keys_of_group
from anyshard.coord.looks import Patience, looks
from anyshard.coord.members import COORDINATOR, Members
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.protocol import KeyValueStore
from anyshard.coord.roll_call import Guest, Host
from anyshard.coord.verdict import ANY, Decision, Verdict, decode_verdict, give_up_on, make_late_error
from anyshard.coord.watch import Terms

_MAX_CROSSED = 1024  # of which it is known what others took them for: more than calls that a rank leaves out in a row
_KEPT = 2  # operations whose messages stay for ranks that are late
_CHANNEL_ANSWER_S = 10.0
_GRACE_S = 1.0  # for a rank that others have given up for missing


@dataclass(frozen=True, eq=False, slots=True)
class _Crossed:
    """How an operation ended that ranks took for different things, and for what others than this rank took it."""

    verdict: Verdict
    subject_of_others: str


@dataclass(frozen=True, eq=False, slots=True)
class Channel:
    """Keys of a group beside its operations, and a connection of its own to the key-value store, for one thread at a time."""

    members: Members
    store: KeyValueStore
    prefix: str


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
        self._channel_callers: weakref.WeakSet[Caller] = weakref.WeakSet()
        self._host = Host(self._members, self._keys)
        self._guest = Guest(self._members, self._keys)
        self._incarnation = self._host.incarnation if self.is_coordinator else ""
        self._next = 1
        self._num_vain = 0  # calls of this rank in which nobody let it in
        self._num_behind = 0  # operations of the others before they let this rank in, less its own calls in vain
        self._ended: list[tuple[int, tuple[str, ...]]] = []
        self._decided: list[int] = []  # operations whose decisions this coordinator has to delete
        self._committed = 0  # the last operation that was: all ranks came to it
        # Since the ranks last committed: operations that they took for different things. What others took them for is ahead of
        # this rank, or behind it.
        self._crossed: deque[_Crossed] = deque(maxlen=_MAX_CROSSED)

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

    def agree(
        self,
        subject: str,
        *,
        patience: Patience | None = None,
        is_made_once: bool = False,
        begun: Callable[[Agreement], None] = lambda _: None,
    ) -> Agreement:
        """Begin the operation that all ranks call `subject` (a line for messages, the same on every rank).

        Returns without waiting for anybody, but for the roll call before the first operation: `RankMissing` if it fails. Raises
        the failure of the operation if the others have given it up before this rank came; a rank that came too late for the
        first one of the group, and finds the others in another, raises `RankMissing` alone.

        If ranks make a call like this only once (`is_made_once`), and another rank turned out to have made it when this one was
        in an earlier call, it has failed already: that is raised at once. So ranks of which one has left out n calls meet again
        after n more that fail: in each of these the one that is behind learns of a call that it will pass over.

        `begun` is given the agreement once its operation is found, also if this then raises: its end can be acknowledged.
        """
        patience = patience or Patience()
        if is_made_once:
            self._pass_over(subject)
        store = self._bound(patience)
        if not self.is_coordinator:
            self._join(store, subject, patience)
        sequence, verdict = self._find_or_await_operation(store, subject, patience)
        self._next, self._num_behind = sequence + 1, 0
        self._forget(store, sequence)
        terms = Terms(self._members, store, self._keys_of(sequence), subject, patience)
        end = partial(self._note_end, sequence, subject)
        agreement = Agreement(terms, admit=partial(self._admit, store, sequence), end=end)
        begun(agreement)
        with ExitStack() as stack:
            stack.enter_context(agreement)
            agreement.begin(verdict)
            if self.is_coordinator:
                agreement.call_roll(partial(self._host.find_absent, store, sequence=sequence))
            stack.pop_all()
        return agreement

    def refuse(
        self,
        error: Exception,
        *,
        subject: str = ANY,
        patience: Patience | None = None,
        begun: Callable[[Agreement], None] = lambda _: None,
    ) -> NoReturn:
        """Make `error` the failure of the call that the others make, about `subject` if this rank can say that.

        Raises what they raise. In a group of one rank the error stays what it is. `begun` is as for `agree`.
        """
        with self.agree(subject, patience=patience, is_made_once=subject != ANY, begun=begun) as agreement:
            agreement.fail("call", error)

    def hang_up(self, timeout_s: float) -> None:
        """Ask nothing of the key-value store any more, for the process ends: operations fail. For any thread.

        Returns when no call into the store is under way, or after `timeout_s`.
        """
        for caller in (self._caller, *self._channel_callers):
            caller.close(timeout_s)

    def open_channel(self, name: str, *, timeout_s: float = _CHANNEL_ANSWER_S) -> Channel:
        """A channel for talk beside the operations. Waits for no rank; no call into its store takes longer than `timeout_s`.

        All ranks give the same `name`, a random one that they have agreed on: so nobody finds keys of a former job, or of another
        channel.
        """
        prefix = self._keys.channel(name)
        if not self._store.can_hang:
            return Channel(self._members, self._store.clone(), prefix)
        caller = Caller()
        self._channel_callers.add(caller)
        clone = self._caller.ask(self._store.clone, timeout_s)
        return Channel(self._members, BoundedKeyValueStore(clone, caller, timeout_s=timeout_s), prefix)

    def _pass_over(self, subject: str) -> None:
        """Raise how the operation ended in which another rank has made this call already; once, for it may be tried again."""
        for crossed in tuple(self._crossed):
            if crossed.subject_of_others == subject:
                self._crossed.remove(crossed)
                raise crossed.verdict.error(self.size)

    def _bound(self, patience: Patience) -> KeyValueStore:
        if not self._store.can_hang:
            return self._store
        return BoundedKeyValueStore(self._store, self._caller, timeout_s=min(MAX_ANSWER_S, patience.timeout_s))

    def _keys_of(self, sequence: int) -> OperationKeys:
        return self._keys.of_operation(self._incarnation, sequence)

    def _join(self, store: KeyValueStore, subject: str, patience: Patience) -> None:
        welcome = self._guest.join(store, patience)
        if welcome is None:
            self._num_vain += 1
            coordinator = (self.ranks[COORDINATOR],)
            raise give_up_on(subject, "begin", coordinator, timeout_s=patience.timeout_s).error(self.size)
        if welcome.incarnation != self._incarnation:
            self._incarnation, self._next = welcome.incarnation, welcome.sequence
            self._num_behind, self._num_vain = welcome.sequence - 1 - self._num_vain, 0
            self._forget(store, None)

    def _find_or_await_operation(self, store: KeyValueStore, subject: str, patience: Patience) -> tuple[int, Verdict | None]:
        """As `_find_operation`. But others that gave up for want of this rank may be trying again just now."""
        found = self._find_operation(store, subject)
        is_missed = found[1] is not None and found[1].misses(self._members.job_rank)
        if is_missed and not self.is_coordinator:  # the coordinator could not see them
            for _ in looks(Patience(min(_GRACE_S, patience.timeout_s)), num_ranks=self.size):
                found = self._find_operation(store, subject)
                if found[1] is None:
                    break
        return found

    def _find_operation(self, store: KeyValueStore, subject: str) -> tuple[int, Verdict | None]:
        """Number of the operation that this call is about, and how it ended if it has.

        Usually the next one. But a rank may find that operations were given up before it came. The first that concerns its
        subject is its own, or calls would be paired that are not the same; only if that leaves it open, this rank may mean the
        one that is under way. Those about other subjects are passed over, so that all ranks meet again in the next operation
        that they all come to.
        """
        ours: tuple[int, Verdict | None] | None = None
        sequence = self._next
        while True:
            keys = self._keys_of(sequence)
            newest, begin, decision = store.get_many((keys.newest, keys.begin, keys.decision))
            if decision is not None:
                verdict = decode_verdict(decision)
                if ours is None and verdict.concerns(subject):
                    ours = sequence, verdict
                    if self.is_coordinator or not verdict.leaves_open(subject, job_rank=self._members.job_rank):
                        return ours
                elif self.is_coordinator:
                    self._note_end(sequence, subject)
            elif begin is not None:
                theirs = json.loads(begin)["subject"]
                if theirs in (ANY, subject) or (subject == ANY and self._num_behind == 0):
                    return sequence, None
                if ours or self._num_behind == 0:
                    return ours or (sequence, None)  # that it is another one, the agreement finds out
                self._catch_up(store, keys, subject, theirs)
            elif newest is None or int(newest) < sequence or store.get(keys.begin) is not None:
                return ours or (sequence, None)
            sequence += 1

    def _catch_up(self, store: KeyValueStore, keys: OperationKeys, subject: str, theirs: str) -> None:
        """At the first call in which this rank is let in: of it and the coordinator, let the one that is late fail alone."""
        if self._num_behind > 0:
            self._num_behind -= 1
            raise make_late_error(subject, theirs, job_rank=self._members.job_rank)
        self._num_behind += 1
        store.set_if_absent(keys.decision, give_up_on(theirs, "begin", (self.ranks[COORDINATOR],)).encode())

    def _forget(self, store: KeyValueStore, sequence: int | None) -> None:
        """Delete this rank's keys of operations that are over, all or those long before `sequence`.

        Decisions stay until all ranks have come to a later operation: only they tell a late rank how its calls have ended.
        """
        for end in [end for end in self._ended if sequence is None or end[0] < sequence - _KEPT]:
            self._ended.remove(end)  # not by making a new list: another thread may add to this one
            for key in end[1]:
                store.delete(key)
        for decided in [decided for decided in self._decided if decided < min(sequence or 0, self._committed) - _KEPT]:
            self._decided.remove(decided)
            store.delete(self._keys_of(decided).decision)

    def _note_end(self, sequence: int, subject: str, keys: tuple[str, ...] = (), verdict: Verdict | None = None) -> None:
        self._ended.append((sequence, keys))
        if self.is_coordinator:
            self._decided.append(sequence)
        if verdict is not None and verdict.other_subject is not None:
            others = verdict.other_subject if subject == verdict.subject else verdict.subject
            self._crossed.append(_Crossed(verdict, others))
        if verdict is not None and verdict.decision is Decision.COMMIT:
            self._committed = max(self._committed, sequence)
            self._crossed.clear()

    def _admit(self, store: KeyValueStore, sequence: int, ranks: tuple[int, ...]) -> None:
        self._host.welcome(store, ranks, sequence=sequence)


def make_lone_group(rank: int = 0) -> Group:
    """A group of one rank, which agrees with itself in memory, without waiting."""
    return Group(0, (rank,), MemoryKeyValueStore())

"""One agreement: the messages of one save or load between the ranks of a group, and the decision that ends it on all of them.

Phases have names. In a phase ranks `post` to the coordinator, which `collect`s; or it `announce`s to all, who `hear`; or it
`hand_out`s to each, who `receive`. What many ranks have alike, one of them `share`s and anyone may `fetch`. Every wait ends with
the message, with the failure of any rank, or at its deadline with `RankMissing`, which then every rank raises. Nobody waits for
the words that ranks `tell` of their progress, nor for those by which they `acknowledge` the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

import xxhash

from anyshard.coord.members import COORDINATOR
from anyshard.coord.messages import read_message, write_message
from anyshard.coord.verdict import Decision, Verdict, give_up
from anyshard.coord.waits import Ranks, Waits
from anyshard.coord.watch import Terms, Watch
from anyshard.errors import KeyValueStoreLost, OperationFailed, make_failure

logger = logging.getLogger(__name__)


class Agreement:
    """One operation of a group, begun by `Group.agree`; used by one thread at a time, as a context, but where a method says more.

    `decide` ends it. Leaving without a decision gives the operation up on all ranks, as does an error that leaves the context: it
    becomes an `OperationFailed` everywhere (of its own class of `anyshard.errors` too, if it has one), with the error itself as
    the cause on the rank that had it. In a group of one rank the error stays what it is. Nothing here touches storage: after a
    failure a rank may delete what it wrote only if `decision` is `Decision.ABORT`.
    """

    def __init__(
        self, terms: Terms, *, admit: Callable[[Ranks], None], end: Callable[[tuple[str, ...], Verdict | None], None]
    ) -> None:
        self._terms = terms
        self._members = terms.members
        self._watch = Watch(terms)
        self._waits = Waits(self._watch, admit=admit)
        self._end = end
        self._made: dict[str, None] = {}  # an ordered set
        self._has_told = self._has_acknowledged = self._has_ended = False
        self._phase = "begin"
        self._failure: OperationFailed | None = None

    @property
    def decision(self) -> Decision | None:
        """The decision as far as this rank knows."""
        return self._watch.verdict.decision if self._watch.verdict else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception):
                self._turn(self._phase, error)
            elif error is not None:
                self._settle_quietly(error)
            elif self.decision is None:
                self._settle_quietly(RuntimeError("left the operation before it was decided"))
        finally:
            self._failure = None  # it holds the frames of its traceback, and they this object
            self._has_ended = True
            self._end(self._own_keys(), self._watch.verdict)

    def begin(self, verdict: Verdict | None) -> None:
        """Raise the failure that the operation has already ended with, or begin it (coordinator). By the group, once."""
        if verdict is not None:
            self._watch.take(verdict)
        elif self._members.is_coordinator:
            self._watch.begin()

    def call_roll(self, find_absent: Callable[[], Ranks]) -> None:
        """Wait until all ranks have come (coordinator). By the group, once.

        Does not end early if one of them fails: the others would find nobody to let them in, and never hear of it.
        """
        absent: Ranks = ()

        def attempt() -> bool | None:
            nonlocal absent
            absent = find_absent()
            return None if absent else True

        self._waits.wait("begin", attempt, lambda: absent)

    # ------------------------------------------------------------------------------------------------------------ messages

    def post(self, phase: str, payload: bytes) -> None:
        """Say `payload` to the coordinator, once per phase. Does not wait."""
        self._write(self._terms.keys.post(phase, self._members.rank), payload)

    def collect(self, phase: str) -> tuple[bytes, ...]:
        """What all ranks have posted, in the order of the group. Only the coordinator collects, and it posts as well."""
        self._check_coordinator()
        found: dict[int, bytes] = {}

        def find_missing() -> Ranks:
            return tuple(rank for rank in range(self._members.size) if rank not in found)

        def attempt() -> tuple[bytes, ...] | None:
            missing = find_missing()
            posts = self._read_all([self._terms.keys.post(phase, rank) for rank in missing])
            found.update((rank, post) for rank, post in zip(missing, posts, strict=True) if post is not None)
            return tuple(found[rank] for rank in range(self._members.size)) if len(found) == self._members.size else None

        return self._waits.wait(phase, attempt, find_missing)

    def announce(self, phase: str, payload: bytes) -> None:
        """Say `payload` to all ranks (coordinator only, once per phase). Does not wait."""
        self._check_coordinator()
        self._write(self._terms.keys.announcement(phase), payload)

    def hear(self, phase: str) -> bytes:
        """What the coordinator has announced to all, itself included."""
        return self._await(phase, self._terms.keys.announcement(phase), _coordinator)

    def hand_out(self, phase: str, payloads: Sequence[bytes]) -> None:
        """Say one of `payloads` to each rank, in the order of the group (coordinator only, once per phase). Does not wait."""
        self._check_coordinator()
        for rank, payload in zip(range(self._members.size), payloads, strict=True):
            self._write(self._terms.keys.share(phase, rank), payload)

    def receive(self, phase: str) -> bytes:
        """What the coordinator has handed out to this rank."""
        return self._await(phase, self._terms.keys.share(phase, self._members.rank), _coordinator)

    def share(self, payload: bytes) -> str:
        """Say `payload` to whoever asks for its digest, which is returned (xxh3-128, hex). Does not wait.

        Of ranks that share equal bytes one stores them. No phase: the bytes are their own name within the operation.
        """
        digest = xxhash.xxh3_128_hexdigest(payload)
        claim, content = self._terms.keys.claim(digest), self._terms.keys.content(digest)
        own = str(self._members.rank).encode("ascii")
        if content not in self._made and self._terms.store.set_if_absent(claim, own) == own:
            self._made[claim] = None
            self._write(content, payload)
        return digest

    def fetch(self, digest: str) -> bytes:
        """The bytes that a rank has shared under `digest`, compared with it."""

        def find_claimer() -> Ranks:
            claimer = self._terms.store.get(self._terms.keys.claim(digest))
            return tuple(range(self._members.size)) if claimer is None else (int(claimer),)

        payload = self._await("fetch", self._terms.keys.content(digest), find_claimer)
        if (found := xxhash.xxh3_128_hexdigest(payload)) != digest:
            text = (
                f"expected bytes with the digest {digest}, found {len(payload)} with {found}; what a rank has shared was damaged"
            )
            self.fail("fetch", OperationFailed(f"{text} in the key-value store or on the network. Try again", {}))
        return payload

    def hear_id(self) -> str:
        """The operation's id, random and the same on all ranks; waits until the coordinator has begun."""

        def attempt() -> str | None:
            if not self._watch.id:
                self._watch.look()
            return self._watch.id

        return self._waits.wait("begin", attempt, _coordinator)

    # ------------------------------------------------------------------------------------------------------------ progress

    def tell(self, payload: bytes) -> None:
        """Say `payload` (not empty, at most a few KiB) to whoever lists what was told, instead of what this rank told before.

        For any thread. Never raises: it is dropped once the operation is over here, and if the key-value store does not answer.
        """
        # In this order: either the end sees that there is a key to delete, or this thread sees the end.
        self._has_told = True
        if not self._has_ended:
            self._say_quietly(self._terms.keys.told(self._members.rank), payload)

    def list_told(self) -> tuple[bytes | None, ...]:
        """What each rank of the group told last; None of those that told nothing, or whose words are deleted by now.

        For any thread, also when the operation is over: a rank's word stays until it begins the third one after it. Does not wait
        for other ranks. Raises `KeyValueStoreLost`.
        """
        keys = self._terms.keys
        return self._terms.store.get_many([keys.told(rank) for rank in range(self._members.size)])

    def acknowledge(self) -> None:
        """Tell the coordinator that this rank knows how the operation has ended and needs nothing more of it. Never raises.

        In the context or after it, by the thread that used it; again is nothing.
        """
        if self._has_acknowledged or self._members.is_coordinator:
            return
        self._has_acknowledged = True
        key = self._terms.keys.heard(self._members.rank)
        if self._has_ended:
            self._end((key,), None)  # one key more to delete in time
        else:
            self._made[key] = None
        self._say_quietly(key, b"heard")

    def find_unheard(self) -> Ranks:
        """The ranks that have not acknowledged the end, as numbers in the group; the coordinator, which asks, is not among them.

        For any thread, also when the operation is over, but of one of the last two of the group: a rank that has gone further has
        deleted its word. Does not wait for other ranks. Raises `KeyValueStoreLost`.
        """
        self._check_coordinator()
        others = [rank for rank in range(self._members.size) if rank != self._members.rank]
        words = self._terms.store.get_many([self._terms.keys.heard(rank) for rank in others])
        return tuple(rank for rank, word in zip(others, words, strict=True) if word is None)

    # ------------------------------------------------------------------------------------------------------------- the end

    def check(self) -> None:
        """Raise the operation's failure if there is one by now. For long work between two messages; does not wait."""
        self._watch.look()

    def was_announced(self, phase: str) -> bool:
        """Whether the coordinator has announced this: others may have heard it even if the operation has failed since."""
        return self._terms.store.get(self._terms.keys.announcement(phase)) is not None

    def decide(self) -> None:
        """Return once the decision is `COMMIT`, which the coordinator makes it by this call; raise the failure otherwise.

        From then on the loss of another rank stops nothing. If the coordinator fails after this, `decision` becomes `UNKNOWN`.
        """

        def attempt() -> Decision | None:
            self._watch.look()
            return self.decision

        if self._members.is_coordinator:
            self._watch.take(self._watch.settle(Verdict(Decision.COMMIT, self._terms.subject)))
        else:
            self._waits.wait("decide", attempt, _coordinator)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work of this rank: an error of it is the failure of phase `name` on every rank."""
        self._phase = name
        try:
            yield
        except Exception as error:
            self._turn(name, error)
            raise

    def fail(self, phase: str, error: Exception) -> NoReturn:
        """Give the operation up on all ranks because of `error`, and raise what they will raise."""
        self._failure = self._settle_failure(phase, error)
        if self._members.size == 1:
            raise error
        raise self._failure from error

    # --------------------------------------------------------------------------------------------------------------- parts

    def _turn(self, phase: str, error: Exception) -> None:
        """Make an error of this rank the failure of all, but not one that all have already."""
        is_known = error is self._failure or (isinstance(error, OperationFailed) and self.decision is not None)
        if not is_known and not isinstance(error, KeyValueStoreLost):
            self.fail(phase, error)

    def _settle_failure(self, phase: str, error: Exception) -> OperationFailed:
        verdict = give_up(self._terms.subject, phase, error, job_rank=self._members.job_rank)
        try:
            return self._settle(verdict).error(self._members.size)
        except KeyValueStoreLost as lost:
            headline = f"{self._terms.subject} failed here, and the other ranks do not hear of it ({lost}):"
            return make_failure(headline, verdict.failures, kinds=(verdict.kind,))

    def _settle_quietly(self, error: BaseException) -> None:
        with suppress(KeyValueStoreLost):
            self._settle(give_up(self._terms.subject, self._phase, error, job_rank=self._members.job_rank))

    def _settle(self, verdict: Verdict) -> Verdict:
        known = self._watch.settle(verdict)
        if known.decision is not Decision.COMMIT:
            return known
        return self._watch.take_back(verdict) if self._members.is_coordinator else replace(verdict, decision=known.decision)

    def _own_keys(self) -> tuple[str, ...]:
        """What this rank deletes when nobody can need it any more: the begin record first, which says so."""
        keys = self._terms.keys
        made = (*self._made, keys.told(self._members.rank)) if self._has_told else tuple(self._made)
        return (keys.begin, *made, keys.waiting) if self._members.is_coordinator else made

    def _say_quietly(self, key: str, word: bytes) -> None:
        try:
            self._terms.store.set(key, word)
        except KeyValueStoreLost:
            logger.debug("%s: %s could not be said", self._terms.subject, key, exc_info=True)

    def _write(self, key: str, payload: bytes) -> None:
        assert key not in self._made, f"{key} was said already"
        self._made |= dict.fromkeys(write_message(self._terms.store, key, payload))

    def _await(self, phase: str, key: str, whom: Callable[[], Ranks]) -> bytes:
        return self._waits.wait(phase, lambda: self._read_all([key])[0], whom)

    def _read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        store = self._terms.store
        firsts = self._watch.look(keys)
        return [None if first is None else read_message(store, key, first) for key, first in zip(keys, firsts, strict=True)]

    def _check_coordinator(self) -> None:
        assert self._members.is_coordinator, "only the coordinator collects, announces, hands out and is acknowledged"


def _coordinator() -> Ranks:
    return (COORDINATOR,)

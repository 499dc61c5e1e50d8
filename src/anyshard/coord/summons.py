"""Summons: how ranks that make the same calls, each at its own time, agree on one of them that none of them has begun yet.

Rounds, one after the other. A rank that wants something (to stop, to save) writes the round's summons; each rank that sees it
freezes, so that it begins no further call, and posts how many it has begun; the coordinator decides on the call after the highest
of these, or that ranks are missing; with the decision the ranks go on. A rank in a collective answers too, since the talking is
done by a thread of its own (the watcher), which looks at the channel; the thread that counts the calls talks to nobody.
"""

from __future__ import annotations

import enum
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from anyshard.coord.group import Channel
from anyshard.coord.looks import find_pause_s
from anyshard.coord.members import COORDINATOR
from anyshard.errors import KeyValueStoreLost, OperationFailed, RankMissing, make_failure

logger = logging.getLogger(__name__)

_PAUSE_S_PER_RANK = 200e-6  # between looks for a summons: however many ranks there are, they look 5,000 times a second at most
_MARGIN_S = 0.5  # how much longer others wait for the coordinator than it waits for them
_STUCK_S = 5.0  # how much longer than all of that a call is held up, should the watcher itself be stuck

_Record = dict[str, Any]


class Kind(enum.StrEnum):
    """What a summons asks for."""

    STOP = "stop"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its number, from 1 on, and what was agreed for it, each kind with its reason in words."""

    number: int
    wants: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[str]:
        """What this call is for; mostly nothing."""
        return frozenset(self.wants)

    @property
    def reason(self) -> str:
        """Why, for a log; empty if for nothing."""
        return "; ".join(self.wants.values())


@final
class Summons:
    """One rank's part. All ranks that have taken part in a decision get the same call of it, and none has begun that call before.

    One thread counts (`count_call`), one looks (`look`, again and again until it returns None), any may `summon` or ask. Once a
    stop is decided on, or was given up because ranks are missing, or the key-value store is lost, there is nothing more to agree.
    """

    def __init__(
        self, channel: Channel, *, roll_call_s: float, poll_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel = channel
        self._members = channel.members
        self._idle_s = max(poll_s, _PAUSE_S_PER_RANK * channel.members.size)
        # A rank sees the summons up to one pause after the coordinator, or before it.
        self._patience_s = roll_call_s + (self._idle_s if self._members.is_coordinator else 2 * self._idle_s + _MARGIN_S)
        self._roll_call_s = roll_call_s
        self._clock = clock
        self._changed = threading.Condition()
        self._calls = 0
        self._is_frozen = self._is_over = False
        self._wanted: dict[str, str] = {}  # by this rank, and not decided yet
        self._decided: dict[int, dict[str, str]] = {}
        self._failure: OperationFailed | None = None
        self._lost: KeyValueStoreLost | None = None
        self._round = 0
        self._began_s: float | None = None  # when this rank saw the summons of this round
        self._heard: dict[str, str] = {}  # what is wanted in this round
        self._posts: dict[int, _Record] = {}
        self._is_stop_known = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look for."""
        return self._is_over

    @property
    def is_stop_known(self) -> bool:
        """Whether this rank knows that some rank wants to stop, decided or not."""
        return self._is_stop_known

    @property
    def stop_call(self) -> int | None:
        """The call that all ranks stop at, once it is decided and as long as it has not begun."""
        with self._changed:
            return next((number for number, wants in self._decided.items() if Kind.STOP in wants), None)

    @property
    def failure(self) -> OperationFailed | None:
        """Why there will be no agreement any more: `RankMissing`, of a stop that was wanted, or `KeyValueStoreLost`."""
        return self._failure

    def count_call(self) -> Call:
        """Begin the next call; waits only while a roll call is under way, whose end is bounded. Asks the store nothing.

        Raises `RankMissing` or `KeyValueStoreLost` if a roll call has failed.
        """
        with self._changed:
            if self._is_frozen and not self._changed.wait_for(lambda: not self._is_frozen, self._patience_s + _STUCK_S):
                self._lose(KeyValueStoreLost("the roll call before this call: expected its end, found none in time", {}))
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._calls += 1
            wants = self._decided.pop(self._calls, None) if self._decided else None
            return Call(self._calls, wants or {})

    def summon(self, kind: Kind, reason: str) -> None:
        """Ask all ranks for a call of this kind, at the next look; what is asked for or decided already is not asked again."""
        with self._changed:
            if self._lost is not None:
                self._failure = self._lost
            if self._is_over or any(kind in wants for wants in self._decided.values()):
                return
            self._wanted.setdefault(kind, reason)
            self._is_stop_known |= kind is Kind.STOP

    def look(self) -> float | None:
        """Look at the channel, answer, and decide if there is something to decide; the seconds until the next look.

        None if no look is due: for good (`is_over`), or until this rank itself summons, if it is alone. Waits for no rank and
        raises nothing: a lost key-value store is a `failure`, if there was something to agree on.
        """
        if self._is_over:
            return None
        try:
            if self._began_s is None:
                self._look_for_summons()
            else:
                self._look_for_decision()
        except KeyValueStoreLost as lost:
            with self._changed:
                self._lose(lost)
        return self._find_pause_s()

    def leave(self) -> None:
        """Tell the other ranks that this one counts no further call, so that nobody waits for it. Instead of a further `look`."""
        if self._is_over or self._members.size == 1:
            return
        with suppress(KeyValueStoreLost):
            self._channel.store.set(self._key_of_post(self._members.rank), _encode({"has_left": True}))

    # ------------------------------------------------------------------------------------------------------------ one round

    def _look_for_summons(self) -> None:
        key, wanted = self._key("summons"), dict(self._wanted)
        store = self._channel.store
        found = store.set_if_absent(key, _encode({"wants": wanted})) if wanted else store.get(key)
        if found is not None:
            self._answer(_decode(found)["wants"])
            self._look_for_decision()

    def _answer(self, wants: Mapping[str, str]) -> None:
        with self._changed:
            self._is_frozen = True
            self._heard = {**self._wanted, **wants}
            post = {"calls": self._calls, "wants": self._heard}
            self._is_stop_known |= Kind.STOP in wants
        self._began_s = self._clock()
        self._channel.store.set(self._key_of_post(self._members.rank), _encode(post))

    def _look_for_decision(self) -> None:
        store, key = self._channel.store, self._key("decision")
        decision = store.get(key)
        if decision is None:
            proposal = self._collect() if self._members.is_coordinator else self._find_late((COORDINATOR,))
            if proposal is None:
                return
            decision = store.set_if_absent(key, _encode(proposal))
        self._take(_decode(decision))

    def _collect(self) -> _Record | None:
        """What the coordinator decides, if all have answered or some are late."""
        absent = [rank for rank in range(self._members.size) if rank not in self._posts]
        posts = self._channel.store.get_many([self._key_of_post(rank) for rank in absent])
        self._posts |= {rank: _decode(post) for rank, post in zip(absent, posts, strict=True) if post is not None}
        gone = [rank for rank, post in self._posts.items() if "has_left" in post]
        if gone:
            return self._tell_missing(gone, "has left the run")
        if len(self._posts) < self._members.size:
            return self._find_late([rank for rank in absent if rank not in self._posts])
        return {"call": 1 + max(post["calls"] for post in self._posts.values()), "wants": self._join_wants()}

    def _find_late(self, ranks: Sequence[int]) -> _Record | None:
        assert self._began_s is not None
        if self._clock() - self._began_s < self._patience_s:
            return None
        return self._tell_missing(ranks, f"did not answer within {self._roll_call_s:g} s")

    def _tell_missing(self, ranks: Sequence[int], text: str) -> _Record:
        return {"missing": {str(self._members.ranks[rank]): text for rank in ranks}, "wants": self._join_wants()}

    def _join_wants(self) -> dict[str, str]:
        """What any rank wants, as far as this one has heard."""
        joined = self._heard
        for _, post in sorted(self._posts.items()):
            joined = {**post.get("wants", {}), **joined}
        return joined

    def _take(self, decision: _Record) -> None:
        """Take note of how the round has ended, and begin the next one."""
        wants = decision["wants"]
        with self._changed:
            if "missing" in decision:
                self._give_up(wants, {int(rank): text for rank, text in decision["missing"].items()})
            else:
                # Two rounds between two calls decide on the same one.
                self._decided[decision["call"]] = {**self._decided.get(decision["call"], {}), **wants}
                self._is_over = Kind.STOP in wants
            self._wanted = {kind: reason for kind, reason in self._wanted.items() if kind not in wants}
            self._is_stop_known |= Kind.STOP in wants
            self._is_frozen = False
            self._changed.notify_all()
        self._forget_round_before(is_whole="call" in decision)
        self._round, self._began_s, self._heard, self._posts = self._round + 1, None, {}, {}

    def _give_up(self, wants: Mapping[str, str], missing: Mapping[int, str]) -> None:
        if Kind.STOP not in wants:
            logger.warning("no save now (%s): rank(s) missing at the roll call: %s", "; ".join(wants.values()), missing)
            return
        headline = f"no last save ({'; '.join(wants.values())}): expected all {self._members.size} ranks at the roll call, found"
        failures = {rank: f"roll call: {RankMissing.__name__}: {text}" for rank, text in missing.items()}
        self._failure = make_failure(headline, failures, kinds=(RankMissing.__name__,))
        self._is_over = True

    def _lose(self, lost: KeyValueStoreLost) -> None:
        self._lost = lost
        if self._is_frozen or self._wanted:
            self._failure = lost
        logger.error("the ranks can agree on no common step to save or stop at any more: %s", lost)
        self._is_over, self._is_frozen = True, False
        self._changed.notify_all()

    def _forget_round_before(self, *, is_whole: bool) -> None:
        """Delete this rank's keys of the round before this one, which all ranks have left if they are all in this one."""
        if self._round == 0 or not is_whole:
            return
        names = ("summons", "decision") if self._members.is_coordinator else ()
        for name in (*names, f"post.{self._members.rank}"):
            self._channel.store.delete(self._key(name, of_round=self._round - 1))

    # --------------------------------------------------------------------------------------------------------------- parts

    def _find_pause_s(self) -> float | None:
        if self._is_over:
            return None
        if self._began_s is not None:
            return find_pause_s(self._clock() - self._began_s, num_ranks=self._members.size)
        if self._wanted:
            return 0.0
        return None if self._members.size == 1 else self._idle_s

    def _key_of_post(self, rank: int) -> str:
        return self._key(f"post.{rank}")

    def _key(self, name: str, *, of_round: int | None = None) -> str:
        return f"{self._channel.prefix}/{self._round if of_round is None else of_round}/{name}"


def _encode(record: _Record) -> bytes:
    return json.dumps(record).encode("ascii")


def _decode(data: bytes) -> _Record:
    record: _Record = json.loads(data)
    return record

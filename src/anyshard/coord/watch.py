"""What a rank knows of how its operation ends: every look at the key-value store looks at the decision first."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anyshard.coord.keys import OperationKeys
from anyshard.coord.looks import Patience
from anyshard.coord.members import COORDINATOR, Members
from anyshard.coord.protocol import KeyValueStore
from anyshard.coord.verdict import ANY, Decision, Verdict, decode_verdict
from anyshard.errors import OperationFailed


@dataclass(frozen=True, slots=True)
class Terms:
    """One operation as one rank sees it."""

    members: Members
    store: KeyValueStore
    keys: OperationKeys
    subject: str
    patience: Patience


class Watch:
    """The decision record and the begin record, as far as they were seen."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.id: str | None = None
        self.verdict: Verdict | None = None

    @property
    def is_committed(self) -> bool:
        """Whether the decision is known to be `COMMIT`."""
        return self.verdict is not None and self.verdict.decision is Decision.COMMIT

    @property
    def has_failed(self) -> bool:
        """Whether the operation is known to have failed."""
        return self.verdict is not None and not self.is_committed

    def begin(self) -> None:
        """Write the begin record (coordinator only)."""
        self.id = secrets.token_hex(8)
        record = {"id": self.id, "subject": self.terms.subject}
        self.terms.store.set(self.terms.keys.begin, json.dumps(record).encode("ascii"))
        # Last, so that a rank which finds this number and no begin record knows that the operation is over and deleted.
        self.terms.store.set(self.terms.keys.newest, str(self.terms.keys.sequence).encode("ascii"))

    def look(self, keys: Sequence[str] = ()) -> tuple[bytes | None, ...]:
        """The values of `keys`, or the operation's failure if there is one by now."""
        known = (self.terms.keys.decision,) if self.id else (self.terms.keys.decision, self.terms.keys.begin)
        decision, *rest = self.terms.store.get_many((*known, *keys))
        if decision is not None:
            self.take(decode_verdict(decision))
        if not self.id:
            self._take_begin(rest.pop(0))
        return tuple(rest)

    def take(self, verdict: Verdict) -> None:
        """Keep the decision, and raise it if it is a failure."""
        self.verdict = verdict
        if self.has_failed:
            raise verdict.error(self.terms.members.size)

    def settle(self, verdict: Verdict) -> Verdict:
        """Make this the decision unless there is one; the decision that holds."""
        self.verdict = decode_verdict(self.terms.store.set_if_absent(self.terms.keys.decision, verdict.encode()))
        return self.verdict

    def take_back(self, verdict: Verdict) -> Verdict:
        """After `COMMIT`: tell that the coordinator failed all the same. Only it may, and only once, so it needs no comparing."""
        self.verdict = replace(verdict, decision=Decision.UNKNOWN)
        self.terms.store.set(self.terms.keys.decision, self.verdict.encode())
        return self.verdict

    def is_forgotten(self) -> bool:
        """Whether the others have gone on so far that this operation's keys are deleted."""
        newest = self.terms.store.get(self.terms.keys.newest)
        has_begun = newest is not None and int(newest) >= self.terms.keys.sequence
        return has_begun and self.terms.store.get(self.terms.keys.begin) is None

    def _take_begin(self, begin: bytes | None) -> None:
        if begin is None:
            return
        record = json.loads(begin)
        self.id = record["id"]
        if record["subject"] not in (ANY, self.terms.subject):
            self._disagree(record["subject"])

    def _disagree(self, subject: str) -> None:
        members = self.terms.members
        text = (
            f"found the call {self.terms.subject!r}, but {subject!r} on {members.describe((COORDINATOR,))}. All ranks of a group "
            "must make the same calls in the same order"
        )
        failures = {members.job_rank: f"begin: {OperationFailed.__name__}: {text}"}
        verdict = Verdict(Decision.ABORT, subject, failures=failures, other_subject=self.terms.subject)
        self.take(self.settle(verdict))

"""The decision record of an operation: what it says, and the error that it becomes on every rank."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from anyshard.errors import OperationFailed, RankMissing, StructureChanged, make_failure, name_kind, show_error

ANY = "the call"  # the subject of a rank whose call failed before it could say what it was about

_MAX_TEXT = 4000  # characters of one rank's failure
_HINTS = {
    RankMissing.__name__: " (all ranks must call it, and take part to its end)",
    StructureChanged.__name__: " (the next save plans afresh)",
}


class Decision(enum.StrEnum):
    """How an operation ended.

    `COMMIT`: the coordinator may publish. `ABORT`: it never will; only now may a rank delete what it wrote. `UNKNOWN`: the
    coordinator failed after `COMMIT`, or this rank came too late to be told; only the storage can tell what exists.
    """

    COMMIT = "commit"
    ABORT = "abort"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision; of a failure also whose it was, by numbers in the job, and of which class (see `errors.name_kind`).

    `subject` is what the operation is about; `other_subject` what a rank took it for, if that is the failure.
    """

    decision: Decision
    subject: str
    kind: str = OperationFailed.__name__
    failures: Mapping[int, str] = field(default_factory=dict)
    other_subject: str | None = None

    def concerns(self, subject: str) -> bool:
        """Whether this may be the end of the call of a rank that is about `subject`.

        If ranks took the operation for different things, each that comes later has been awaited in it, whatever it is about.
        """
        return self.other_subject is not None or ANY in (subject, self.subject) or subject == self.subject

    def leaves_open(self, subject: str, *, job_rank: int) -> bool:
        """Whether that rank may mean a later operation all the same: it was missing in this one, or is about a third thing."""
        if self.other_subject is not None:
            return subject not in (ANY, self.subject, self.other_subject)
        return self.misses(job_rank)

    def misses(self, job_rank: int) -> bool:
        """Whether the operation was given up because this rank was not heard of."""
        return self.kind == RankMissing.__name__ and job_rank in self.failures

    def encode(self) -> bytes:
        """As JSON."""
        failures = {str(rank): text for rank, text in self.failures.items()}
        record = {"decision": self.decision, "subject": self.subject, "other_subject": self.other_subject}
        return json.dumps({**record, "kind": self.kind, "failures": failures}).encode("ascii")

    def error(self, num_ranks: int) -> OperationFailed:
        """The error that every rank raises."""
        ends = {
            Decision.ABORT: f"was given up on all {num_ranks} ranks{_HINTS.get(self.kind, '')}",
            Decision.UNKNOWN: "failed; only the storage can tell whether it was committed",
            Decision.COMMIT: "is decided on, but failed on this rank",
        }
        return make_failure(f"{self.subject} {ends[self.decision]}:", self.failures, kinds=(self.kind,))


def decode_verdict(data: bytes) -> Verdict:
    """The record that some rank of this job has written."""
    record = json.loads(data)
    failures = {int(rank): text for rank, text in record["failures"].items()}
    return Verdict(Decision(record["decision"]), record["subject"], record["kind"], failures, record["other_subject"])


def give_up(subject: str, phase: str, error: BaseException, *, job_rank: int) -> Verdict:
    """The abort that a rank's error asks for. An `OperationFailed` that names failures speaks for those ranks."""
    failures = error.failures if isinstance(error, OperationFailed) else {}
    text = f"{phase}: {show_error(error)}"
    return Verdict(Decision.ABORT, subject, name_kind(error), failures or {job_rank: text[:_MAX_TEXT]})


def give_up_on(subject: str, phase: str, job_ranks: tuple[int, ...], *, timeout_s: float | None = None) -> Verdict:
    """The abort because ranks are missing: after so long, or (None) for longer than this rank could wait in earlier calls."""
    heard = "not heard of in time" if timeout_s is None else f"not heard of within {timeout_s:g} s"
    text = f"{phase}: {RankMissing.__name__}: {heard}"
    return Verdict(Decision.ABORT, subject, RankMissing.__name__, dict.fromkeys(job_ranks, text))


def make_late_error(subject: str, theirs: str, *, job_rank: int) -> RankMissing:
    """The error of a rank that comes to its group when the others have had operations without it and are about `theirs`."""
    text = f"begin: {RankMissing.__name__}: came too late: the others had operations without it and are in {theirs!r} by now"
    return RankMissing(f"{subject} failed on this rank alone, whose next call meets the others:", {job_rank: text})

"""The waits of an operation: each ends with what was waited for, with the failure of a rank, or by naming who is missing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from anyshard.coord.looks import Every, looks
from anyshard.coord.verdict import Decision, Verdict, give_up_on
from anyshard.coord.watch import Watch
from anyshard.errors import OperationFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ranks = tuple[int, ...]

_UPKEEP_S = 0.25  # how often a wait looks at more than its message


class Waits:
    """How one rank waits in one operation. `admit` lets ranks that came again as new processes into the group (coordinator)."""

    def __init__(self, watch: Watch, *, admit: Callable[[Ranks], None]) -> None:
        self._watch = watch
        self._terms = watch.terms
        self._members = watch.terms.members
        self._admit = admit
        self._told: tuple[str, Ranks] | None = None

    def wait(self, phase: str, attempt: Callable[[], T | None], whom: Callable[[], Ranks]) -> T:
        """The first result of `attempt` that is not None; `whom` tells which ranks it still lacks."""
        patience = self._terms.patience
        upkeep, reports = Every(min(_UPKEEP_S, patience.timeout_s / 4)), Every(patience.report_s)
        for waited_s in looks(patience, num_ranks=self._members.size):
            result = attempt()
            if result is not None:
                self._found_all()
                return result
            if upkeep.is_due(waited_s):
                self._keep_up(phase, whom())
            if reports.is_due(waited_s):
                self._report(phase, whom(), waited_s)
        return self._give_up(phase, attempt, whom())

    def _give_up(self, phase: str, attempt: Callable[[], T | None], missing: Ranks) -> T:
        phase, missing = self._blame(phase, missing)
        job_ranks = tuple(self._members.ranks[rank] for rank in missing)
        verdict = give_up_on(self._terms.subject, phase, job_ranks, timeout_s=self._terms.patience.timeout_s)
        known = self._watch.settle(verdict)
        if known.decision is not Decision.COMMIT:
            raise known.error(self._members.size)
        result = attempt()  # nobody gives up what is committed; perhaps that was all that there was to hear
        if result is None:
            raise replace(verdict, decision=Decision.COMMIT).error(self._members.size)
        return result

    def _found_all(self) -> None:
        if self._told:
            self._terms.store.delete(self._terms.keys.waiting)
            self._told = None

    def _keep_up(self, phase: str, missing: Ranks) -> None:
        if not self._members.is_coordinator:
            self._check_not_left_behind(phase)
            return
        self._admit(missing)
        if self._told != (phase, missing):
            record = json.dumps({"phase": phase, "missing": missing}).encode("ascii")
            self._terms.store.set(self._terms.keys.waiting, record)
            self._told = (phase, missing)

    def _blame(self, phase: str, missing: Ranks) -> tuple[str, Ranks]:
        """Phase and ranks to name: if the coordinator is itself waiting for others, it is they who are missing."""
        told = None if self._members.is_coordinator else self._terms.store.get(self._terms.keys.waiting)
        if told is None:
            return phase, missing
        record = json.loads(told)
        posts = self._terms.store.get_many([self._terms.keys.post(record["phase"], rank) for rank in record["missing"]])
        late = tuple(
            rank for rank, post in zip(record["missing"], posts, strict=True) if post is None and rank != self._members.rank
        )
        return (record["phase"], late) if late else (phase, missing)

    def _check_not_left_behind(self, phase: str) -> None:
        if self._watch.is_forgotten():
            text = f"{phase}: {OperationFailed.__name__}: the other ranks have gone on to later operations without this one"
            failures = {self._members.job_rank: text}
            self._watch.take(Verdict(Decision.UNKNOWN, self._terms.subject, failures=failures))

    def _report(self, phase: str, missing: Ranks, waited_s: float) -> None:
        logger.warning(
            "%s: rank %d waits in phase %s for %s since %.0f s (gives up after %.0f s)",
            self._terms.subject,
            self._members.job_rank,
            phase,
            self._members.describe(missing),
            waited_s,
            self._terms.patience.timeout_s,
        )

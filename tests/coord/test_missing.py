"""Ranks that do not come, die or freeze: the others end in time, with one error that names them, and meet again afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from anyshard.coord.agreement import Agreement
from anyshard.coord.group import Group
from anyshard.coord.looks import Patience
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.verdict import Decision
from anyshard.errors import InvalidOption, OperationFailed, RankMissing
from tests.coord.conftest import Connect
from tests.coord.thread_ranks import LONG, SHORT, failures, make_groups, run_group, run_ranks, save

pytestmark = pytest.mark.slow

MISSING = "RankMissing: not heard of within 0.4 s"


def started(connect: Callable[[], Any] | None = None, size: int = 3) -> list[Group]:
    """Groups that have already had one operation together."""
    groups = make_groups(size, connect or MemoryKeyValueStore().clone)
    run_group(groups, lambda group: save(group, "save 0"))
    return groups


def come_and_die(group: Group, *, after: str) -> Agreement:
    """A rank that ends without a word: before or after its first post, or just before the decision."""
    agreement = group.agree("save 1", patience=LONG)
    if after in ("post", "plan"):
        agreement.post("table", b"")
    if after == "plan":
        if group.is_coordinator:
            agreement.hand_out("plan", agreement.collect("table"))
        agreement.receive("plan")
    return agreement


def test_a_rank_that_never_comes_is_named_on_every_rank(connect: Connect) -> None:
    """At the first operation the roll call names it; when it comes at last, the group works."""
    groups = make_groups(4, connect)
    began_s = time.monotonic()
    results = run_group([groups[0], groups[1], groups[3]], lambda group: save(group, "save 1", patience=SHORT))
    assert [RankMissing] * 3 == [type(result) for result in results]
    assert [{2: f"begin: {MISSING}"}] * 3 == failures(results)
    assert time.monotonic() - began_s < 3
    assert ["bytes"] * 4 == [type(result).__name__ for result in run_group(groups, lambda group: save(group, "save 2"))]


@pytest.mark.parametrize(
    ("after", "phase"),
    [("nothing", "table"), ("begin", "table"), ("post", "durable"), ("plan", "durable")],
    ids=lambda text: text,
)
def test_a_rank_that_dies_is_named_with_the_phase(after: str, phase: str) -> None:
    """Wherever a rank falls silent, all others name it and the phase in which it was waited for; nothing is committed."""
    groups = started()
    if after != "nothing":
        acts: list[Callable[[], Any]] = [lambda group=group: save(group, "save 1", patience=SHORT) for group in groups[:2]]
        results = run_ranks([*acts, lambda: come_and_die(groups[2], after=after)])[:2]
    else:
        results = run_group(groups[:2], lambda group: save(group, "save 1", patience=SHORT))
    assert [RankMissing] * 2 == [type(result) for result in results]
    assert [{2: f"{phase}: {MISSING}"}] * 2 == failures(results)


@pytest.mark.parametrize(("after", "phase"), [("nothing", "plan"), ("begin", "plan"), ("post", "plan"), ("plan", "decide")])
def test_a_dead_coordinator_is_named(after: str, phase: str) -> None:
    """Without the coordinator the others give up by themselves, and so does everyone who comes later."""
    groups = started()
    acts: list[Callable[[], Any]] = [lambda group=group: save(group, "save 1", patience=SHORT) for group in groups[1:]]
    if after != "nothing":
        acts.append(lambda: come_and_die(groups[0], after=after))
    results = run_ranks(acts)[:2]
    assert [RankMissing] * 2 == [type(result) for result in results]
    assert [{0: f"{phase}: {MISSING}"}] * 2 == failures(results)


def test_a_coordinator_that_comes_late() -> None:
    """The coordinator raises what the others have raised when they lost patience; the next operation works."""
    groups = started()
    early = run_group(groups[1:], lambda group: save(group, "save 1", patience=SHORT))
    late = run_group(groups[:1], lambda group: save(group, "save 1"))
    assert [{0: f"plan: {MISSING}"}] * 3 == failures([*early, *late])
    assert ["bytes"] * 3 == [type(result).__name__ for result in run_group(groups, lambda group: save(group, "save 2"))]


def test_a_coordinator_that_never_comes_at_all(connect: Connect) -> None:
    """Without a first roll call every rank names the coordinator."""
    results = run_group(make_groups(3, connect)[1:], lambda group: save(group, patience=SHORT))
    assert [{0: f"begin: {MISSING}"}] * 2 == failures(results)


def test_the_coordinator_is_not_blamed_for_whom_it_waits() -> None:
    """Who loses patience first names the rank that all wait for, not the coordinator that waits for it too."""
    groups = started()
    results = run_ranks(
        [
            lambda: save(groups[0], "save 1", patience=Patience(timeout_s=20)),
            lambda: save(groups[1], "save 1", patience=Patience(timeout_s=1.0)),
        ]
    )
    assert [{2: "table: RankMissing: not heard of within 1 s"}] * 2 == failures(results)


def test_the_coordinator_is_not_blamed_during_the_roll_call() -> None:
    """So it is at the first operation too."""
    groups = make_groups(3, MemoryKeyValueStore().clone)
    results = run_ranks(
        [
            lambda: save(groups[0], "save 1", patience=Patience(timeout_s=1.5)),
            lambda: save(groups[1], "save 1", patience=Patience(timeout_s=1.0)),
        ]
    )
    assert [{2: "begin: RankMissing: not heard of within 1 s"}] * 2 == failures(results)


def test_a_coordinator_that_dies_after_the_decision() -> None:
    """The others cannot tell how it ended, say so, and keep `COMMIT`: no licence to delete."""
    groups = started()
    decisions = []

    def act(group: Group) -> Any:
        agreement = group.agree("save 1", patience=SHORT)
        agreement.decide()
        if group.is_coordinator:
            return agreement
        with agreement:
            try:
                return agreement.hear("published")
            finally:
                decisions.append(agreement.decision)

    results = run_group(groups, act)[1:]
    assert [{0: f"published: {MISSING}"}] * 2 == failures(results)
    assert [Decision.COMMIT] * 2 == decisions


def test_a_late_rank_learns_that_the_others_gave_up(connect: Connect) -> None:
    """A rank that comes after the deadline raises what the others raised, at once; the next operation works."""
    groups = started(connect)
    on_time = run_group(groups[:2], lambda group: save(group, "save 1", patience=SHORT))
    (late,) = run_group(groups[2:], lambda group: save(group, "save 1"))
    assert [{2: f"table: {MISSING}"}] * 3 == failures([*on_time, late])
    assert [b"table 0 planned; table 1 planned; table 2 planned"] * 3 == run_group(groups, lambda group: save(group, "save 2"))


@pytest.mark.parametrize("absent", [0, 1, 2])
@pytest.mark.parametrize("num_missed", [1, 4])
def test_a_rank_that_missed_operations_meets_the_others_again(absent: int, num_missed: int) -> None:
    """A save called by some ranks only fails on them; the next save that all call works, for whoever was absent and how often."""
    groups = started()
    present = [group for group in groups if group.rank != absent]
    for step in range(1, num_missed + 1):
        subject = f"save {step}"
        results = run_group(present, lambda group, subject=subject: save(group, subject, patience=Patience(timeout_s=0.3)))
        assert {absent} == {rank for found in failures(results) for rank in found}
    assert ["bytes"] * 3 == [type(result).__name__ for result in run_group(groups, lambda group: save(group, "save 9"))]


@pytest.mark.parametrize("num_missed", [1, 3])
def test_a_save_may_be_tried_again_under_the_same_name(connect: Connect, num_missed: int) -> None:
    """If some ranks called alone and failed, the same call by all works, also at the very first operation."""
    groups = make_groups(3, connect)
    for _ in range(num_missed):
        failures(run_group(groups[:1], lambda group: save(group, "save 1", patience=SHORT)))
    assert ["bytes"] * 3 == [type(result).__name__ for result in run_group(groups, lambda group: save(group, "save 1"))]


def test_a_rank_left_far_behind_ends_too() -> None:
    """A process that slept while another one took its place finds its operation deleted, and says so instead of waiting."""
    groups = started()
    sleeper = come_and_die(groups[2], after="post")
    run_group(groups[:2], lambda group: save(group, "save 1", patience=Patience(timeout_s=0.1)))
    groups[2] = Group(2, (0, 1, 2), groups[0]._store)
    for step in range(2, 10):
        run_group(groups, lambda group, step=step: save(group, f"save {step}"))
    with pytest.raises(OperationFailed, match="plan: OperationFailed: the other ranks have gone on"), sleeper:
        sleeper.receive("plan")
    assert sleeper.decision is Decision.UNKNOWN
    assert ["bytes"] * 3 == [type(result).__name__ for result in run_group(groups, lambda group: save(group, "save 9"))]


def test_different_calls_are_found_out() -> None:
    """Ranks that are about different things at the same time say which, on every rank; the next operation works."""
    groups = started()
    results = run_group(groups, lambda group: save(group, f"save {1 if group.rank else 2} to /a"))
    (failure,) = {text for found in failures(results) for text in found.values()}
    assert "found the call 'save 1 to /a', but 'save 2 to /a' on rank 0" in failure
    assert ["bytes"] * 3 == [type(result).__name__ for result in run_group(groups, lambda group: save(group, "save 3"))]


def test_waits_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A long wait says from time to time who is missing and in which phase."""
    groups = started()
    with caplog.at_level(logging.WARNING, logger="anyshard"):
        run_group(groups[:1], lambda group: save(group, "save 1", patience=Patience(timeout_s=0.5, report_s=0.1)))
    assert 2 <= len(caplog.messages) <= 5
    assert "save 1: rank 0 waits in phase table for ranks 1, 2 since 0 s (gives up after 0 s)" in caplog.messages


def test_numbers_are_those_of_the_job() -> None:
    """Errors of a group that is a part of the job name ranks by their numbers in the job."""
    store = MemoryKeyValueStore()
    groups = [Group(rank, (4, 6), store) for rank in range(2)]
    results = run_group(groups, lambda group: save(group, fault="write", faulty=1))
    assert [{6: "write: ValueError: write went wrong"}] * 2 == failures(results)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_patience_is_positive(seconds: float) -> None:
    """A wait without an end, or without a beginning, cannot be asked for."""
    with pytest.raises(InvalidOption, match="seconds above 0"):
        Patience(timeout_s=seconds)


@pytest.mark.parametrize("timeout_s", [0.05, 0.5])
def test_no_wait_goes_beyond_its_deadline(timeout_s: float) -> None:
    """A wait ends at the deadline: not before, and hardly after."""
    groups = started(size=2)
    began_s = time.monotonic()
    with pytest.raises(RankMissing):
        save(groups[1], "save 1", patience=Patience(timeout_s=timeout_s))
    assert timeout_s <= time.monotonic() - began_s < timeout_s + 0.5

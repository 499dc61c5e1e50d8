"""Ranks that come late, call something else or fail before they call: with which operation a call ends, and who meets whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.looks import looks
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.errors import InvalidPath, OperationFailed, RankMissing
from tests.coord.conftest import Connect
from tests.coord.thread_ranks import LONG, SHORT, failures, make_groups, run_group, run_ranks, save

SAVED = b"table 0 planned; table 1 planned; table 2 planned"
WENT_WRONG = "capture: ValueError: capture went wrong"
NOT_HEARD = "RankMissing: not heard of"


def started(connect: Callable[[], Any] | None = None) -> list[Group]:
    """Groups of three ranks that have already had operation 1 together."""
    groups = make_groups(3, connect or MemoryKeyValueStore().clone)
    run_group(groups, lambda group: save(group, "save 0"))
    return groups


def attempt(group: Group, subject: str, **kwargs: Any) -> Any:
    """What the call returns, or its error."""
    try:
        return save(group, subject, **kwargs)
    except OperationFailed as error:
        return error


def attempt_while(group: Group, sequence: int, first: str, second: str, *, coordinator: Group) -> list[Any]:
    """Two calls one after the other, once the coordinator has begun operation number `sequence`."""
    begin = coordinator._keys_of(sequence).begin
    assert any(coordinator._store.get(begin) for _ in looks(LONG, num_ranks=1))
    return [attempt(group, first), attempt(group, second)]


def refuse(group: Group) -> Any:
    """A call that fails on this rank before it can say what it is."""
    try:
        group.refuse(InvalidPath("no path"), patience=LONG)
    except InvalidPath as error:
        return error


def test_a_late_rank_is_not_put_into_a_later_call(connect: Connect) -> None:
    """A call that failed and is made again under the same name: who is late fails as the others did, then meets them."""
    groups = started(connect)
    early = run_group(groups[:2], lambda group: save(group, "save", fault="capture", faulty=0))
    again = [lambda group=group: save(group, "save") for group in groups[:2]]
    *on_time, (late, met) = run_ranks([*again, lambda: attempt_while(groups[2], 3, "save", "save", coordinator=groups[0])])
    assert [{0: WENT_WRONG}] * 3 == failures([*early, late])
    assert [SAVED] * 3 == [*on_time, met]


@pytest.mark.parametrize("ahead", [(0,), (0, 1), (1, 2)])
def test_a_rank_may_be_many_failures_behind(ahead: tuple[int, ...]) -> None:
    """However fast others fail again and again under one name, each call of a late rank ends as the same one of theirs."""
    groups = started()
    late = [group for group in groups if group.rank not in ahead]
    fault = {"fault": "capture", "faulty": ahead[0]}
    first = [run_group([groups[rank] for rank in ahead], lambda group: save(group, "save", **fault)) for _ in range(9)]
    then = [run_group(late, lambda group: save(group, "save")) for _ in range(9)]
    assert [[{ahead[0]: WENT_WRONG}] * 3] * 9 == [failures([*a, *b]) for a, b in zip(first, then, strict=True)]
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save"))


def test_a_rank_that_was_missing_joins_the_next_try(connect: Connect) -> None:
    """A rank for want of which the others gave up takes part when they try the same again."""
    groups = started(connect)
    assert [{2: f"table: {NOT_HEARD} within 0.4 s"}] * 2 == failures(
        run_group(groups[:2], lambda group: save(group, "save", patience=SHORT))
    )
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save"))


def test_a_third_call_ends_with_the_mismatch_of_two() -> None:
    """Of three ranks that call three things the last one finds that the others have failed, and meets them in the next call."""
    groups = started()
    two = run_ranks([lambda: save(groups[0], "save a"), lambda: save(groups[1], "save b")])
    after = [lambda group=group: save(group, "save 2") for group in groups[:2]]
    *on_time, (late, met) = run_ranks([*after, lambda: attempt_while(groups[2], 3, "save c", "save 2", coordinator=groups[0])])
    assert [failures(two)[0]] * 3 == failures([*two, late])
    assert [SAVED] * 3 == [*on_time, met]


def test_a_mismatch_of_others_keeps_nobody_from_the_next_call() -> None:
    """A rank that did not come to the call in which two others differed joins the one that they make now."""
    groups = started()
    run_ranks([lambda: save(groups[0], "save a"), lambda: save(groups[1], "save b")])
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save 2"))


def test_a_rank_too_late_for_the_first_call_fails_alone(connect: Connect) -> None:
    """The others are in the next call already: it is told at once what they do, and its next call meets them in it."""
    groups = make_groups(3, connect)
    early = run_group(groups[:2], lambda group: save(group, "save 1", patience=SHORT))
    after = [lambda group=group: save(group, "save 2") for group in groups[:2]]
    *on_time, (late, met) = run_ranks([*after, lambda: attempt_while(groups[2], 2, "save 1", "save 2", coordinator=groups[0])])
    assert [{2: f"begin: {NOT_HEARD} within 0.4 s"}] * 2 == failures(early)
    assert (RankMissing, [2]) == (type(late), list(late.failures))
    assert "the others had operations without it and are in 'save 2' by now" in str(late)
    assert [SAVED] * 3 == [*on_time, met]


def test_a_rank_two_calls_late_for_the_first_one_catches_up() -> None:
    """For each call that the others had without it, one of its own fails."""
    groups = make_groups(3, MemoryKeyValueStore().clone)
    for step in (1, 2):
        run_group(groups[:2], lambda group, step=step: save(group, f"save {step}", patience=SHORT))
    late = [lambda: save(groups[2], "save 1"), lambda: save(groups[2], "save 2"), lambda: save(groups[2], "save 3")]
    *on_time, found = run_ranks(
        [*(lambda group=group: save(group, "save 3") for group in groups[:2]), lambda: [run_ranks([act])[0] for act in late]]
    )
    assert [RankMissing, RankMissing, bytes] == [type(one) for one in found]
    assert [SAVED] * 3 == [*on_time, found[-1]]


def test_a_coordinator_too_late_for_the_first_call_fails_alone(connect: Connect) -> None:
    """The others have given up waiting to be let in: its first call fails for want of itself, and the next one meets them."""
    groups = make_groups(3, connect)
    early = run_group(groups[1:], lambda group: save(group, "save 1", patience=SHORT))
    after = [lambda group=group: save(group, "save 2") for group in groups[1:]]
    (late, met), *on_time = run_ranks([lambda: [attempt(groups[0], "save 1"), attempt(groups[0], "save 2")], *after])
    assert [{0: f"begin: {NOT_HEARD} within 0.4 s"}] * 2 == failures(early)
    assert [{0: f"begin: {NOT_HEARD} in time"}] == failures([late])
    assert [SAVED] * 3 == [*on_time, met]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("failed", range(3))
def test_an_error_before_the_call_ends_it_on_all_ranks(failed: int, is_first: bool) -> None:
    """A rank that cannot say what it calls fails the call of the others, with its error's class; the next call works."""
    groups = make_groups(3, MemoryKeyValueStore().clone) if is_first else started()
    results = run_group(groups, lambda group: refuse(group) if group.rank == failed else attempt(group, "save 1"))
    assert [{failed: "call: InvalidPath: no path"}] * 3 == failures(results)
    assert [True] * 3 == [isinstance(result, InvalidPath) for result in results]
    assert "no path" == str(results[failed].__cause__)
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save 2"))


@pytest.mark.parametrize("failed", range(3))
def test_an_error_before_the_call_waits_for_the_others(failed: int) -> None:
    """Who comes later finds it, whatever its call is about, and one failed call ends no further one."""
    groups = started()
    others = [group for group in groups if group.rank != failed]
    results = [refuse(groups[failed]), *run_group(others, lambda group: save(group, f"save {group.rank}"))]
    assert [{failed: "call: InvalidPath: no path"}] * 3 == failures(results)
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save 2"))


def test_an_error_before_the_call_of_a_process_alone() -> None:
    """In a group of one rank the error stays what it is."""
    error = InvalidPath("no path")
    with pytest.raises(InvalidPath) as raised:
        make_lone_group().refuse(error)
    assert raised.value is error

"""Errors of several ranks: of the class of the error that caused them, so that one handler serves one rank and many."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from anyshard import errors
from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.errors import (
    AnyshardError,
    CheckpointDamaged,
    CheckpointNotFound,
    Difference,
    InvalidAppState,
    KeyValueStoreLost,
    LoadInterrupted,
    Mismatch,
    OperationFailed,
    StateMismatch,
    StorageFull,
    StructureChanged,
    UnsupportedValue,
    make_failure,
    name_kind,
)
from tests.coord.conftest import Connect
from tests.coord.thread_ranks import LONG, failures, make_groups, run_group

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AnyshardError)]
SINGLE = [kind for kind in KINDS if not issubclass(kind, OperationFailed)]
EXAMPLES: list[AnyshardError] = [
    CheckpointDamaged("cut", file="blob-1"),
    CheckpointNotFound("nothing at /a"),
    InvalidAppState("clash"),
    LoadInterrupted("half", addresses=("a", "b")),
    StateMismatch("/a", (Difference(Mismatch.SHAPE, "model/w", "[2]", "[3]"),), "Pass exclude=."),
    StorageFull("no room", file="blob-1", errno=28),
    UnsupportedValue("a lock", address="extra/lock"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_of_one_rank_travel(error: AnyshardError) -> None:
    """An error comes out of another process with its message, its attributes and its notes."""
    error = copy.copy(error)
    error.add_note("seen on host 7")
    again = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error), error.args, vars(error)) == (type(again), str(again), again.args, vars(again))
    assert getattr(error, "errno", None) == getattr(again, "errno", None)


def fail_with(error: Exception, faulty: int = 1) -> Callable[[Group], None]:
    """An operation in which one rank has this error, in a phase."""

    def act(group: Group) -> None:
        with group.agree("load 1", patience=LONG) as agreement, agreement.phase("plan"):
            if group.rank == faulty:
                raise error
            agreement.receive("plan") if group.rank else agreement.collect("table")

    return act


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("faulty", [0, 1])
def test_every_rank_can_catch_the_class(error: AnyshardError, faulty: int) -> None:
    """The error of one rank is of its class on all, and an `OperationFailed`; the rank that had it keeps it as the cause."""
    results = run_group(make_groups(3, MemoryKeyValueStore().clone), fail_with(error, faulty))
    assert [(True, True)] * 3 == [(isinstance(result, type(error)), isinstance(result, OperationFailed)) for result in results]
    assert [{faulty: f"plan: {type(error).__name__}: {error}"}] * 3 == failures(results)
    assert error is results[faulty].__cause__


def test_the_class_goes_through_every_store(connect: Connect) -> None:
    """So it is over every key-value store."""
    results = run_group(make_groups(2, connect), fail_with(CheckpointNotFound("nothing")))
    assert [True, True] == [isinstance(result, FileNotFoundError) for result in results]


@pytest.mark.parametrize("kind", SINGLE, ids=lambda kind: kind.__name__)
def test_each_class_has_its_error_of_many_ranks(kind: type[AnyshardError]) -> None:
    """It is of both classes, says who failed, is one class however often it is made, and travels to other processes."""
    error = make_failure("load 1 failed:", {3: "plan: X: bad", 1: "plan: X: worse"}, kinds=[kind.__name__])
    again, copied = pickle.loads(pickle.dumps(error)), copy.copy(error)
    assert issubclass(type(error), kind)
    assert isinstance(error, OperationFailed)
    assert [type(error)] * 2 == [type(again), type(copied)]
    assert ["load 1 failed:\n  rank 1: plan: X: worse\n  rank 3: plan: X: bad"] * 3 == [str(error), str(again), str(copied)]
    assert f"{type(error).__name__}('load 1 failed:\\n" == repr(error)[: len(type(error).__name__) + 18]
    assert ({1: "plan: X: worse", 3: "plan: X: bad"}, "load 1 failed:") == (again.failures, again.headline)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda error: type(error).__name__)
def test_attributes_of_one_rank_are_empty(example: AnyshardError) -> None:
    """A handler that reads an attribute finds that nothing is known of it, not an `AttributeError`."""
    error: Any = make_failure("", {}, kinds=[name_kind(example)])
    empty = [getattr(error, name) for name in vars(example)]
    assert [] == [value for value in empty if value]
    assert getattr(error, "errno", None) is None


@pytest.mark.parametrize("kind", [OperationFailed, StructureChanged, KeyValueStoreLost, errors.RankMissing])
def test_errors_of_many_ranks_stay_what_they_are(kind: type[OperationFailed]) -> None:
    """They are already what all ranks raise."""
    assert kind is type(make_failure("", {}, kinds=[kind.__name__]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([CheckpointNotFound("a"), CheckpointNotFound("b")], CheckpointNotFound),
        ([CheckpointNotFound("a"), InvalidAppState("b")], OperationFailed),
        ([ValueError("a"), ValueError("b")], OperationFailed),
        ([KeyError("a"), InvalidAppState("b")], OperationFailed),
        ([], OperationFailed),
    ],
)
def test_errors_of_several_ranks_are_of_what_they_have_in_common(given: list[Exception], expected: type) -> None:
    """If the ranks that failed did not fail alike, the error is of no class but its own."""
    error = make_failure("", {}, kinds=map(name_kind, given))
    assert (expected is OperationFailed) == (type(error) is OperationFailed)
    assert isinstance(error, expected)


def test_the_class_is_found_behind_others() -> None:
    """A store's own class counts as the public one that it derives from, and an error that was raised again as what it was."""

    class DiskFull(StorageFull):
        pass

    again = make_failure("", {1: "x"}, kinds=["StorageFull"])
    lost = KeyValueStoreLost("", {})
    assert ["StorageFull", "StorageFull", "OperationFailed"] == [
        name_kind(DiskFull("", file="")),
        name_kind(again),
        name_kind(lost),
    ]


def test_the_coordinator_may_speak_for_ranks_that_failed_alike() -> None:
    """Failures gathered from many ranks keep their common class on the way to all."""
    error = make_failure("", {1: "adapt: StateMismatch: a", 2: "adapt: StateMismatch: b"}, kinds=["StateMismatch"] * 2)
    results = run_group(make_groups(3, MemoryKeyValueStore().clone), fail_with(error, 0))
    assert [True] * 3 == [isinstance(result, StateMismatch) for result in results]
    assert [{1: "adapt: StateMismatch: a", 2: "adapt: StateMismatch: b"}] * 3 == failures(results)


def test_a_lone_rank_raises_the_error_itself() -> None:
    """One rank has one error, with its attributes."""
    error = CheckpointDamaged("cut", file="blob-1")
    with pytest.raises(CheckpointDamaged) as caught, make_lone_group().agree("load 1"):
        raise error
    assert error is caught.value

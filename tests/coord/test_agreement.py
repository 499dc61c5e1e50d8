"""One agreement among thread ranks, over every kind of key-value store: messages, faults in every phase, the decision."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest

from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.verdict import Decision
from anyshard.errors import OperationFailed, RankMissing, StructureChanged
from tests.coord.conftest import Connect
from tests.coord.thread_ranks import LONG, failures, make_groups, run_group, save

PUBLISHED = b"table 0 planned; table 1 planned; table 2 planned"


def test_every_kind_of_message_arrives(connect: Connect) -> None:
    """Posts reach the coordinator in the order of the group, hand-outs their ranks, announcements all; again and again."""
    groups = make_groups(3, connect)
    for step in range(4):
        assert [PUBLISHED] * 3 == run_group(groups, lambda group, step=step: save(group, f"save {step}"))


def test_big_messages(connect: Connect) -> None:
    """Messages of 20 MB arrive whole, and so do empty ones."""
    big = bytes(range(256)) * (20_000_000 // 256) + b"end"

    def act(group: Group) -> tuple[bool, bytes]:
        with group.agree("save 1", patience=LONG) as agreement:
            agreement.post("big", big)
            agreement.post("empty", b"")
            if group.is_coordinator:
                agreement.announce("big", agreement.collect("big")[1])
                agreement.announce("empty", b"".join(agreement.collect("empty")))
            is_equal = agreement.hear("big") == big
            nothing = agreement.hear("empty")
            agreement.decide()
            return is_equal, nothing

    assert [(True, b"")] * 2 == run_group(make_groups(2, connect), act)


def test_id_is_shared_and_new(connect: Connect) -> None:
    """All ranks learn one id per operation, another for each operation."""

    def act(group: Group) -> str:
        with group.agree("load 1", patience=LONG) as agreement:
            operation = agreement.hear_id()
            agreement.decide()
            return operation

    groups = make_groups(2, connect)
    first, second = run_group(groups, act), run_group(groups, act)
    assert (2, 2) == (len({first[0], second[0]}), len({*first, *second}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "faulty"), [("capture", 0), ("capture", 1), ("capture", 2), ("plan", 0), ("write", 0), ("write", 1), ("write", 2)]
)
def test_a_failure_is_raised_on_every_rank(connect: Connect, fault: str, faulty: int) -> None:
    """An error in any phase of any rank ends the operation on all ranks alike, soon; the next operation works."""
    groups = make_groups(3, connect)
    began_s = time.monotonic()
    results = run_group(groups, lambda group: save(group, "save 1", fault=fault, faulty=faulty))
    assert [{faulty: f"{fault}: ValueError: {fault} went wrong"}] * 3 == failures(results)
    assert time.monotonic() - began_s < 5
    assert [faulty] == [rank for rank, result in enumerate(results) if isinstance(result.__cause__, ValueError)]
    assert [PUBLISHED] * 3 == run_group(groups, lambda group: save(group, "save 2"))


@pytest.mark.slow
def test_a_failure_is_seen_within_a_second() -> None:
    """A rank that has waited for a while still hears of a failure at once."""
    groups = make_groups(2, MemoryKeyValueStore().clone)
    times: dict[int, float] = {}

    def act(group: Group) -> None:
        try:
            with group.agree("save 1", patience=LONG) as agreement:
                if group.is_coordinator:
                    agreement.collect("durable")
                threading.Event().wait(2.0)
                times[1] = time.monotonic()
                agreement.fail("write", OSError("disk"))
        finally:
            times.setdefault(group.rank, time.monotonic())

    assert [{1: "write: OSError: disk"}] * 2 == failures(run_group(groups, act))
    assert 0 <= times[0] - times[1] < 1


def test_failure_after_the_decision(connect: Connect) -> None:
    """If the coordinator fails after the commit, all hear of it, and know that storage alone can tell what exists."""
    decisions: dict[int, Decision | None] = {}

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement:
            try:
                agreement.post("durable", b"")
                if group.is_coordinator:
                    agreement.collect("durable")
                agreement.decide()
                with agreement.phase("publish"):
                    if group.is_coordinator:
                        raise OSError("no answer")
                agreement.hear("published")
            finally:
                decisions[group.rank] = agreement.decision

    results = run_group(make_groups(2, connect), act)
    assert [{0: "publish: OSError: no answer"}] * 2 == failures(results)
    assert {0: Decision.UNKNOWN, 1: Decision.UNKNOWN} == decisions


def test_after_the_decision_no_other_rank_can_stop_it(connect: Connect) -> None:
    """Once it is decided, a failing rank fails alone: the others finish."""

    def act(group: Group) -> Any:
        with group.agree("save 1", patience=LONG) as agreement:
            agreement.decide()
            if group.rank == 1:
                raise ValueError("too late")
            if group.is_coordinator:
                agreement.announce("published", b"yes")
            return agreement.hear("published"), agreement.decision

    results = run_group(make_groups(3, connect), act)
    assert [(b"yes", Decision.COMMIT)] * 2 == [results[0], results[2]]
    assert [{1: "begin: ValueError: too late"}] == failures(results[1:2])


def test_decision_of_an_abort_is_known_everywhere() -> None:
    """After a failure every rank reads `ABORT`, its licence to delete its own files."""
    decisions = []

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement:
            try:
                agreement.post("table", b"")
                if group.is_coordinator:
                    agreement.announce("plan", b"".join(agreement.collect("table")))
                agreement.hear("plan")
                if group.rank == 1:
                    agreement.fail("write", OSError("disk"))
                agreement.decide() if group.rank else agreement.collect("durable")
            finally:
                decisions.append(agreement.decision)

    assert [{1: "write: OSError: disk"}] * 3 == failures(run_group(make_groups(3, MemoryKeyValueStore().clone), act))
    assert [Decision.ABORT] * 3 == decisions


def test_an_error_may_speak_for_several_ranks() -> None:
    """The coordinator gives up with an error that names others; every rank raises that kind of error."""

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement, agreement.phase("plan"):
            if group.is_coordinator:
                raise StructureChanged("", {1: "plan: new: a/b", 2: "plan: gone: a/c"})
            agreement.receive("plan")

    results = run_group(make_groups(3, MemoryKeyValueStore().clone), act)
    assert [StructureChanged] * 3 == [type(result) for result in results]
    assert [{1: "plan: new: a/b", 2: "plan: gone: a/c"}] * 3 == failures(results)


def test_an_error_outside_of_phases_is_one_too() -> None:
    """An error that leaves the context gives the operation up, by the name of the last phase."""

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement:
            with agreement.phase("write"):
                pass
            if group.rank == 1:
                raise KeyError("x")
            agreement.collect("durable")

    assert [{1: "write: KeyError: 'x'"}] * 2 == failures(run_group(make_groups(2, MemoryKeyValueStore().clone), act))


def test_an_interrupt_of_the_coordinator_after_the_decision() -> None:
    """The others do not wait for a word that will not come."""

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement:
            agreement.decide()
            if group.is_coordinator:
                raise KeyboardInterrupt
            agreement.hear("published")

    first, second = run_group(make_groups(2, MemoryKeyValueStore().clone), act)
    assert (KeyboardInterrupt, [{0: "begin: KeyboardInterrupt: "}]) == (type(first), failures([second]))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_stays_what_it_is(interrupt: type[BaseException]) -> None:
    """Ctrl-C is raised as itself where it came; the other ranks hear of it."""

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement:
            if group.rank == 1:
                raise interrupt("stop")
            agreement.collect("durable")

    first, second = run_group(make_groups(2, MemoryKeyValueStore().clone), act)
    assert ({1: f"begin: {interrupt.__name__}: stop"}, interrupt) == (first.failures, type(second))


def test_leaving_undecided_is_a_failure() -> None:
    """A rank that leaves without a decision does not let the others wait for it."""

    def act(group: Group) -> None:
        with group.agree("save 1", patience=LONG) as agreement:
            if group.is_coordinator:
                agreement.collect("durable")

    first, second = run_group(make_groups(2, MemoryKeyValueStore().clone), act)
    assert ([{1: "begin: RuntimeError: left the operation before it was decided"}], None) == (failures([first]), second)


def test_check_notices_a_failure() -> None:
    """During long work a rank can ask whether the others have given up."""
    groups = make_groups(2, MemoryKeyValueStore().clone)
    run_group(groups, save)

    with pytest.raises(OperationFailed, match="rank 1: write: ValueError: bad"), groups[0].agree("save 2") as agreement:
        agreement.check()
        with pytest.raises(OperationFailed), groups[1].agree("save 2") as other:
            other.fail("write", ValueError("bad"))
        agreement.check()


def test_errors_travel() -> None:
    """An error of an operation can be sent to another process, as launchers do with errors."""
    error = RankMissing("save 1 was given up on all 4 ranks:", {3: "write: RankMissing: not heard of within 2 s"})
    again = pickle.loads(pickle.dumps(error))
    assert (RankMissing, str(error), error.failures) == (type(again), str(again), again.failures)
    assert isinstance(error, TimeoutError)
    assert "rank 3: write:" in str(error)


def test_many_failures_are_cut_short_in_the_message() -> None:
    """A message names 20 ranks; the attribute has all."""
    error = OperationFailed("save 1 failed:", dict.fromkeys(range(5000), "write: OSError: disk"))
    assert (22, "  ... and 4980 more", 5000) == (len(str(error).splitlines()), str(error).splitlines()[-1], len(error.failures))


class TestLoneGroup:
    """A group of one rank takes the same road."""

    def test_all_messages_arrive(self) -> None:
        """What a lone rank says to itself, it hears."""
        assert save(make_lone_group()) == b"table 0 planned"

    def test_an_error_stays_what_it_is(self) -> None:
        """There is nobody to tell, so the caller gets its own error."""
        with pytest.raises(ValueError, match="^write went wrong$") as caught:
            save(make_lone_group(), fault="write", faulty=0)
        assert caught.value.__cause__ is None

    def test_it_works_after_a_failure(self) -> None:
        """The next operation is a new one."""
        group = make_lone_group(7)
        with pytest.raises(ValueError, match="capture"):
            save(group, fault="capture", faulty=0)
        assert (b"table 0 planned", (7,)) == (save(group), group.ranks)

    def test_it_needs_no_thread_and_no_pause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is waited for: no look is followed by a pause."""
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("paused"))
        assert save(make_lone_group()) == b"table 0 planned"

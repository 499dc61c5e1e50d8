"""The group over its whole life: restarts under an old store, keys that go, threads and descriptors that stay few, many ranks."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from anyshard.coord.bounded import Caller
from anyshard.coord.group import Group
from anyshard.coord.looks import Patience
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.errors import KeyValueStoreLost, OperationFailed, RankMissing
from tests.coord.conftest import Connect, connect_tcp, serve_tcp
from tests.coord.thread_ranks import LONG, SHORT, failures, make_groups, run_group, save

SAVED = b"table 0 planned; table 1 planned; table 2 planned"


class CountingStore(MemoryKeyValueStore):
    """Counts what reaches the server: requests by verb, keys asked for, bytes stored."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def set(self, key: str, value: bytes) -> None:
        self.counts.update({"set": 1, "nbytes": len(value)})
        super().set(key, value)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        self.counts.update({"set_if_absent": 1, "nbytes": len(value)})
        return super().set_if_absent(key, value)

    def get(self, key: str) -> bytes | None:
        self.counts.update({"asked": 1})
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        self.counts.update({"asked": len(keys)})
        return super().get_many(keys)

    def delete(self, key: str) -> None:
        self.counts.update({"delete": 1})
        super().delete(key)


# ---------------------------------------------------------------------------------------------------------- incarnations


def test_a_restarted_job_does_not_take_old_keys_for_its_own(connect: Connect) -> None:
    """Under a store that outlives the job, decisions and messages of the former job are not read."""
    former = make_groups(3, connect)
    run_group(former, lambda group: save(group, "save 1"))
    run_group(former, lambda group: save(group, "save 2", fault="write", faulty=1))
    again = make_groups(3, connect)
    assert [SAVED] * 3 == run_group(again, lambda group: save(group, "save 2"))
    assert [SAVED] * 3 == run_group(again, lambda group: save(group, "save 3"))


def test_an_old_welcome_is_not_taken(connect: Connect) -> None:
    """A rank of the new job that comes first waits for its own coordinator, whatever the former one has left."""
    run_group(make_groups(2, connect), lambda group: save(group, "save 1"))
    with pytest.raises(RankMissing, match="rank 0: begin"):
        save(make_groups(2, connect)[1], "save 1", patience=SHORT)


def test_an_old_hello_is_not_taken_for_presence(connect: Connect) -> None:
    """The coordinator of the new job does not go on for ranks that were there in the former one."""
    run_group(make_groups(2, connect), lambda group: save(group, "save 1"))
    with pytest.raises(RankMissing, match="rank 1: begin"):
        save(make_groups(2, connect)[0], "save 1", patience=SHORT)


@pytest.mark.parametrize("num_before", [1, 7])
def test_a_rank_that_comes_again_is_let_in(num_before: int) -> None:
    """One rank that has lost its memory of the group takes part in the next operation."""
    groups = make_groups(3, MemoryKeyValueStore().clone)
    for step in range(num_before):
        run_group(groups, lambda group, step=step: save(group, f"save {step}"))
    groups[2] = Group(2, (0, 1, 2), groups[0]._store)
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save 9"))
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save 10"))


def test_a_coordinator_that_comes_again_costs_one_operation() -> None:
    """The others fail for want of the coordinator they knew, and join the new one at the next operation."""
    groups = make_groups(3, MemoryKeyValueStore().clone)
    run_group(groups, lambda group: save(group, "save 1"))
    groups[0] = Group(0, (0, 1, 2), groups[0]._store)
    run_group(groups, lambda group: save(group, "save 2", patience=SHORT))
    assert [SAVED] * 3 == run_group(groups, lambda group: save(group, "save 3"))


def test_groups_do_not_disturb_each_other(connect: Connect) -> None:
    """Groups of other ranks over the same store are other worlds, also if they share ranks."""
    whole = make_groups(3, connect)
    part = [Group(rank, (0, 2), connect()) for rank in range(2)]
    for step in range(2):
        assert [SAVED] * 3 == run_group(whole, lambda group, step=step: save(group, f"save {step}"))
        assert [b"table 0 planned; table 1 planned"] * 2 == run_group(part, lambda group, step=step: save(group, f"save {step}"))


def test_operations_may_overlap() -> None:
    """A second operation may begin before the first is decided, and end before it."""

    def act(group: Group) -> tuple[bytes, bytes]:
        with group.agree("save 1", patience=LONG) as first:
            first.post("durable", b"1")
            later = save(group, "save 2")
            if group.is_coordinator:
                first.announce("published", b"".join(first.collect("durable")))
            first.decide()
            return first.hear("published"), later

    assert [(b"111", SAVED)] * 3 == run_group(make_groups(3, MemoryKeyValueStore().clone), act)


# ------------------------------------------------------------------------------------------------------------ what is left


def test_keys_do_not_add_up() -> None:
    """After 100 operations, some of them failed, there are as many keys as after ten."""
    store = MemoryKeyValueStore()
    groups = make_groups(3, store.clone)
    counts = []
    for step in range(100):
        fault = {"fault": "write", "faulty": step % 3} if step % 5 == 1 else {}
        run_group(groups, lambda group, step=step, fault=fault: save(group, f"save {step}", **fault))
        counts.append(len(store.keys()))
    assert counts[9::10] == [counts[9]] * 10
    assert counts[9] < 60


def test_keys_of_missed_operations_go_too() -> None:
    """Operations that only some ranks came to leave nothing either."""
    store = MemoryKeyValueStore()
    groups = make_groups(2, store.clone)
    counts = []
    for round_ in range(3):
        run_group(
            groups[round_ % 2 :][:1], lambda group, round_=round_: save(group, f"{round_}", patience=Patience(timeout_s=0.05))
        )
        for step in range(6):
            run_group(groups, lambda group, name=f"{round_} {step}": save(group, name))
        counts.append(len(store.keys()))
    assert [counts[0]] * 3 == counts


def test_threads_and_descriptors_do_not_add_up() -> None:
    """A group over a connection costs one thread, however many operations it has, and gives it back."""

    def measure() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    server = serve_tcp()
    groups = make_groups(2, lambda: connect_tcp(server))
    run_group(groups, save)
    first = measure()
    for step in range(20):
        run_group(groups, lambda group, step=step: save(group, f"save {step}"))
    assert first == measure()
    served = [thread for thread in threading.enumerate() if thread.name == "anyshard-coord"]
    groups.clear()
    gc.collect()
    for thread in served:
        thread.join(10)
    assert [] == [thread for thread in threading.enumerate() if thread.name == "anyshard-coord"]


# ---------------------------------------------------------------------------------------------------------------- calls


class HangingStore(MemoryKeyValueStore):
    """A store whose server freezes when `frozen` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = threading.Event()
        self.thawed = threading.Event()

    @property
    def can_hang(self) -> bool:
        return True

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        if self.frozen.is_set():
            self.thawed.wait(30)
        return super().get_many(keys)


def test_a_frozen_store_is_an_error_in_time() -> None:
    """A call that does not come back ends the operation, and leaves no doubt that nothing is known of the decision."""
    store = HangingStore()
    group = Group(0, (0, 1), store)
    store.frozen.set()
    with pytest.raises(KeyValueStoreLost, match=r"within 0\.4 s, found none"):
        group.agree("save 1", patience=SHORT)
    store.thawed.set()
    assert isinstance(KeyValueStoreLost("", {}), OperationFailed)


def test_an_error_is_not_lost_with_the_store() -> None:
    """If a rank fails and cannot tell the others, its own error is still the cause of what it raises."""
    store = HangingStore()
    groups = make_groups(2, lambda: store)

    def act(group: Group) -> Any:
        with group.agree("save 1", patience=SHORT) as agreement:
            if group.is_coordinator:
                return store.thawed.wait(30)
            try:
                store.set_if_absent = lambda key, value: store.thawed.wait(30)  # type: ignore[method-assign, assignment]
                agreement.fail("write", OSError("disk"))
            finally:
                store.thawed.set()

    results = run_group(groups, act)
    assert [{1: "write: OSError: disk"}] == failures(results[1:])
    assert ("the other ranks do not hear of it" in str(results[1]), OSError) == (True, type(results[1].__cause__))


def test_a_caller_passes_errors_on() -> None:
    """What a call raises on its thread, whoever asked raises; the thread goes on."""
    caller = Caller()

    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        caller.ask(fail, 10)
    assert caller.ask(lambda: 7, 10) == 7


# ------------------------------------------------------------------------------------------------------------ many ranks


@pytest.mark.slow
def test_a_thousand_ranks() -> None:
    """An operation of 1,000 ranks stores one message per rank and a handful more, and takes seconds here."""
    size, payload = 1000, b"x" * 100
    store = CountingStore()
    groups = make_groups(size, store.clone)

    def act(group: Group, subject: str) -> bytes:
        with group.agree(subject, patience=Patience(timeout_s=50)) as agreement:
            agreement.post("durable", payload)
            if group.is_coordinator:
                agreement.announce("plan", b"%d" % sum(map(len, agreement.collect("durable"))))
            agreement.decide()
            return agreement.hear("plan")

    assert {b"100000"} == set(run_group(groups, lambda group: act(group, "save 1")))
    store.counts.clear()
    assert {b"100000"} == set(run_group(groups, lambda group: act(group, "save 2")))
    counts = store.counts
    # Posts, begin, newest, announcement, and the record of whom the coordinator waits for (at most four a second).
    assert size + 3 <= counts["set"] < size + 200
    assert (1, True) == (counts["set_if_absent"], counts["delete"] <= 1)
    assert counts["nbytes"] < size * 104 + 1000 + 5000 * (counts["set"] - size - 3)
    assert counts["asked"] < 300 * size


# ------------------------------------------------------------------------------------------------------------ calls left out


@pytest.mark.parametrize("behind", [0, 1])
def test_a_call_that_one_rank_leaves_out_is_caught_up_with(connect: Connect, behind: int) -> None:
    """A rank that is one call ahead fails with the others once; they pass over the call that it has made, and all meet again."""
    groups = make_groups(3, connect)
    run_group(groups, lambda group: save(group, "save 1"))
    found = run_group(
        groups, lambda group: [_tell(group, f"save {step}") for step in range(2, 6) if step != 2 or group.rank != behind]
    )
    assert [SAVED] * 3 == [outcomes[-1] for outcomes in found]
    assert [["failed", "failed", SAVED, SAVED]] * 2 == [outcomes for rank, outcomes in enumerate(found) if rank != behind]
    assert ["failed", SAVED, SAVED] == found[behind]


@pytest.mark.parametrize(("behind", "num"), [(0, 2), (1, 2), (1, 3), (0, 7)])
def test_calls_that_one_rank_leaves_out_in_a_row(behind: int, num: int) -> None:
    """Ranks of which one left out n calls meet again after n more that fail, and keep nothing of that."""
    groups = make_groups(3, MemoryKeyValueStore().clone)
    steps = range(2, 3 + 2 * num)
    found = run_group(
        groups, lambda group: [_tell(group, f"save {step}") for step in steps if step > 1 + num or group.rank != behind]
    )
    assert [["failed"] * (2 * num) + [SAVED]] * 2 == [outcomes for rank, outcomes in enumerate(found) if rank != behind]
    assert ["failed"] * num + [SAVED] == found[behind]
    assert [[]] * 3 == [list(group._crossed) for group in groups]


def test_calls_that_are_tried_again_after_one_was_left_out() -> None:
    """A rank that tries a call again after the other one has tried it twice passes over it twice, and they meet after that."""
    groups = make_groups(2, MemoryKeyValueStore().clone)
    steps = {0: (2, 2, 3, 3, 4), 1: (3, 3, 4)}
    found = run_group(groups, lambda group: [_tell(group, f"save {step}") for step in steps[group.rank]])
    saved = b"table 0 planned; table 1 planned"
    assert [["failed"] * 4 + [saved], ["failed"] * 2 + [saved]] == found


def test_what_is_kept_of_calls_left_out_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that never make the same call fail each time, in time, and remember the last such calls only."""
    monkeypatch.setattr("anyshard.coord.group._MAX_CROSSED", 3)
    groups = make_groups(2, MemoryKeyValueStore().clone)
    found = run_group(groups, lambda group: [_tell(group, f"save {step} of rank {group.rank}") for step in range(6)])
    assert [["failed"] * 6] * 2 == found
    assert [3, 3] == [len(group._crossed) for group in groups]


def _tell(group: Group, subject: str) -> Any:
    try:
        return save(group, subject)
    except OperationFailed:
        return "failed"

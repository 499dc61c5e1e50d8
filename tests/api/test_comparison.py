"""What ranks hold alike, read once and compared later: thread ranks with app states of their own, no storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyshard.adapters.capture import capture
from anyshard.adapters.per_rank import PerRank
from anyshard.agreed_plan import AgreedPlan, Structure, describe_structure, plan_together, take_plan
from anyshard.comparison import Comparison, Held, Reading, Strictness, hold
from anyshard.coord.group import Group
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.errors import InvalidAppState, StorageError
from anyshard.records.captured import Captured
from anyshard.records.rank_messages import Durable, Question, read_message
from anyshard.records.values import ValueRegistry
from tests.coord.thread_ranks import LONG, make_groups, run_group

REGISTRY = ValueRegistry()
FULL, SAMPLED = (Strictness.of(check, "store", is_first=False) for check in ("full", "sample"))
OFF = Strictness.of("off", "store", is_first=False)


class Rank:
    """One of two ranks: its app state, taken apart, and its part of the plan of both."""

    def __init__(self, captured: Captured, structure: Structure, plan: AgreedPlan) -> None:
        self.captured = captured
        self.structure = structure
        self.plan = plan

    def hold(self, strictness: Strictness = FULL, check: Any = lambda: None) -> Held:
        """What it holds now."""
        reading = Reading("save of a/b", strictness, check)
        return hold(self.captured, self.plan, structure=self.structure, registry=REGISTRY, reading=reading)


def make_ranks(*states: dict[str, Any]) -> list[Rank]:
    """Ranks with these app states."""
    captured = [capture(of, registry=REGISTRY, rank=rank, world_size=len(states)) for rank, of in enumerate(states)]
    structures = [describe_structure(of, REGISTRY, world_size=len(states)) for of in captured]
    common, messages = plan_together(structures, max_blob_nbytes=1 << 30)
    plans = [
        take_plan(of, own, common=None if rank else common)
        for rank, (of, own) in enumerate(zip(messages, structures, strict=True))
    ]
    return list(map(Rank, captured, structures, plans))


def compare(ranks: list[Rank], held: list[Held], strictness: Strictness = FULL) -> list[Any]:
    """What the coordinator finds, or its error, and what the others are asked."""

    def act(group: Group) -> Any:
        mine, plan = held[group.rank], ranks[group.rank].plan
        with group.agree("save 1", patience=LONG) as agreement:
            comparison, found = Comparison(agreement, plan, strictness=strictness), None
            agreement.post("durable", Durable((), 0, *comparison.digest(mine)).encode())
            if plan.common is not None:
                posts = [read_message(post, Durable) for post in agreement.collect("durable")]
                agreement.announce("question", comparison.find_question(posts, plan.common)[0].encode())
            question = read_message(agreement.hear("question"), Question)
            if question.is_asked:
                comparison.answer(question, mine)
                found = comparison.judge(question) if group.is_coordinator else question
            agreement.decide()
            return found

    return run_group(make_groups(len(ranks), MemoryKeyValueStore().clone), act)


def make_state(rank: int = 0, *, at: int = -1) -> dict[str, Any]:
    """Two tensors, of which rank 1 may have another element in the long one, and a value."""
    tensors = {"v": torch.ones(3), "w": torch.arange(200_000.0)}
    if rank and at >= 0:
        tensors["w"][at] += 1
    return {"model": tensors, "extra": {"step": 7}}


@pytest.mark.parametrize("strictness", [FULL, SAMPLED, OFF], ids=["full", "sample", "off"])
def test_what_is_alike_asks_nothing(strictness: Strictness) -> None:
    """Ranks that hold the same bytes and values have nothing to explain, however they compare."""
    ranks = make_ranks(make_state(), make_state())
    assert [None, None] == compare(ranks, [rank.hold(strictness) for rank in ranks], strictness)


def test_a_changed_element_is_named() -> None:
    """One element that differs is found in full, and the error says where and between whom."""
    ranks = make_ranks(make_state(), make_state(1, at=77))
    failure, _ = compare(ranks, [rank.hold() for rank in ranks])
    assert isinstance(failure, InvalidAppState)
    assert "found other bytes: model/w: rank 0 against rank 1. Nothing was committed" in str(failure)


def test_later_changes_make_no_difference() -> None:
    """Training goes on once the replicas are read: what counts is what was held, also for the answer that names a difference."""
    states = [make_state(), make_state(1, at=77)]
    ranks = make_ranks(*states)
    held = [rank.hold() for rank in ranks]
    states[0]["model"]["v"].add_(1)
    states[1]["model"]["w"].zero_()
    assert "found other bytes: model/w: rank 0 against rank 1. Nothing" in str(compare(ranks, held)[0])


def test_off_reads_no_tensor() -> None:
    """Who compares no replicas reads none, not even those that are per rank; equal keys have equal values but for bytes."""

    def check() -> None:
        raise AssertionError("a tensor was read")

    ranks = make_ranks(*({"model": torch.full((3,), float(i)), "data": PerRank([torch.full((2,), i)], key=0)} for i in range(2)))
    held = [rank.hold(OFF, check) for rank in ranks]
    assert [{}, {}] == [of.rows for of in held]
    assert [None, None] == compare(ranks, held, OFF)


@pytest.mark.parametrize("value", [7, torch.ones(3)], ids=["value", "tensor"])
def test_per_rank_values_of_one_key_are_compared(value: object) -> None:
    """Ranks with equal keys that have not the same are told apart, after the app state has changed too."""
    ranks = make_ranks({"data": PerRank([value], key=0)}, {"data": PerRank([value, value], key=0)})
    held = [rank.hold() for rank in ranks]
    assert [("data",), Question((), values=True)] == compare(ranks, held)


def test_values_are_explained_by_leaves() -> None:
    """Which value within a part differs is taken from `leaves`, and only then."""
    ranks = make_ranks(*({"extra": [1, {"deep": {"loss": i}}], "other": {"a": {"b": i, "c": 0}}} for i in range(2)))
    assert ("extra", "other/a/b") == compare(ranks, [rank.hold() for rank in ranks])[0]


def test_reading_ends_with_the_failure_of_another_rank() -> None:
    """What `check` raises ends the reading, be it of replicas or of what is per rank."""

    def check() -> None:
        raise StorageError("rank 1 failed", file="blob")

    for state in (make_state(), {"data": PerRank(torch.ones(3), key=0)}):
        rank, _ = make_ranks(state, state)
        with pytest.raises(StorageError, match="rank 1 failed"):
            rank.hold(check=check)


def test_a_rank_alone_reads_nothing() -> None:
    """A rank that shares nothing with anybody holds digests of nothing."""

    def check() -> None:
        raise AssertionError("a tensor was read")

    (rank,) = make_ranks({**make_state(), "data": PerRank(torch.ones(3))})
    assert {} == rank.hold(check=check).rows

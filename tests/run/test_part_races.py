"""Who saves parts and who publishes them, in any order of their store calls, some of them dying on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.commit.publish_parts import Outcome, publish_parts, tidy_parts
from anyshard.commit.tombstone import delete_step
from anyshard.errors import AnyshardError
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, WrapperStore
from tests.commit.actors import Actor, Died
from tests.run.parts_scenes import BOTH, make_store, named_attempts, publish_both, save_all, save_part, seen_attempts

T = TypeVar("T")

pytestmark = pytest.mark.slow


def publish(store: Store) -> Outcome:
    """As the API does it, without any grace for readers."""
    outcome = publish_parts(store, BOTH)
    if outcome.is_new:
        tidy_parts(store, outcome.manifest, 0.0)
    return outcome


def save_over(role: str) -> Callable[[Store], object]:
    return partial(save_part, role=role, overwrite=True)


ACTS: Sequence[Callable[[Store], object]] = (publish, publish, save_over("actor"), save_over("actor"), save_over("critic"))
schedules = st.lists(st.integers(0, len(ACTS) - 1), max_size=150)
deaths = st.sets(st.integers(0, len(ACTS) - 1))


def check(store: MemoryStore) -> None:
    """A reader finds all parts that the step is published with, whole and as they were named."""
    assert named_attempts(store) == seen_attempts(store)


def play(store: MemoryStore, schedule: list[int], dying: set[int]) -> list[object]:
    """Run the actors in the order of the schedule, looking after each call; then kill the dying ones and finish the others."""
    actors = [Actor(store, act) for act in ACTS]
    for number in schedule:
        actors[number].step()
        check(store)
    for number in dying:
        actors[number].kill()
    while not all(actor.is_done for actor in actors):
        for actor in actors:
            actor.step()
            check(store)
    return [actor.outcome for actor in actors]


@settings(max_examples=30)
@given(schedule=schedules, dying=deaths)
def test_no_order_of_calls_tears_a_published_step(schedule: list[int], dying: set[int]) -> None:
    """After every single call the published step has the parts that its record names; all who publish get the same record."""
    store = make_store()
    save_all(store)
    outcomes = play(store, schedule, dying)
    records = {outcome.manifest.attempt for outcome in outcomes if isinstance(outcome, Outcome)}
    assert len(records) <= 1
    assert all(isinstance(outcome, AnyshardError | Died) for outcome in outcomes[:2] if not isinstance(outcome, Outcome))
    assert publish_both(store).manifest.attempt in (records or {publish_both(store).manifest.attempt})
    check(store)


class AtCall(WrapperStore):
    """Does something right before the n-th call."""

    def __init__(self, inner: Store, at: int, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self.num_calls, self._at, self._act = 0, at, act

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Count the call, and do the thing if it is its turn."""
        self.num_calls += 1
        if self.num_calls == self._at:
            self._act()
        return run()


def count_calls(act: Callable[[Store], object], *, is_published: bool = False) -> int:
    counting = AtCall(make_ready(), 0, lambda: None)
    if is_published:
        publish(counting.inner)
        counting.num_calls = 0
    act(counting)
    return counting.num_calls


def make_ready() -> MemoryStore:
    store = make_store()
    save_all(store)
    return store


def die() -> None:
    raise Died


@pytest.mark.parametrize("at", range(1, count_calls(publish) + 1))
def test_a_driver_may_die_at_any_call(at: int) -> None:
    """What it has published stands, and else the next one publishes; there is one record."""
    store = make_ready()
    with pytest.raises(Died):
        publish(AtCall(store, at, die))
    before = named_attempts(store)
    attempts = seen_attempts(store) or [part.attempt for part in publish_both(store).manifest.parts]
    assert before in ([], attempts)
    assert (attempts, 1) == (seen_attempts(store), publish_both(store).manifest.generation)


@pytest.mark.parametrize("at", range(1, count_calls(publish) + 1))
def test_a_part_may_be_saved_again_at_any_call_of_the_driver(at: int) -> None:
    """It is published, or it is refused, or another one was taken; the step is whole."""
    store, attempts, refused = make_ready(), [], []

    def save_again() -> None:
        try:
            attempts.append(save_part(store, "actor", overwrite=True).attempt)
        except AnyshardError as error:
            refused.append(error)

    publish(AtCall(store, at, save_again))
    check(store)
    assert 1 == len(attempts) + len(refused)


@pytest.mark.parametrize("at", range(1, count_calls(save_over("actor")) + 1))
def test_a_step_may_be_published_at_any_call_of_a_save(at: int) -> None:
    """The save of a part says so if what it saved is not what was published; the step is whole."""
    store = make_ready()
    outcome: object = None
    try:
        outcome = save_part(AtCall(store, at, lambda: publish(store)), "actor", overwrite=True).attempt
    except AnyshardError as error:
        outcome = type(error).__name__
    check(store)
    assert outcome in ("CheckpointExists", "CommitConflict", named_attempts(store)[0])


@pytest.mark.parametrize("at", range(1, count_calls(publish, is_published=True) + 1))
def test_a_step_may_be_deleted_at_any_call_of_the_driver(at: int) -> None:
    """It is published or gone, and never published with parts that are not there."""
    store = make_ready()
    publish(store)
    with suppress(AnyshardError):
        publish(AtCall(store, at, lambda: delete_step(store)))
    check(store)
    assert [] == named_attempts(store)

"""Many savers at once at one place whose store decides nothing: never two winners, and each loser is told."""

from __future__ import annotations

import operator
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.commit.attempt import abandoning, begin
from anyshard.commit.guard import Guards
from anyshard.commit.publish import publish
from anyshard.commit.resolve import check_complete, resolve
from anyshard.commit.tombstone import delete_step
from anyshard.errors import AnyshardError, CheckpointExists, CheckpointNotFound, CommitConflict
from anyshard.ops.clean import clean
from anyshard.records.manifest import Manifest
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.actors import Actor, Died
from tests.commit.guarding import GappedStore, HonouringStore, IgnoringStore, JitteryStore, RefusingStore
from tests.commit.steps import Clock, write_attempt

pytestmark = pytest.mark.slow

NUM_WRITERS, NUM_ROUNDS, WAIT_S = 16, 20, 60.0
KINDS = (IgnoringStore, RefusingStore)


@dataclass
class Round:
    """Writers at one new place, each as in a process of its own: probe, begin, write, claim, publish."""

    kind: type[HonouringStore]
    seed: int
    dying: frozenset[int] = frozenset()
    place: MemoryStore = field(default_factory=MemoryStore)
    winners: list[Manifest] = field(default_factory=list)
    losers: list[BaseException] = field(default_factory=list)

    def play(self, num_writers: int, *, late_s: float) -> None:
        """Let all write, each starting up to `late_s` after the first."""
        start = threading.Barrier(num_writers)
        threads = [threading.Thread(target=self._run, args=(number, start, late_s), daemon=True) for number in range(num_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert [] == [thread for thread in threads if thread.is_alive()]

    def _run(self, number: int, start: threading.Barrier, late_s: float) -> None:
        numbers = random.Random(f"{self.seed} {number}")
        jittery = JitteryStore(self.place, seed=numbers.randrange(1 << 30), most_s=numbers.choice((0.0001, 0.001, 0.003)))
        start.wait(WAIT_S)
        threading.Event().wait(numbers.random() * late_s)
        try:
            self.winners.append(self._write(Guards().settle(self.kind(jittery), required=False), dies=number in self.dying))
        except (AnyshardError, Died) as error:
            self.losers.append(error)

    def _write(self, store: Store, *, dies: bool) -> Manifest:
        attempt = begin(store, sections=("model",), overwrite=False)
        if dies:
            write_attempt(store, attempt)
            raise Died
        with abandoning(store, attempt):
            manifest = write_attempt(store, attempt)
            publish(store, manifest)
        return manifest


def check(played: Round, num_writers: int) -> None:
    """At most one has won, what it saved is there and whole, and all others know that they have not."""
    assert len(played.winners) <= 1
    assert num_writers == len(played.winners) + len(played.losers)
    assert [] == [error for error in played.losers if not isinstance(error, (CommitConflict, CheckpointExists, Died))]
    assert played.winners == ([] if (seen := seen_by_readers(played.place)) is None else [seen])


def seen_by_readers(store: Store) -> Manifest | None:
    """The manifest that counts, which is complete, or None if there is none."""
    try:
        resolved = resolve(store)
    except CheckpointNotFound:
        return None
    check_complete(store, resolved.manifest, resolved.listing)
    return resolved.manifest


@pytest.mark.parametrize("late_s", [0.0, 0.1], ids=["at once", "within 100 ms"])
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_writers(kind: type[HonouringStore], late_s: float) -> None:
    """Twenty rounds: one wins or all are refused; and where all were, the next one to come alone wins."""
    for seed in range(NUM_ROUNDS):
        played = Round(kind, seed)
        played.play(NUM_WRITERS, late_s=late_s)
        check(played, NUM_WRITERS)
        alone = Round(kind, seed, place=played.place)
        alone.play(1, late_s=0)
        assert 1 == len(played.winners) + len(alone.winners), alone.losers


@pytest.mark.parametrize("kind", KINDS)
def test_writers_that_die_between_claim_and_publish(kind: type[HonouringStore]) -> None:
    """What they leave is no checkpoint, and whoever comes after a claim of theirs is told of it."""
    for seed in range(NUM_ROUNDS):
        dying = frozenset(random.Random(seed).sample(range(NUM_WRITERS), 5))
        played = Round(kind, seed, dying)
        played.play(NUM_WRITERS, late_s=0.05)
        check(played, NUM_WRITERS)
        alone = Round(kind, seed, place=played.place)
        alone.play(1, late_s=0)
        (error,) = (*alone.losers, *([None] if alone.winners else []))
        left = Counter(type(loser) for loser in played.losers)[Died]
        expected = CheckpointExists if played.winners else CommitConflict if left else type(None)
        assert expected is type(error), error


@pytest.mark.parametrize("kind", [*KINDS, GappedStore])
def test_one_writer_wins(kind: type[HonouringStore]) -> None:
    """Alone at a place every save goes through."""
    for seed in range(NUM_ROUNDS):
        played = Round(kind, seed)
        if kind is GappedStore:  # its creates meet others only on threads of their own
            played.winners.append(played._write(Guards().settle(GappedStore(played.place), required=False), dies=False))
        else:
            played.play(1, late_s=0)
        assert (1, []) == (len(played.winners), played.losers)
        check(played, 1)


# Any interleaving ------------------------------------------------------------------------------------------------------


def write(store: Store) -> Manifest:
    """A save on a store that is known to be unguarded."""
    unguarded = UnguardedStore(store)
    attempt = begin(unguarded, sections=("model",), overwrite=False)
    with abandoning(unguarded, attempt):
        manifest = write_attempt(unguarded, attempt)
        publish(unguarded, manifest)
    return manifest


def clean_harshly(store: Store) -> object:
    """A clean that takes every unfinished save for dead, and knows no grace."""
    return clean(UnguardedStore(store), older_than_s=0, grace_s=0)


def delete(store: Store) -> object:
    """A delete of whatever is there."""
    return delete_step(UnguardedStore(store))


ACTS: tuple[Callable[[Store], object], ...] = (write, write, write, clean_harshly, delete)


@dataclass(frozen=True)
class Burst:
    """A few calls of one actor in a row."""

    actor: int
    num_calls: int


def play(store: Store, acts: Sequence[Callable[[Store], object]], schedule: Sequence[Burst], dying: set[int]) -> list[object]:
    """Run the actors call by call in the order of the schedule, readers looking on; then kill the dying, finish the others."""
    actors = [Actor(store, act) for act in acts]
    for burst in schedule:
        for _ in range(burst.num_calls):
            actors[burst.actor % len(actors)].step()
            seen_by_readers(store)
    for number in dying:
        actors[number].kill()
    while not all(actor.is_done for actor in actors):
        for actor in actors:
            actor.step()
            seen_by_readers(store)
    return [actor.outcome for actor in actors]


# A save makes 16 calls: 3 to begin, 6 for its files, 3 to look, then read, put, read, and a last look. Half of the schedules lead
# all savers to the last of them before anything else happens.
bursts = st.builds(Burst, st.integers(0, len(ACTS) - 1), st.integers(1, 12) | st.integers(1, 3))
begun = st.just([Burst(number, 3) for number in range(3)])
brought_to_the_end = st.tuples(*(st.builds(Burst, st.just(number), st.integers(7, 11)) for number in range(3))).map(list)
heads = st.just(list[Burst]()) | st.builds(operator.add, begun, brought_to_the_end)
schedules = st.builds(operator.add, heads, st.lists(bursts, max_size=30))


@settings(max_examples=100)
@given(schedule=schedules, dying=st.sets(st.integers(0, 2)))
def test_no_interleaving_has_two_winners(schedule: list[Burst], dying: set[int]) -> None:
    """Of three savers, with a cleaner beside them, at most one believes to have saved, and that is what readers find."""
    store = IgnoringStore(MemoryStore(clock=Clock().read))
    outcomes = play(store, ACTS[:4], schedule, dying)
    winners = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
    assert len(winners) <= 1
    seen = seen_by_readers(store)
    assert winners == [seen] if winners else seen is None or any(isinstance(outcome, Died) for outcome in outcomes)
    assert all(isinstance(outcome, (Manifest, CommitConflict, CheckpointExists, Died)) for outcome in outcomes[:3])


@settings(max_examples=100)
@given(schedule=schedules, dying=st.sets(st.integers(0, 4)))
def test_no_interleaving_with_a_delete_tears_a_checkpoint(schedule: list[Burst], dying: set[int]) -> None:
    """After every call readers find a whole checkpoint or none, and what they find in the end somebody has saved."""
    store = IgnoringStore(MemoryStore(clock=Clock().read))
    outcomes = play(store, ACTS, schedule, dying)
    winners = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
    seen = seen_by_readers(store)
    assert seen is None or seen in winners or any(isinstance(outcome, Died) for outcome in outcomes)

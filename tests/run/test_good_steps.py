"""Good steps outlive whatever goes wrong: saves that fail, passes that sleep, jobs of others, clocks that are late."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anyshard
from anyshard import ops
from anyshard._api import save_step
from anyshard.commit.saved_parts import Incarnation
from anyshard.commit.thinning import thin_step
from anyshard.commit.tombstone import delete_step
from anyshard.errors import CheckpointExists, CommitConflict, InvalidOption, RunInUse, StorageError
from anyshard.run.busy import BusySteps
from anyshard.run.lease import KEY
from anyshard.run.policies import KeepEvery, KeepLast, KeepPolicy, WeightsOnly
from anyshard.run.run import Run
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, do_before, fail
from anyshard.storage.wrappers.below import StoreBelow
from tests.commit.steps import Clock
from tests.run import parts_scenes
from tests.run.made_steps import RUN, committed, delete, run_pass, save_real, write_pending, write_run, write_step
from tests.run.run_cases import open_run

NO_ANSWER = StorageError("no answer", file="manifest-1.json")


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(value))}}


def save_all(place: object, *steps: int, **given: Any) -> None:
    with open_run(place, **given) as run:
        run.restore_or_init(state_of(0))
        for step in steps:
            run.save(step, state_of(step))


def load_value(run: Run, **given: Any) -> float:
    state = state_of(math.nan)
    run.load(state, **given)
    return float(state["model"]["w"][0])


def newest_value(place: object) -> float:
    return load_value(open_run(place))


def numbers(place: object) -> list[int]:
    return [one.step for one in open_run(place).steps()]


def damage(place: MemoryStore, step: int) -> None:
    """One wrong byte in the data of a step, which no listing shows."""
    key = next(key for key in place.snapshot() if key.startswith(f"step_{step}/data/model"))
    data = bytearray(place.read(key, max_nbytes=1 << 20))
    data[70] ^= 1
    place.put(key, bytes(data), token="x" * 13)


@pytest.fixture
def place() -> MemoryStore:
    """The directory of a run, in memory."""
    return MemoryStore(url="memory:/runs/a")


# ------------------------------------------------------------------------------------------- the step that a job goes on from


@pytest.mark.parametrize("step", [None, 200], ids=["fallback", "rollback"])
def test_the_step_that_was_resumed_from_outlives_a_failed_save(place: MemoryStore, step: int | None) -> None:
    """It may be the only whole one; the save that was to follow it has failed, and no pass follows that, nor takes the step."""
    save_all(place, 100, 200, 300)
    damage(place, 300)
    with open_run(FaultStore(place, [Rule(Verb.CREATE, "step_250/manifest-*", fail(NO_ANSWER))]), keep=KeepLast(1)) as run:
        assert 200.0 == load_value(run, step=step)
        with pytest.raises(StorageError, match="no answer"):
            run.async_save(250, state_of(250)).result(60)
        assert (100,) == run.prune().deleted
        assert 200.0 == load_value(run)
    assert [200, 300] == numbers(place)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_the_step_that_was_resumed_from_goes_once_another_is_committed(place: MemoryStore, *, is_blocking: bool) -> None:
    """From then on it is one as any; so are those that the rollback has left behind."""
    save_all(place, 100, 200, 300)
    with open_run(place, keep=KeepLast(1)) as run:
        load_value(run, step=200)
        if is_blocking:
            run.save(250, state_of(250))
        else:
            run.async_save(250, state_of(250)).result(60)
    assert [250] == numbers(place)


def test_a_save_of_before_the_rollback_is_no_later_one(place: MemoryStore) -> None:
    """It is committed, but of the branch that was given up."""
    with open_run(place, keep=KeepLast(1)) as run:
        run.save(200, state_of(200))
        run.pin(200)
        run.async_save(300, state_of(300)).committed(60)
        load_value(run, step=200)
        run.unpin(200)
        assert () == run.prune().deleted
    assert [200, 300] == numbers(place)


def test_a_pass_counts_no_step_that_is_gone(place: MemoryStore) -> None:
    """Steps that somebody else has deleted since the run has seen them; what takes their place in the policy stays."""
    with open_run(place, keep=KeepLast(3)) as run:
        for step in (100, 200, 300):
            run.save(step, state_of(step))
        run.prune()
        for step in (200, 300):
            ops.delete(StoreBelow(place, f"step_{step}/"))
        run.save(400, state_of(400))
    assert [100, 400] == numbers(place)


# ------------------------------------------------------------------------------------------------------ a pass that sleeps


POLICIES = {"delete": KeepLast(1), "thin": WeightsOnly(KeepEvery(100))}


def save_again(store: Store) -> None:
    """Another writer of the run has gone back, and comes to step 200 once more."""
    state = {section: {"weight": np.full(2000, -200.0, dtype=np.float32)} for section in ("model", "optimizer")}
    place = StoreBelow(store, "step_200/")
    save_step(place, state, run_id=RUN, step=200, overwrite=True, group=None, options=None, sinks=())


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("verb", [Verb.LIST, Verb.READ, Verb.CREATE, Verb.DELETE])
def test_what_was_saved_while_a_pass_slept_stays(verb: Verb, policy: KeepPolicy) -> None:
    """Wherever it sleeps: the step is saved anew that the pass was about to delete or thin, and stays as it is then."""
    origin = MemoryStore()
    for step in (100, 200, 300):
        save_real(origin, step)
    nth, has_fired = 0, True
    while has_fired:
        nth += 1
        store = MemoryStore(origin.snapshot())
        slow = FaultStore(store, [Rule(verb, "step_200/*", do_before(partial(save_again, store)), nth=nth)])
        run_pass(slow, policy)
        has_fired = bool(slow.fired)
        if has_fired:
            with anyshard.open(StoreBelow(store, "step_200/")) as checkpoint:
                assert [-200.0, -200.0] == [checkpoint[f"{name}/weight"][0] for name in ("model", "optimizer")], nth
    assert nth > 1


def test_nothing_goes_if_the_newest_step_is_not_what_it_was() -> None:
    """Right before anything is deleted it is looked at once more, though the pass has seen it twice."""
    store = MemoryStore()
    write_run(store, [1, 2, 3])
    slow = FaultStore(store, [Rule(Verb.LIST, "step_3/", do_before(lambda: delete(store, 3)), nth=3)])
    report = run_pass(slow, KeepLast(1))
    assert ((), [1, 2]) == (report.deleted, committed(store))
    assert "nothing was deleted: expected step 3, the newest good one, to be whole, found deleted" == report.warnings[0]
    assert ((1,), [2]) == (run_pass(store, KeepLast(1)).deleted, committed(store))


def test_only_the_generation_that_was_meant_is_deleted_or_thinned() -> None:
    """Another one is a conflict; one that is deleted already is finished."""
    store = MemoryStore()
    write_run(store, [1])
    below = StoreBelow(store, "step_1/")
    for act in (lambda: delete_step(below, generation=2), lambda: thin_step(below, ["model"], generation=2)):
        with pytest.raises(CommitConflict, match="generation 2, found generation 1: it was saved over meanwhile"):
            act()
    assert [1] == committed(store)
    delete_step(below, generation=1)
    assert ([], ()) == (committed(store), delete_step(below, generation=1))


def test_two_passes_hold_a_step_each() -> None:
    """The end of one gives back only its own: saves wait for the other one still."""
    busy = BusySteps()
    with busy.holding(1):
        with busy.holding(2), busy.holding(1):
            pass
        with pytest.raises(anyshard.StillPending):
            busy.claim(1, 0.01)
        busy.claim(2, 0)
    busy.claim(1, 0)
    assert {1, 2} == set(busy)


def test_a_part_that_is_saved_anew_while_it_is_thinned_leaves_what_the_step_names() -> None:
    """A part that is thin already has nothing to give, whatever has taken its place meanwhile."""
    nth, has_fired = 0, True
    while has_fired:
        nth += 1
        clock = Clock()
        store = parts_scenes.make_store(clock)
        parts_scenes.save_all(store)
        parts_scenes.publish_both(store)
        named = parts_scenes.named_attempts(store)
        clock.sleep(10)
        back = Incarnation(resumed=50, since_s=clock.read())

        def again(store: Store = store, back: Incarnation = back) -> None:
            parts_scenes.save_part(store, "actor", incarnation=back, overwrite=True)

        slow = FaultStore(store, [Rule(Verb.LIST, "parts/actor/", do_before(again), nth=nth)])
        try:
            thin_step(slow, ["model"])
        except anyshard.AnyshardError:
            assert slow.fired
        has_fired = bool(slow.fired)
        assert named == parts_scenes.seen_attempts(store), nth
    assert nth > 1


# ------------------------------------------------------------------------------------------------------ what is not replaced


def test_steps_of_other_runs_are_not_replaced(place: MemoryStore) -> None:
    """Of an earlier run, or of no run: the error says whose it is. `overwrite` replaces it all the same."""
    save_all(place, 100)
    anyshard.save(StoreBelow(place, "step_60/"), state_of(60))
    with open_run(place) as run:
        run.save(50, state_of(-50))
    with open_run(place) as run:
        assert -50.0 == load_value(run)
        with pytest.raises(CheckpointExists, match=r"found one of another run \([a-z0-9]{13}, on "):
            run.save(100, state_of(-100))
        with pytest.raises(CheckpointExists, match="saved without a run"):
            run.async_save(60, state_of(-60)).result(60)
        assert 2 == run.save(60, state_of(-60), overwrite=True).generation
        assert 100.0 == load_value(run, step=100)


def test_plain_steps_are_replaced_by_a_run_that_goes_on_from_one(place: MemoryStore) -> None:
    """They are of what it has resumed from."""
    for step in (1, 2, 3):
        anyshard.save(StoreBelow(place, f"step_{step}/"), state_of(step))
    with open_run(place) as run:
        assert 1.0 == load_value(run, step=1)
        assert "it is replaced" in run.save(2, state_of(20)).warnings[-1]


def test_a_step_that_came_after_the_look_is_not_replaced(place: MemoryStore) -> None:
    """Where there was none when the run was resumed, or another one, nobody has agreed to lose what is there now."""
    save_all(place, 100, 300)
    with open_run(place) as run:
        load_value(run, step=100)
        anyshard.save(StoreBelow(place, "step_200/"), state_of(-200))
        given: dict[str, Any] = {"run_id": run.steps()[0].run_id, "step": 300, "group": None, "options": None, "sinks": ()}
        save_step(StoreBelow(place, "step_300/"), state_of(-300), overwrite=True, **given)
        for step in (200, 300):
            with pytest.raises(CheckpointExists):
                run.save(step, state_of(step))


def test_a_step_that_was_published_in_parts_is_not_replaced(place: MemoryStore) -> None:
    """It is one of this process's own."""
    save_all(place, 50, 100)
    with open_run(place) as run:
        load_value(run, step=50)
        part = run.begin(110)
        part.commit({"actor": part.save("actor", state_of(1)).attempt})
        with pytest.raises(CheckpointExists):
            run.save(110, state_of(110))
    assert ("actor",) == open_run(place).steps()[-1].parts


def test_a_pinned_step_is_not_replaced(place: MemoryStore) -> None:
    """Whole, or in parts: somebody wants to keep it. `overwrite` is a word to the contrary."""
    save_all(place, 100, 200)
    with open_run(place) as run:
        part = run.begin(300)
        part.commit({"actor": part.save("actor", state_of(1)).attempt})
        run.pin(200)
        run.pin(300)
    with open_run(place) as run:
        load_value(run, step=100)
        with pytest.raises(CheckpointExists, match="found one that is pinned"):
            run.save(200, state_of(-200))
        with pytest.raises(CheckpointExists, match="a published step is not changed"):
            run.begin(300).save("actor", state_of(2))
        assert 200.0 == load_value(run, step=200)
        assert 2 == run.save(200, state_of(-200), overwrite=True).generation


def test_a_save_that_failed_after_a_rollback_can_be_made_again(place: MemoryStore) -> None:
    """What it was to replace is still what is there of before."""
    save_all(place, 100, 200)
    with open_run(FaultStore(place, [Rule(Verb.CREATE, "step_200/manifest-2*", fail(NO_ANSWER))])) as run:
        load_value(run, step=100)
        with pytest.raises(StorageError, match="no answer"):
            run.async_save(200, state_of(-200)).result(60)
        pending = run.async_save(200, state_of(-200))
        assert 2 == pending.result(60).generation
        with pytest.raises(CheckpointExists):
            run.save(200, state_of(-201))
    assert -200.0 == newest_value(place)


def test_leftovers_of_a_save_that_died_are_no_step_that_is_replaced(place: MemoryStore) -> None:
    """Nothing is told of them."""
    save_all(place, 100)
    write_pending(place, 200)
    with open_run(place) as run:
        run.restore_or_init(state_of(0))
        assert () == run.save(200, state_of(200)).warnings


def test_a_step_whose_record_is_damaged_is_replaced(place: MemoryStore) -> None:
    """Nobody can tell whose it was, and training has to go on."""
    save_all(place, 100, 200)
    record = place.read("step_200/manifest-1.json", max_nbytes=1 << 20)
    place.put("step_200/manifest-1.json", b"?" + record[1:], token="x" * 13)
    with open_run(place) as run:
        assert 100.0 == load_value(run)
        assert (
            "was there, of before the run was resumed from step 100; it is replaced" in run.save(200, state_of(-200)).warnings[-1]
        )
    assert -200.0 == newest_value(place)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_record_that_was_cut_is_replaced(place: MemoryStore, *, is_deleted: bool) -> None:
    """The save died as it committed; with a word, for somebody may wonder."""
    save_all(place, 100)
    if is_deleted:
        write_step(place, 200)
        ops.delete(StoreBelow(place, "step_200/"))
    pending = write_pending(place, 200)
    place.create(f"step_200/manifest-{pending.generation}.json", b"", token=pending.attempt)
    with open_run(place) as run:
        load_value(run, step=100)
        (told,) = run.save(200, state_of(200)).warnings
    assert "was cut off as its record was written; it is replaced" in told
    assert 200.0 == newest_value(place)


# -------------------------------------------------------------------------------------------------------- whose run it is


def publish(run: Run, step: int) -> None:
    part = run.begin(step)
    part.commit({"actor": part.save("actor", state_of(step)).attempt})


def test_a_driver_that_has_loaded_nothing_prunes_no_earlier_job(place: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """Its worlds have the run in common with what is there; it says why nothing goes, and goes by the policy if it is told to."""
    save_all(place, 100, 200, 300)
    with open_run(place, keep=KeepLast(1)) as run:
        publish(run, 400)
        publish(run, 500)
    assert [100, 200, 300, 400, 500] == numbers(place)
    assert 1 == sum("nothing of it was loaded: retention leaves all" in record.getMessage() for record in caplog.records)


def test_a_driver_prunes_what_it_has_begun_and_what_its_worlds_go_on_with(place: MemoryStore) -> None:
    """The first steps of a run, and later those of worlds that have loaded their parts, though the driver loads nothing."""
    with open_run(place, keep=KeepLast(1)) as run:
        publish(run, 100)
        publish(run, 200)
    assert [200] == numbers(place)
    with open_run(place) as world:
        load_value(world, role="actor")
        attempt = world.begin(300).save("actor", state_of(300)).attempt
    with open_run(place, keep=KeepLast(1)) as run:
        run.begin(300).commit({"actor": attempt})
    assert [300] == numbers(place)


def test_a_writer_without_the_lease_does_not_even_begin(place: MemoryStore) -> None:
    """No directory, no blob: the save ends before anything of it is there."""
    store = CountingStore(place)
    with open_run(store) as run:
        run.save(1, state_of(1))
        other = place.read(KEY, max_nbytes=10_000).replace(b'"incarnation":"', b'"incarnation":"b')
        place.put(KEY, other, token="b" * 13)
        before = [store.count(verb).calls for verb in (Verb.PREPARE, Verb.CREATE, Verb.CREATE_BLOB)]
        with pytest.raises(RunInUse):
            run.save(2, state_of(2))
        assert before == [store.count(verb).calls for verb in (Verb.PREPARE, Verb.CREATE, Verb.CREATE_BLOB)]


# ------------------------------------------------------------------------------------------------------------------- clocks


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets by how many seconds the clock of this host is ahead."""
    ahead_s = [0.0]

    def read() -> str:
        now = datetime.now(UTC) + timedelta(seconds=ahead_s[0])
        return f"{now.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"

    for room in ("committing", "run.custody"):
        monkeypatch.setattr(f"anyshard.{room}.utc_now", read)
    return lambda seconds: ahead_s.__setitem__(0, seconds)


def test_a_job_that_goes_on_where_the_clock_is_late_loses_nothing(place: MemoryStore, set_clock: Callable[[float], None]) -> None:
    """Each step is stamped after those that are there; the newest one is loaded, and retention takes the old ones."""
    save_all(place, 100, 200)
    set_clock(-600)
    save_all(place, 300, 400)
    save_all(place, 500, 600)
    times = [one.time for one in open_run(place).steps()]
    assert (600.0, sorted(set(times))) == (newest_value(place), times)
    with open_run(place, keep=KeepLast(2)) as run:
        assert (100, 200, 300, 400) == run.prune().deleted


def test_a_new_run_where_the_clock_is_late_is_the_one_that_is_gone_on_with(
    place: MemoryStore, set_clock: Callable[[float], None]
) -> None:
    """Not the earlier one, whose steps seem to be of the future."""
    save_all(place, 100)
    set_clock(-600)
    with open_run(place) as run:
        run.save(50, state_of(-50))
    assert -50.0 == newest_value(place)


def test_steps_in_parts_are_stamped_in_their_order(place: MemoryStore, set_clock: Callable[[float], None]) -> None:
    """Though the clocks of the worlds differ: none seems to be of before a rollback."""
    with open_run(place) as driver, open_run(place) as actor, open_run(place) as critic:
        both = {"actor": 30, "critic": 0}
        for step, worlds in ((100, both), (101, {"critic": 0}), (102, both), (103, {"critic": 0}), (104, {"critic": -30})):
            attempts = {}
            for role, ahead_s in worlds.items():
                set_clock(ahead_s)
                world = {"actor": actor, "critic": critic}[role]
                attempts[role] = world.begin(step).save(role, state_of(step)).attempt
            set_clock(0)
            driver.begin(step).commit(attempts)
            if step == 100:
                load_value(critic, role="critic")  # from then on it looks at nothing
        assert [False] * 5 == [one.is_stale for one in driver.steps()]
        assert 104.0 == load_value(critic, role="critic")


def test_a_branch_that_was_given_up_counts_nowhere(place: MemoryStore) -> None:
    """Though the next number is a higher one: neither for the policy, nor as what is loaded when the newest step is damaged."""
    save_all(place, 100, 200, 300, 400)
    with open_run(place, keep=KeepLast(2)) as run:
        load_value(run, step=200)
        run.save(500, state_of(500))
    assert [200, 500] == numbers(place)


def test_a_branch_that_was_given_up_is_not_fallen_back_to(place: MemoryStore) -> None:
    """The step before the rollback is."""
    save_all(place, 100, 200, 300, 400)
    with open_run(place) as run:
        load_value(run, step=200)
        run.save(500, state_of(500))
    damage(place, 500)
    assert 200.0 == newest_value(place)


def test_a_step_that_was_saved_over_is_seen_as_it_is_now(place: MemoryStore) -> None:
    """By a pass that had looked at it before: what lies above the rollback goes."""
    with open_run(place, keep=KeepLast(9)) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        load_value(run, step=1)
        run.async_save(2, state_of(20)).result(60)
    assert [1, 2] == numbers(place)


def test_a_counter_that_begins_anew_deletes_nothing(tmp_path: Path) -> None:
    """A step below the one that the job goes on from is refused, for the steps above would count as of before a rollback."""
    state = {"x": torch.ones(2)}
    with Run(tmp_path, keep=KeepLast(3)) as run:
        run.save(900, state)
        with pytest.raises(InvalidOption, match="expected 900 or more, since that one was saved, found 10"):
            run.save(10, state)
        run.save(1000, state)
    with Run(tmp_path, keep=KeepLast(3)) as run:
        run.load(state)
        with pytest.raises(InvalidOption, match="expected 1000 or more, since that one was loaded, found 1:"):
            run.save(1, state, overwrite=True)
    assert [900, 1000] == [one.step for one in Run(tmp_path).steps()]


@pytest.mark.parametrize("metrics", [{"loss": None}, {"loss": "much"}, ["loss"], {"loss": torch.ones(2)}])
def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path, metrics: Any) -> None:
    """The error names the metric, and nothing is saved."""
    with Run(tmp_path) as run, pytest.raises(InvalidOption, match="metrics: "):
        run.save(1, {"x": torch.ones(2)}, metrics=metrics)
    assert () == Run(tmp_path).steps()

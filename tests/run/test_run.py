"""A run's whole life: what it saves over and what not, whose steps it goes on with, how it ends, and who else may write it."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anyshard
from anyshard.errors import CheckpointExists, CheckpointNotFound, InvalidOption, RunInUse, StorageError
from anyshard.reports import LoadReport
from anyshard.run.lease import KEY
from anyshard.run.policies import KeepLast
from anyshard.run.preemption import Preemption
from anyshard.run.run import Run
from anyshard.run.step_info import StepInfo
from anyshard.run.when import Continuously, EveryMinutes, EverySteps
from anyshard.storage.memory import MemoryStore
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, do_before, fail
from anyshard.testing.launch import Launcher
from anyshard.testing.world import Worlds
from tests.run import run_cases
from tests.run.run_cases import TTL_S, open_run
from tests.servers import S3Server

NO_ANSWER = StorageError("no answer", file="manifest-1.json")


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(value))}}


def numbers(place: object) -> list[int]:
    return [one.step for one in open_run(place).steps()]


def save_all(place: object, *steps: int) -> None:
    with open_run(place) as run:
        run.restore_or_init(state_of(0))
        for step in steps:
            run.save(step, state_of(step))


def step_of(found: LoadReport | StepInfo | None) -> int | None:
    return None if found is None else found.step


def num_calls(store: CountingStore) -> int:
    return sum(store.count(verb).calls for verb in Verb)


def load_value(run: Run, **given: Any) -> float:
    state = state_of(math.nan)
    run.load(state, **given)
    return float(state["model"]["w"][0])


@pytest.fixture
def place() -> MemoryStore:
    """The directory of a run, in memory."""
    return MemoryStore(url="memory:/runs/a")


# ---------------------------------------------------------------------------------------------------------------- the basics


def test_a_run_goes_on_where_it_was(place: MemoryStore) -> None:
    """The first time there is nothing to load and `init` is called; the next time the newest step is loaded, by number (B133)."""
    made = []
    with open_run(place) as run:
        assert run.restore_or_init(state_of(0), lambda: made.append(1)) is None
        for step in (8, 9, 10, 900, 1000):
            run.save(step, state_of(step))
    with open_run(place) as run:
        report = run.restore_or_init(state := state_of(0), lambda: made.append(2))
    assert (1000, [1], 1000.0) == (step_of(report), made, float(state["model"]["w"][0]))
    assert [8, 9, 10, 900, 1000] == numbers(place)


def test_steps_lie_under_their_plain_numbers(tmp_path: Path) -> None:
    """Each is a checkpoint for every other verb, too; nothing else is left behind."""
    save_all(tmp_path / "run", 7, 10)
    assert ["step_10", "step_7"] == sorted(path.name for path in (tmp_path / "run").iterdir())
    with anyshard.open(tmp_path / "run" / "step_7") as checkpoint:
        assert (7, [7.0] * 3) == (checkpoint.manifest.step, list(checkpoint["model/w"][...]))


def test_a_run_does_nothing_before_it_is_used() -> None:
    """Making one and leaving it asks the storage for nothing."""
    store = CountingStore(MemoryStore())
    with Run(store, keep=KeepLast(1), every=EverySteps(1)):
        pass
    assert 0 == num_calls(store)


def test_a_run_is_opened_like_a_checkpoint(place: MemoryStore) -> None:
    """The newest good step, or one by its number; `latest` says which, with the metrics that it was saved with."""
    with open_run(place) as run:
        with pytest.raises(CheckpointNotFound, match="begins a new run"):
            run.open()
        assert run.latest() is None
        metrics = {"loss": torch.tensor(0.5), "tokens": 3, "bad": math.nan, "worse": np.float32(math.inf)}
        run.save(1, state_of(1), metrics=metrics)
        run.save(2, state_of(2))
        assert [2.0, 1.0] == [run.open(step)["model/w"][0] for step in (None, 1)]
        assert 2 == step_of(run.latest())
        found = run.steps()[0].metrics
    assert (0.5, 3, True, math.inf) == (found["loss"], found["tokens"], math.isnan(found["bad"]), found["worse"])


def test_all_saves_of_a_run_have_its_id(place: MemoryStore) -> None:
    """And the next process goes on with it, unless it begins its own by saving without a load."""
    save_all(place, 1)
    save_all(place, 2)
    with open_run(place) as run:
        run.save(3, state_of(3))
    ids = [one.run_id for one in open_run(place).steps()]
    assert (True, False, True) == (ids[0] == ids[1], ids[1] == ids[2], None not in ids)


def test_steps_of_plain_saves_are_gone_on_with(place: MemoryStore) -> None:
    """What `anyshard.save` has put there is loaded as long as nothing else is there, and is left alone."""
    from anyshard.storage.wrappers.below import StoreBelow

    anyshard.save(StoreBelow(place, "step_5/"), state_of(5))
    with open_run(place, keep=KeepLast(1)) as run:
        assert 5 == step_of(run.restore_or_init(state_of(0)))
        run.save(6, state_of(6))
        assert () == run.prune().deleted
    assert [None, False] == [one.run_id if one.run_id is None else False for one in open_run(place).steps()]


# ------------------------------------------------------------------------------------------------------- what is saved over


def test_what_this_run_has_saved_is_not_saved_over(place: MemoryStore) -> None:
    """Unless that is asked for."""
    with open_run(place) as run:
        run.save(1, state_of(1))
        with pytest.raises(CheckpointExists):
            run.save(1, state_of(2))
        assert 2 == run.save(1, state_of(3), overwrite=True).generation
        assert 3.0 == load_value(run)


def test_after_a_rollback_later_steps_are_replaced(place: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """With a word in report and log; what is not reached again is passed over, but can be loaded by its number."""
    save_all(place, 1, 2, 3)
    with open_run(place) as run:
        assert 1.0 == load_value(run, step=1)
        warnings = run.save(2, state_of(20)).warnings
        assert "was there, of before the run was resumed from step 1; it is replaced" in warnings[-1]
        assert any("it is replaced" in record.getMessage() for record in caplog.records)
        assert (20.0, 3.0) == (load_value(run), load_value(run, step=3))
    assert [(1, False), (2, False), (3, True)] == [(one.step, one.is_stale) for one in open_run(place).steps()]


def test_a_rollback_within_one_process(place: MemoryStore) -> None:
    """A loss spike: the run loads one of its own steps and goes on from there, over what it has saved itself."""
    with open_run(place) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        load_value(run, step=1)
        run.save(2, state_of(20))
        with pytest.raises(CheckpointExists):
            run.save(2, state_of(21))
        with pytest.raises(InvalidOption, match="the numbers of a run rise"):
            run.save(1, state_of(10))
        assert 20.0 == load_value(run)


def test_without_a_load_nothing_there_is_saved_over(place: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """A new run in a used directory: its own numbers are new steps beside the old ones, and both are told (B134)."""
    save_all(place, 700)
    with open_run(place, keep=KeepLast(1)) as run:
        with pytest.raises(CheckpointExists):
            run.save(700, state_of(1))
        run.save(100, state_of(100))
        assert (100.0, ()) == (load_value(run), run.prune().deleted)
    told = [record.getMessage() for record in caplog.records]
    assert [1, 1] == [
        sum(word in text for text in told) for word in ("a new run begins beside them", "steps of another run are here")
    ]
    assert [100, 700] == numbers(place)


def test_steps_up_to_a_failed_save_can_be_saved(place: MemoryStore) -> None:
    """A save that failed is no step, so neither its number nor those before it are taken (B052)."""
    failing = FaultStore(place, [Rule(Verb.CREATE, "step_20/manifest-*", fail(NO_ANSWER))])
    with open_run(failing) as run:
        run.save(10, state_of(10))
        pending = run.async_save(20, state_of(20))
        with pytest.raises(StorageError, match="no answer"):
            pending.result(60)
        assert 10.0 == load_value(run)
        for step in range(11, 21):
            run.save(step, state_of(step))
    assert list(range(10, 21)) == numbers(place)


# --------------------------------------------------------------------------------------------------------------- each step


def test_end_step_saves_what_is_due(place: MemoryStore) -> None:
    """Each due step once, in the background, and not again what was saved by hand."""
    with open_run(place, every=EverySteps(3)) as run:
        run.restore_or_init(state_of(0))
        for step in range(8):
            if step == 6:
                run.save(6, state_of(60))
            pending = run.end_step(step, state_of(step), metrics={"loss": step / 2})
            assert (step == 3) == (pending is not None)
        assert not run.should_stop
    assert [(3, {"loss": 1.5}), (6, {})] == [(one.step, dict(one.metrics)) for one in open_run(place).steps()]


def test_end_step_by_the_clock(place: MemoryStore) -> None:
    """A rank alone saves at once when it is time."""
    with open_run(place, every=EveryMinutes(1e-9)) as run:
        assert run.end_step(1, state_of(1)) is not None
    with open_run(place, every=EveryMinutes(60)) as run:
        assert run.end_step(2, state_of(2)) is None


def test_saving_continuously(place: MemoryStore) -> None:
    """The next save begins when the one before has ended."""
    gate = threading.Event()
    slow = FaultStore(place, [Rule(Verb.CREATE, "step_0/index-*", do_before(lambda: gate.wait(60)))])
    with open_run(slow, every=Continuously()) as run:
        first = run.end_step(0, state_of(0))
        assert [None, None] == [run.end_step(step, state_of(step)) for step in (1, 2)]
        gate.set()
        assert first is not None
        first.committed(60)
        assert run.end_step(3, state_of(3)) is not None
    assert [0, 3] == numbers(place)


def test_a_step_that_is_not_due_asks_nobody(place: MemoryStore) -> None:
    """No request of the storage, however many there are."""
    store = CountingStore(place)
    with open_run(store, every=EverySteps(1000)) as run:
        for step in range(1000):
            run.end_step(step, state_of(step))
    assert 0 == num_calls(store)


def await_stop(run: Run, first: int) -> int:
    """Train until the run is to be stopped; the last step."""
    deadline, step = time.monotonic() + 60, first
    while not run.should_stop:
        assert time.monotonic() < deadline
        run.end_step(step, state_of(step))
        step += 1
    return step - 1


def test_a_wish_to_stop_is_met_by_a_last_save(place: MemoryStore) -> None:
    """Of the step at which it is agreed on, though nothing is due and an earlier save has failed."""
    failing = FaultStore(place, [Rule(Verb.CREATE, "step_1/manifest-*", fail(NO_ANSWER))])
    stop = threading.Event()
    with open_run(failing, preemption=Preemption(notice=stop.is_set, poll_s=0.01)) as run:
        run.restore_or_init(state_of(0))
        run.async_save(1, state_of(1))
        stop.set()
        last = await_stop(run, 2)
    assert last == step_of(open_run(place).latest())


def test_a_step_that_is_being_saved_is_not_saved_again_at_the_end(place: MemoryStore) -> None:
    """The last save then is the one that is under way."""
    stop = threading.Event()
    with open_run(place, every=EverySteps(1), preemption=Preemption(notice=stop.is_set, poll_s=0.01)) as run:
        run.restore_or_init(state_of(0))
        stop.set()
        last = await_stop(run, 1)
    assert [(step, 1) for step in range(1, last + 1)] == [(one.step, one.generation) for one in open_run(place).steps()]


# ------------------------------------------------------------------------------------------------------------------ the end


def test_retention_follows_the_saves(place: MemoryStore) -> None:
    """In the background, and complete when the run is closed; pinned steps stay (B128, B130)."""
    with open_run(place, keep=KeepLast(2)) as run:
        run.save(1, state_of(1))
        run.pin(1)
        for step in range(2, 7):
            run.save(step, state_of(step))
    assert [1, 5, 6] == numbers(place)
    with open_run(place, keep=KeepLast(2)) as run:
        run.unpin(1)
        assert ((1,), True) == ((report := run.prune(dry_run=True)).deleted, report.dry_run)
        assert (1,) == run.prune().deleted


def test_only_steps_that_are_there_are_pinned(place: MemoryStore) -> None:
    """And pinning again, or unpinning what is not pinned, is nothing."""
    save_all(place, 1)
    run = open_run(place)
    with pytest.raises(CheckpointNotFound, match="a step 2 to pin"):
        run.pin(2)
    run.pin(1)
    run.pin(1)
    assert [True] == [one.is_pinned for one in run.steps()]
    run.unpin(1)
    run.unpin(1)
    assert [False] == [one.is_pinned for one in run.steps()]


def test_the_end_waits_for_saves_and_raises_their_failure(place: MemoryStore) -> None:
    """Once, and only if nobody was told; the lease is given back all the same."""
    failing = FaultStore(place, [Rule(Verb.CREATE, "step_1/manifest-*", fail(NO_ANSWER))])
    run = open_run(failing)
    run.async_save(1, state_of(1))
    with pytest.raises(StorageError, match="no answer"):
        run.close()
    run.close()
    assert KEY not in place.snapshot()


def test_an_error_of_the_training_is_the_one_that_is_raised(place: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """A failure of a save beside it is only logged."""
    failing = FaultStore(place, [Rule(Verb.CREATE, "step_1/manifest-*", fail(NO_ANSWER))])
    with pytest.raises(ZeroDivisionError), open_run(failing) as run:
        run.async_save(1, state_of(1))
        raise ZeroDivisionError
    assert any("failed, too: " in record.getMessage() for record in caplog.records)
    assert KEY not in place.snapshot()


def test_a_closed_run_saves_nothing(place: MemoryStore) -> None:
    """It says so."""
    with open_run(place) as run:
        run.save(1, state_of(1))
    for use in (lambda: run.save(2, state_of(2)), lambda: run.end_step(2, state_of(2)), lambda: run.load(state_of(0))):
        with pytest.raises(InvalidOption, match="that was closed"):
            use()


def test_a_fork_has_no_run(tmp_path: Path) -> None:
    """Its parent's is refused, and its end takes nothing from the parent."""
    with open_run(tmp_path) as run:
        run.save(1, state_of(1))
        pid = os.fork()
        if pid == 0:
            try:
                run.close()
                run.save(2, state_of(2))
            except InvalidOption as error:
                os._exit(7 if "a fork of it" in str(error) else 1)
            os._exit(2)
        assert 7 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        run.save(3, state_of(3))
    assert [1, 3] == numbers(tmp_path)


@pytest.mark.parametrize("step", [-1, 10**18, 1.5, "3", True, None])
def test_impossible_steps_are_refused(place: MemoryStore, step: Any) -> None:
    """Before anything is written."""
    with open_run(place) as run, pytest.raises(InvalidOption, match="step: expected a whole number"):
        run.save(step, state_of(1))
    assert {} == place.snapshot()


@pytest.mark.parametrize("name", ["keep", "every", "preemption", "options", "load_options", "lease_ttl_s"])
def test_settings_of_the_wrong_kind_are_refused(name: str) -> None:
    """When the run is made, with the name of the setting."""
    with pytest.raises(InvalidOption, match=f"{name}: expected"):
        Run("runs/a", **{name: "wrong"})  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- two writers


def test_a_second_writer_is_told_early(tmp_path: Path) -> None:
    """As soon as the first one shows that it is alive (acceptance 5)."""
    with open_run(tmp_path, lease_ttl_s=TTL_S) as run:
        run.save(1, state_of(1))
        with open_run(tmp_path) as second, pytest.raises(RunInUse, match=f"process {os.getpid()} on host"):
            second.save(2, state_of(2))
        assert 1.0 == load_value(open_run(tmp_path))  # who only reads needs no lease
        run.save(2, state_of(2))
    assert [1, 2] == numbers(tmp_path)


def test_a_writer_that_has_lost_its_lease_writes_nothing(place: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a step nor a deletion; the error names who has it now."""
    with open_run(place, keep=KeepLast(1)) as run:
        run.save(1, state_of(1))
        other = (
            place.read(KEY, max_nbytes=10_000)
            .replace(b'"count":0', b'"count":1')
            .replace(b'"incarnation":"', b'"incarnation":"b')
        )
        place.put(KEY, other, token="b" * 13)
        with pytest.raises(RunInUse, match="to be the only writer"):
            run.save(2, state_of(2))
        with pytest.raises(RunInUse, match="to be the only writer"):
            run.async_save(3, state_of(3)).result(60)
    assert [1] == numbers(place)
    assert other == place.read(KEY, max_nbytes=10_000)


def test_a_run_that_was_dropped_holds_its_lease_no_longer_than_its_time(tmp_path: Path) -> None:
    """A notebook that makes another one waits, and goes on."""
    run = open_run(tmp_path, lease_ttl_s=0.5)
    run.save(1, state_of(1))
    del run
    gc.collect()
    save_all(tmp_path, 2)
    assert [1, 2] == numbers(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("at", [("create", "step_2/index-*"), ("create", "step_2/manifest-*"), ("prepare", "*step_2/*")], ids=str)
def test_a_paused_writer_that_wakes_tears_nothing(launch: Launcher, tmp_path: Path, at: tuple[str, str]) -> None:
    """It is stopped in the middle of a save; another one takes over after its time; then it is refused (acceptance 5)."""
    with launch(run_cases.save_and_stop, str(tmp_path), *at, size=1) as launched:
        launched.wait_until_stopped(0, timeout_s=100)
        with open_run(tmp_path, lease_ttl_s=TTL_S) as run:
            state = run_cases.make_state("blank")
            assert 1 == step_of(run.restore_or_init(state))
            run.save(2, run_cases.make_state("new"))
            launched.send_signal(0, signal.SIGCONT)
            (ended,) = launched.wait(timeout_s=100)
            assert str(ended.value).split(":")[0] in ("RunInUse", "CommitConflict"), ended
            assert 2 == (again := run.load(state)).step, again
    assert "new" == state["seed"]


@pytest.mark.slow
def test_a_restart_on_the_same_host_waits_for_nobody(launch: Launcher, tmp_path: Path) -> None:
    """A writer that was killed is known to be dead there; its lease would be good for long."""
    with launch(run_cases.save_and_wait, str(tmp_path), size=1) as launched:
        launched.wait_until_stopped(0, timeout_s=100)
        assert (tmp_path / KEY).exists()
        launched.send_signal(0, signal.SIGKILL)
        launched.wait(timeout_s=100)
    paused = []
    with open_run(tmp_path) as run:
        run._means.custody._lease._pause = paused.append  # type: ignore[attr-defined]
        report = run.restore_or_init(run_cases.make_state("blank"))
    assert (1, []) == (step_of(report), paused)


# ------------------------------------------------------------------------------------------------------------- several ranks


@pytest.mark.slow
def test_two_ranks_live_a_whole_life(worlds: Worlds, tmp_path: Path) -> None:
    """Saves, a load by number, a replaced step, and the newest again, on all ranks alike."""
    ranks = worlds(2).run(run_cases.save_and_roll_back, str(tmp_path / "run"), timeout_s=120)
    for step, again, _, is_whole, steps in ranks:
        assert (1, 2, True, [[1, False], [2, False], [3, True]]) == (step, again, is_whole, [list(one) for one in steps])
    assert [1, 0] == [sum("it is replaced" in text for text in rank[2]) for rank in ranks]


@pytest.mark.slow
def test_two_ranks_are_refused_alike(worlds: Worlds, tmp_path: Path) -> None:
    """A number that is taken, and a lease that is lost, which only the coordinator sees."""
    ranks = worlds(2).run(run_cases.be_refused, str(tmp_path / "run"), timeout_s=120)
    assert [["CheckpointExists"] * 2 + ["RunInUse"] * 2 + ["2"]] * 2 == ranks


@pytest.mark.slow
def test_two_ranks_save_at_the_same_call_by_the_clock(worlds: Worlds, tmp_path: Path) -> None:
    """The coordinator's clock decides, and both agree on the call."""
    ranks = worlds(2).run(run_cases.save_by_time, str(tmp_path / "run"), 100_000, timeout_s=120)
    saved, there = ranks[0]
    assert [[saved, saved]] * 2 == [[list(one), list(two)] for one, two in ranks]
    assert 2 == len(there)


# ------------------------------------------------------------------------------------------------------------ object storage


@pytest.mark.slow
def test_a_whole_life_on_object_storage(moto_s3: S3Server) -> None:
    """Lease, saves, retention, a second writer, a rollback and the end, as on a disk."""
    url, options = f"s3://{moto_s3.make_bucket()}/runs/a", {**moto_s3.options, "endpoint": moto_s3.endpoint}
    given: dict[str, Any] = {"options": anyshard.SaveOptions(storage_options=options), "lease_ttl_s": TTL_S}
    with Run(url, keep=KeepLast(2), **given) as run:
        assert run.restore_or_init(state_of(0)) is None
        for step in range(1, 5):
            run.async_save(step, state_of(step))
        with Run(url, **given) as second, pytest.raises(RunInUse):
            second.restore_or_init(state_of(0))
    with Run(url, **given) as run:
        assert 3 == step_of(run.load(state_of(0), step=3))
        run.save(4, state_of(40))
        assert ([3, 4], 40.0) == ([one.step for one in run.steps()], load_value(run))
    assert KEY not in {entry.key for entry in open_store(url, storage_options=options).list("").entries}

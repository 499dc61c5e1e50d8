"""Retention: what a pass deletes, thins and cleans, what it never touches, and that it may die anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from anyshard.commit.cleaning import DAY_S, TOMBSTONE_S
from anyshard.errors import StorageDenied, StorageUnavailable
from anyshard.records.manifest import Resumed
from anyshard.run.busy import BusySteps
from anyshard.run.catalog import Catalog
from anyshard.run.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy, Protect, WeightsOnly
from anyshard.run.retention import prune
from anyshard.run.retention_plan import find_left, plan_retention
from anyshard.run.step_info import Condition, StepInfo, mark_stale, pin_key, step_prefix
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers import Call, CountingStore, FaultStore, Rule, Verb, WrapperStore, do_before, fail
from anyshard.storage.wrappers.below import StoreBelow
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.steps import Clock, make_manifest, write_files
from tests.run.made_steps import (
    OTHER,
    RUN,
    START_S,
    committed,
    conditions,
    delete,
    make_info,
    make_long_run,
    publish,
    publish_parts,
    run_pass,
    save_real,
    stamp,
    write_part,
    write_pending,
    write_run,
    write_step,
)
from tests.servers import S3Server

T = TypeVar("T")
WEIGHTS = frozenset({"model"})


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    return make_remote(request.getfixturevalue("moto_s3"))


def make_remote(server: S3Server) -> Store:
    return open_store(f"s3://{server.make_bucket()}/run", storage_options={**server.options, "endpoint": server.endpoint})


def make_store() -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(clock=clock.read), clock


# The plan --------------------------------------------------------------------------------------------------------------


def plan(
    policy: KeepPolicy | None, *steps: StepInfo, busy: tuple[int, ...] = ()
) -> tuple[list[int], Mapping[int, object], list[int]]:
    made = plan_retention(mark_stale(steps), policy, run_id=RUN, now_s=START_S + 1000.0, busy=busy)
    assert {one.step for one in steps} == set(made.reasons)
    return list(made.keep), dict(made.thin), list(made.delete)


def infos(*steps: int) -> list[StepInfo]:
    return [make_info(step) for step in steps]


def test_the_plan_is_what_the_policy_chooses() -> None:
    """What is kept by no policy goes, what is kept in part is thinned."""
    policy = KeepLast(2) | WeightsOnly(KeepEvery(20))
    assert ([50, 60], {20: WEIGHTS, 40: WEIGHTS}, [10, 30]) == plan(policy, *infos(10, 20, 30, 40, 50, 60))


def test_the_newest_good_step_stays_whole() -> None:
    """Whatever a policy says, also one that keeps nothing."""
    assert ([30], {}, [10, 20]) == plan(KeepEvery(7), *infos(10, 20, 30))
    assert ([30], {}, [10, 20]) == plan(WeightsOnly(KeepLast(1)), *infos(10, 20, 30))


def test_without_a_policy_all_stays() -> None:
    """No policy, no run, or no good step: nothing is deleted."""
    assert ([10, 20], {}, []) == plan(None, *infos(10, 20))
    assert ([], {}, []) == plan(KeepLast(1), *(make_info(step, run_id=None) for step in (1, 2)))
    assert ([], {}, []) == plan(KeepLast(1), *(make_info(step, condition=Condition.INCOMPLETE) for step in (1, 2)))


def test_damaged_steps_are_not_counted_and_stay() -> None:
    """With the newest one damaged KeepLast(2) keeps two good ones, and the damaged one is left for whoever may mend it."""
    bad = [make_info(50, condition=Condition.DAMAGED, run_id=None), make_info(40, condition=Condition.INCOMPLETE)]
    assert ([20, 30], {}, [10]) == plan(KeepLast(2), *infos(10, 20, 30), *bad)


def test_pending_and_deleted_steps_are_not_counted() -> None:
    """A save that has begun keeps no place, and neither does what is gone."""
    others = [make_info(50, condition=Condition.PENDING, run_id=None), make_info(40, condition=Condition.DELETED)]
    assert ([30], {}, [10, 20]) == plan(KeepLast(1), *infos(10, 20, 30), *others)


def test_pinned_and_busy_steps_stay() -> None:
    """They count as steps of the run, and are neither deleted nor thinned."""
    steps = [make_info(10, is_pinned=True), *infos(20, 30, 40)]
    assert ([10, 20, 40], {}, [30]) == plan(KeepLast(1), *steps, busy=(20,))
    assert ([10, 20, 40], {30: WEIGHTS}, []) == plan(WeightsOnly(KeepLast(9)), *steps, busy=(20,))


def test_what_a_rollback_has_left_behind_goes() -> None:
    """Steps above the one resumed from go once a lower number was saved later, unless they are pinned or protected."""
    back = make_info(21, time=stamp(START_S + 500), written_s=START_S + 500.0)
    steps = [*infos(10, 20, 30, 40, 60), make_info(50, is_pinned=True), back]
    assert ([10, 20, 21, 40, 50], {}, [30, 60]) == plan(KeepLast(9) | Protect([40]), *steps)


def test_clocks_of_hosts_that_differ_delete_nothing() -> None:
    """A job that goes on on a host whose clock is late seems to save in the past; by the store's clock it does not."""
    later = [make_info(step, time=stamp(START_S - 500 + step)) for step in (40, 50)]
    assert ([20, 30, 40, 50], {}, [10]) == plan(KeepLast(2), *infos(10, 20, 30), *later)


def test_a_thinned_step_is_no_proof_of_a_rollback() -> None:
    """Its record is younger than its save, so the store's clock says nothing of it."""
    thinned = make_info(30, dropped=("optimizer",), sections=("model",), written_s=START_S + 900.0)
    later = [make_info(40, time=stamp(START_S))]
    assert ([20, 30, 40], {}, []) == plan(KeepLast(3), make_info(20, time=stamp(START_S - 100)), thinned, *later)


def test_steps_without_the_wanted_sections_are_left_whole() -> None:
    """A thinning that would leave nothing is none, and one that would change nothing neither."""
    policy = WeightsOnly(KeepLast(9), ("ema", "model"))
    steps = [make_info(1, sections=("actor",)), make_info(2, sections=("model",)), *infos(3, 4)]
    assert ([1, 2, 4], {3: {"ema", "model"}}, []) == plan(policy, *steps)


def test_parts_are_thinned_each_for_itself() -> None:
    """A part without any of the sections stays as it is; if none has any, the step does."""
    parts = make_info(1, parts=("actor", "judge"), sections=("actor/model", "actor/optimizer", "judge/score"))
    assert ("actor/model", "judge/score") == find_left(parts, WEIGHTS)
    assert () == find_left(parts, {"ema", "actor/model"})
    assert ([2], {1: WEIGHTS}, []) == plan(WeightsOnly(KeepLast(9)), parts, make_info(2))


def test_every_step_has_a_reason() -> None:
    """Whoever asks why a step is still there, or not, is told."""
    steps = [*infos(1, 2), make_info(3, is_pinned=True), make_info(4, run_id=OTHER), make_info(5)]
    made = plan_retention(steps, KeepEvery(2), run_id=RUN, now_s=0)
    reasons = {
        1: "not kept by KeepEvery(n=2)",
        2: "kept by KeepEvery(n=2)",
        3: "pinned",
        4: "of another run (run-b)",
        5: "the newest good step",
    }
    assert reasons == made.reasons


# Passes ----------------------------------------------------------------------------------------------------------------


def test_b133_a_pass_goes_by_numbers(store: Store) -> None:
    """Of 8, 9, 10, 11 and keep 2 the steps 10 and 11 stay; what the report says is what was done (B133)."""
    write_run(store, [8, 9, 10, 11])
    report = run_pass(store, KeepLast(2))
    assert {8: "deleted", 9: "deleted", 10: "committed", 11: "committed"} == conditions(store)
    assert ((8, 9), (), (10, 11), (), ()) == (report.deleted, report.thinned, report.kept, report.cleaned, report.warnings)
    assert ((), ()) == ((again := run_pass(store, KeepLast(2))).deleted, again.warnings)


def test_old_steps_are_thinned_to_weights(store: Store) -> None:
    """Bytes of the dropped sections go, those of the kept ones are not written again, and the next pass does nothing more."""
    for step in (10, 20, 30):
        save_real(store, step)
    before = {one.step: one for one in Catalog(store).look()}
    report = run_pass(store, KeepLast(1) | WeightsOnly(KeepEvery(20)))
    after = {one.step: one for one in Catalog(store).look()}
    assert ((10,), (20,), (30,), ()) == (report.deleted, report.thinned, report.kept, report.warnings)
    assert (("model",), ("optimizer",), before[30]) == (after[20].sections, after[20].dropped, after[30])
    assert before[10].nbytes + before[20].section_nbytes["optimizer"] == report.nbytes
    assert ((), ()) == ((again := run_pass(store, KeepLast(1) | WeightsOnly(KeepEvery(20)))).thinned, again.warnings)


@pytest.mark.slow
def test_a_pass_on_a_real_server(seaweedfs: S3Server) -> None:
    """Deleted, thinned, kept, and cleaned of what an earlier incarnation left."""
    store = make_remote(seaweedfs)
    for step in (10, 20, 30):
        save_real(store, step)
    write_pending(store, 40)
    report = prune(Catalog(store), KeepLast(1) | WeightsOnly(KeepEvery(20)), run_id=RUN, dead_before_s=store.now_s() + 60)
    assert ((10,), (20,), (30,), (40,), ()) == (report.deleted, report.thinned, report.kept, report.cleaned, report.warnings)
    assert {10: "deleted", 20: "committed", 30: "committed", 40: "deleted"} == conditions(store)


def test_a_dry_run_tells_all_and_changes_nothing() -> None:
    """The same report as the real pass, with the storage untouched."""
    store, clock = make_store()
    for step in (10, 20, 30):
        save_real(store, step)
    write_pending(store, 40)
    clock.sleep(2 * DAY_S)
    before = store.snapshot()
    policy = KeepLast(1) | WeightsOnly(KeepEvery(20))
    rehearsal = run_pass(store, policy, dry_run=True)
    assert before == store.snapshot()
    assert ((40,), replace(rehearsal, dry_run=False)) == (rehearsal.cleaned, run_pass(store, policy))


def test_b128_b130_nothing_goes_before_a_newer_step_is_committed(store: Store) -> None:
    """With keep 1 the old step stays while a save writes, when it dies, and until it has published (B128, B130)."""
    write_run(store, [10])
    manifest = write_pending(store, 20)
    assert () == run_pass(store, KeepLast(1)).deleted
    assert {10: "committed", 20: "pending"} == conditions(store)
    publish(store, manifest)
    assert (10,) == run_pass(store, KeepLast(1)).deleted
    assert [20] == committed(store)


def test_b134_a_new_run_in_a_used_directory(store: Store) -> None:
    """Step 700 of another run neither counts nor goes, step 100 stays, and the mix is warned of (B134)."""
    write_step(store, 700, run_id=OTHER)
    write_step(store, 701, run_id=None)
    write_step(store, 90)
    write_step(store, 100)
    report = run_pass(store, KeepLast(1))
    assert ((90,), [100, 700, 701]) == (report.deleted, committed(store))
    assert ("steps of another run are not counted and stay: 700, 701; use a directory for each run",) == report.warnings


@pytest.mark.parametrize("num_passes", [4])
def test_b135_several_passes_at_once(store: Store, num_passes: int) -> None:
    """Four that prune one run at the same time raise nothing, and leave what one would have left (B135)."""
    write_run(store, range(8))
    meeting, reports = threading.Barrier(num_passes, timeout=60), []

    def work() -> None:
        meeting.wait()
        reports.append(run_pass(store, KeepLast(2)))

    threads = [threading.Thread(target=work) for _ in range(num_passes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert num_passes == len(reports)
    run_pass(store, KeepLast(2))  # finishes what two that were at the same step have left to each other
    assert [6, 7] == committed(store)
    assert [] == [one.step for one in Catalog(store).look() if one.has_leftovers]


def test_damage_is_left_and_told() -> None:
    """Damaged and incomplete steps stay as they are; the report says which and why."""
    store = MemoryStore()
    write_run(store, [10, 20, 30, 40])
    store.delete([key for key in store.snapshot() if key.startswith("step_40/data")])
    before = store.snapshot()
    report = run_pass(store, KeepLast(2))
    assert ((10,), (20, 30)) == (report.deleted, report.kept)
    assert "step 40 is incomplete and stays: 1 file(s) are not as its record says" in report.warnings[0]
    assert {key: data for key, data in before.items() if key.startswith("step_40/")} == {
        key: data for key, data in store.snapshot().items() if key.startswith("step_40/")
    }


def test_foreign_files_stay_wherever_they_lie(tmp_path: Path) -> None:
    """Files, links and directories of others stay, inside of deleted steps too, and whole where a name only looks like ours."""
    store = LocalStore(tmp_path / "run")
    write_run(store, [1, 2, 3])
    foreign = [
        "step_1/notes.txt",
        "step_1/data/model/loss.png",
        "step_7x/a",
        "step_007/manifest-1.json",
        "STEP_1/manifest-1.json",
    ]
    foreign += ["best/manifest-1.json", "README", "step_9", "pins/notes.txt", "lease.json", "step_1/logs/a"]
    for name in foreign:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "manifest-1.json").write_text("mine")
    (tmp_path / "run" / "step_8").symlink_to(tmp_path / "elsewhere")
    run_pass(store, KeepLast(1))
    assert {1: "deleted", 2: "deleted", 3: "committed"} == conditions(store)
    assert ["mine"] * len(foreign) == [(tmp_path / "run" / name).read_text() for name in foreign]
    assert "mine" == (tmp_path / "run" / "step_8" / "manifest-1.json").read_text()
    assert {"manifest-2.json", "notes.txt", "data", "logs"} == {path.name for path in (tmp_path / "run" / "step_1").iterdir()}


def test_pins_are_looked_at_before_each_deletion() -> None:
    """A step that was pinned since the pass has planned stays."""
    store = MemoryStore()
    write_run(store, [1, 2, 3])

    def pin() -> None:
        store.create(pin_key(2), b"", token="x")

    during = FaultStore(store, [Rule(Verb.CREATE, "step_1/manifest-2.json", do_before(pin))])
    assert (1,) == run_pass(during, KeepLast(1)).deleted
    assert {1: "deleted", 2: "committed", 3: "committed"} == conditions(store)


def test_a_step_that_somebody_saved_over_meanwhile_stays() -> None:
    """What is not what was planned for is left alone, and said."""
    store = MemoryStore()
    write_run(store, [1, 2, 3])
    during = FaultStore(store, [Rule(Verb.CREATE, "step_1/manifest-2.json", do_before(lambda: write_step(store, 2)))])
    report = run_pass(during, KeepLast(1))
    assert ((1,), [2, 3]) == (report.deleted, committed(store))
    assert "step 2 was left alone: it has changed since this pass began" in report.warnings[0]


def test_what_a_job_that_went_back_has_left_behind_goes() -> None:
    """Though it has saved no lower number since; steps that came after it had gone back are its own."""
    back = Resumed(20, stamp(START_S + 500))
    own = [make_info(step, resumed=back, time=stamp(START_S + 500 + step), written_s=START_S + 900.0) for step in (50, 60)]
    assert ([20, 50, 60], {}, [10, 30, 40]) == plan(KeepLast(3), *infos(10, 20, 30, 40), *own)


def test_a_busy_step_is_left_alone() -> None:
    """A step that a save of this process is at is neither deleted nor cleaned, however old its files look."""
    store, clock = make_store()
    write_run(store, [1, 2, 3])
    manifest = write_pending(store, 4)
    busy = BusySteps()
    busy.claim(1, 1)
    busy.claim(4, 1)
    clock.sleep(2 * DAY_S)
    assert (2,) == run_pass(store, KeepLast(1), busy=busy).deleted
    publish(store, manifest)
    assert [1, 3, 4] == committed(store)


def test_a_step_is_claimed_between_plan_and_deletion() -> None:
    """The claim counts when the step's turn comes."""
    store, busy = MemoryStore(), BusySteps()
    write_run(store, [1, 2, 3])
    during = FaultStore(store, [Rule(Verb.CREATE, "step_1/manifest-2.json", do_before(lambda: busy.claim(2, 1)))])
    assert ((1,), [2, 3]) == (run_pass(during, KeepLast(1), busy=busy).deleted, committed(store))


# Cleaning --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age_s", "expected"), [(DAY_S - 1, "pending"), (DAY_S, "deleted")])
def test_b136_an_abandoned_save_goes_and_an_active_one_never(age_s: float, expected: str) -> None:
    """Leftovers of a save count as dead after a day in which nothing was written (B136)."""
    store, clock = make_store()
    write_run(store, [1])
    write_pending(store, 2)
    clock.sleep(age_s)
    report = run_pass(store, None)
    assert {1: "committed", 2: expected} == conditions(store)
    assert ((2,) if expected == "deleted" else ()) == report.cleaned


def test_what_an_earlier_incarnation_left_goes_at_once() -> None:
    """Whoever took the run over says since when; what was written after that stays."""
    store, clock = make_store()
    write_run(store, [1])
    write_pending(store, 2)
    clock.sleep(60)
    taken_s = store.now_s()
    write_pending(store, 3)
    clock.sleep(60)
    prune(Catalog(store), None, run_id=RUN, dead_before_s=taken_s)
    assert {1: "committed", 2: "deleted", 3: "pending"} == conditions(store)


def test_unpublished_parts_stay() -> None:
    """They may be published yet, or are loaded by name; only what died inside of a part goes, and after a day."""
    store, clock = make_store()
    write_run(store, [1])
    write_part(store, 2, "actor")
    before = store.snapshot()
    part = StoreBelow(store, "step_2/parts/critic/")
    dead = make_manifest(1, "d" * 13)
    for _ in write_files(part, dead):
        pass
    clock.sleep(3600)
    assert () == prune(Catalog(store), KeepLast(1), run_id=RUN, dead_before_s=store.now_s()).cleaned
    clock.sleep(DAY_S)
    assert (2,) == prune(Catalog(store), KeepLast(1), run_id=RUN, dead_before_s=store.now_s()).cleaned
    assert before == {key: data for key, data in store.snapshot().items() if not key.startswith("step_2/parts/critic/")}
    assert ["step_2/parts/critic/manifest-1.json"] == [key for key in store.snapshot() if "critic" in key]


def test_a_step_in_parts_is_deleted_with_them() -> None:
    """By the record of the step first; nothing of a part stays but its tombstone."""
    store = MemoryStore()
    publish_parts(store, 1, tuple(write_part(store, 1, role) for role in ("actor", "critic")))
    write_step(store, 2, time_s=time.time() + 60)
    assert ((1,), ()) == ((report := run_pass(store, KeepLast(1))).deleted, report.warnings)
    left = {key.rpartition("/")[2] for key in store.snapshot() if key.startswith("step_1/")}
    assert ({1: "deleted", 2: "committed"}, {"manifest-2.json"}) == (conditions(store), left)


def test_superseded_files_go_after_their_grace() -> None:
    """Of a step that was saved over the old files stay for an hour, for readers."""
    store, clock = make_store()
    write_run(store, [1, 1])
    clock.sleep(3599)
    assert () == run_pass(store, None).cleaned
    clock.sleep(1)
    assert (1,) == run_pass(store, None).cleaned
    assert ([("committed", False)], 3) == (
        [(one.condition, one.has_leftovers) for one in Catalog(store).look()], len(store.snapshot())
    )  # fmt: skip


def test_tombstones_go_after_a_week_with_their_directory(tmp_path: Path) -> None:
    """And the directory stays if somebody has put a file there."""
    clock = Clock()
    inner = MemoryStore(clock=clock.read)
    write_run(inner, [1, 2])
    delete(inner, 1)
    clock.sleep(TOMBSTONE_S - 1)
    assert () == run_pass(inner, None).cleaned
    clock.sleep(1)
    assert ((1,), {2: "committed"}) == (run_pass(inner, None).cleaned, conditions(inner))
    local = LaterStore(LocalStore(tmp_path / "run"))
    write_run(local, [1, 2, 3])
    (tmp_path / "run" / "step_2" / "notes.txt").write_text("mine")
    delete(local, 1)
    delete(local, 2)
    local.later_s = TOMBSTONE_S + 1
    assert (1, 2) == run_pass(local, None).cleaned
    assert ["step_2", "step_3"] == sorted(path.name for path in (tmp_path / "run").iterdir())
    assert ["notes.txt"] == [path.name for path in (tmp_path / "run" / "step_2").iterdir()]


class LaterStore(WrapperStore):
    """A store whose clock is ahead of its files."""

    later_s = 0.0

    def now_s(self) -> float:
        return self.inner.now_s() + self.later_s


def test_leftovers_of_other_runs_and_of_damaged_steps_stay() -> None:
    """Only what is of this run, or of no run that one could know of, is cleaned."""
    store, clock = make_store()
    write_step(store, 1, run_id=OTHER)
    write_step(store, 1, run_id=OTHER)
    write_run(store, [2, 2, 3])
    store.delete([key for key in store.snapshot() if key.startswith("step_2/data") and "-2-" in key])
    clock.sleep(2 * DAY_S)
    before = store.snapshot()
    assert () == run_pass(store, None).cleaned
    assert before == store.snapshot()


# Faults ----------------------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_is_a_warning_and_the_next_pass_finishes(store: Store) -> None:
    """One step that cannot be deleted keeps no other; a deletion that broke off is finished."""
    write_run(store, [1, 2, 3, 4])
    broken = FaultStore(store, [Rule(Verb.DELETE, "step_1/data/*", fail(StorageDenied("no", file="x")))])
    report = run_pass(broken, KeepLast(1))
    assert ((2, 3), ("could not delete step 1: no",)) == (report.deleted, report.warnings)
    assert {1: "deleted", 2: "deleted", 3: "deleted", 4: "committed"} == conditions(store)
    assert ((1,), ()) == ((again := run_pass(store, KeepLast(1))).cleaned, again.warnings)
    assert [] == [one.step for one in Catalog(store).look() if one.has_leftovers]


def test_a_store_that_does_not_answer_ends_the_pass() -> None:
    """Nothing more is asked of it; the next pass goes on."""
    store = MemoryStore()
    write_run(store, [1, 2, 3, 4])
    broken = FaultStore(store, [Rule(Verb.LIST, "step_1/", fail(StorageUnavailable("down", file="x")), nth=3)])
    report = run_pass(broken, KeepLast(1))
    assert ((), ("could not delete step 1: down; the pass ends here",)) == (report.deleted, report.warnings)
    assert (1, 2, 3) == run_pass(store, KeepLast(1)).deleted


def test_without_create_if_absent_steps_are_deleted_and_not_thinned() -> None:
    """A tombstone needs no decision, a thinned record does: one warning, and the step stays whole."""
    inner = MemoryStore()
    for step in (1, 2, 3, 4):
        save_real(inner, step)
    report = run_pass(UnguardedStore(inner), KeepLast(1) | WeightsOnly(Protect([2, 3])))
    assert ((1,), (), (2, 3, 4), 1) == (report.deleted, report.thinned, report.kept, len(report.warnings))
    assert "could not thin step 2" in report.warnings[0]


class Died(BaseException):
    """The end of the process."""


class MortalStore(WrapperStore):
    """A store whose caller dies at the `last`-th call, before or after it took effect, and asks for nothing more."""

    def __init__(self, inner: Store, last: int, *, after: bool) -> None:
        super().__init__(inner)
        self.num_calls = 0
        self._last, self._after = last, after
        self._lock = threading.Lock()

    def around(self, call: Call, run: Callable[[], T]) -> T:
        with self._lock:
            self.num_calls += 1
            number = self.num_calls
        if number < self._last or (number == self._last and self._after):
            result = run()
            if number < self._last:
                return result
        raise Died


def prune_dying(store: Store, policy: KeepPolicy, last: int, *, after: bool) -> bool:
    """Whether a pass got to its end before its `last`-th call."""
    try:
        prune(Catalog(MortalStore(store, last, after=after), num_threads=1), policy, run_id=RUN)
    except Died:
        return False
    return True


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pass_may_die_at_every_call(*, after: bool) -> None:
    """Wherever it dies, kept steps are whole, others as they were, thinned or deleted; and the next pass ends as any."""
    origin = MemoryStore()
    write_step(origin, 10)
    save_real(origin, 20)
    write_step(origin, 30, time_s=time.time() + 60)
    policy = KeepLast(1) | WeightsOnly(KeepEvery(20))
    whole = MemoryStore(origin.snapshot())
    run_pass(whole, policy)
    expected = [(one.step, one.condition, one.sections) for one in Catalog(whole).look()]
    last, is_done = 0, False
    while not is_done:
        last += 1
        store = MemoryStore(origin.snapshot())
        is_done = prune_dying(store, policy, last, after=after)
        found = {one.step: one for one in Catalog(store).look()}
        assert {found[10].condition} <= {"committed", "deleted"}
        assert [("committed", "")] * 2 == [(found[step].condition, found[step].note) for step in (20, 30)]
        assert found[20].sections in (("model",), ("model", "optimizer"))
        run_pass(store, policy)
        assert expected == [(one.step, one.condition, one.sections) for one in Catalog(store).look()]
    assert last > 50


def test_a_pass_over_a_thousand_steps_asks_for_little(tmp_path: Path) -> None:
    """With nothing to do a second pass lists the run; with one step to delete it lists all that are to stay once more."""
    inner = make_long_run(tmp_path, 1000)
    store = CountingStore(inner)
    catalog = Catalog(store)
    prune(catalog, KeepLast(1000), run_id=RUN)
    assert (1 + 3 * 1000, 2 * 1000) == (store.count(Verb.LIST).calls, store.count(Verb.READ).calls)
    prune(catalog, KeepLast(1000), run_id=RUN)
    assert (2 + 3 * 1000, 2 * 1000) == (store.count(Verb.LIST).calls, store.count(Verb.READ).calls)
    write_step(inner, 1000)
    before = store.count(Verb.LIST).calls
    assert (0,) == prune(catalog, KeepLast(1000), run_id=RUN).deleted
    lists = store.count(Verb.LIST).calls - before
    assert 1 + 3 + 1 + 1001 + 3 * 2 + 2 + 6 == lists  # the run, the new step, both again, two steps, pins twice, the deletion
    assert 2 * 1000 + 20 > store.count(Verb.READ).calls


def test_b136_the_best_and_the_last_stay() -> None:
    """Metrics come from the records."""
    store = MemoryStore()
    for step, loss in enumerate([3.0, 1.0, 2.0, "nan", 4.0]):
        write_step(store, step, metrics={"loss": loss})
    run_pass(store, KeepBest("loss", 2) | KeepLast(1))
    assert [1, 2, 4] == committed(store)


def test_steps_of_the_pass_are_those_of_the_directory() -> None:
    """Their files lie below the prefix of each step."""
    store = MemoryStore()
    write_run(store, [1, 2])
    run_pass(store, KeepLast(1))
    assert {"step_1/manifest-2.json"} == {key for key in store.snapshot() if not key.startswith(step_prefix(2))}

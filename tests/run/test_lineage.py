"""What steps say of their run, so that the newest one is found: times that rise, and where the job had gone on from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anyshard import _api
from anyshard.commit.cleaning import CleanRules, clean_step
from anyshard.commit.resolve import resolve
from anyshard.commit.stamp import stamp_after
from anyshard.commit.thinning import thin_step
from anyshard.errors import StorageError
from anyshard.records.manifest import Resumed
from anyshard.run.catalog import Catalog
from anyshard.run.step_info import step_prefix
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from anyshard.storage.wrappers.below import StoreBelow
from tests.run.made_steps import RUN, write_pending
from tests.run.run_cases import open_run

AHEAD = "2100-01-02T03:04:05.678Z"
BACK = Resumed(100, AHEAD)


def save_step(store: Store, step: int, **given: Any) -> None:
    """A step as a run saves it, waited for or not."""
    state = {name: {"weight": np.full(20, step, dtype=np.float32)} for name in ("model", "optimizer")}
    place = StoreBelow(store, step_prefix(step))
    common: dict[str, Any] = {"overwrite": False, "group": None, "options": None, "sinks": ()}
    if given.pop("waits", True):
        _api.save_step(place, state, run_id=RUN, step=step, **common, **given)
    else:
        _api.async_save_step(place, state, run_id=RUN, step=step, **common, **given).committed(60)


@pytest.mark.parametrize(
    ("time", "earlier", "expected"),
    [
        ("2026-01-02T03:04:05.000Z", (), "2026-01-02T03:04:05.000Z"),
        ("2026-01-02T03:04:05.000Z", ("", "2026-01-02T03:04:04.999Z"), "2026-01-02T03:04:05.000Z"),
        ("2026-01-02T03:04:05.000Z", ("2026-01-02T03:04:05.000Z", ""), "2026-01-02T03:04:05.001Z"),
        ("2026-01-02T03:04:05.000Z", ("2026-01-02T03:04:06.1234567+00:00", "2026-01-02T03:04:06Z"), "2026-01-02T03:04:06.124Z"),
    ],
)
def test_stamps_rise(time: str, earlier: tuple[str, ...], expected: str) -> None:
    """A time is taken as it is, or just after the latest of those that are not earlier."""
    assert expected == stamp_after(time, earlier)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("given", [{"after": AHEAD}, {"resumed": BACK}, {"after": AHEAD, "resumed": BACK}])
def test_a_save_is_stamped_later_than_all_that_its_run_knows(given: dict[str, Any], waits: bool) -> None:
    """On a host whose clock is late, too, whether it is waited for or not; and it says where the job had gone on from."""
    store = MemoryStore()
    save_step(store, 200, waits=waits, **given)
    (found,) = Catalog(store).look()
    assert ("2100-01-02T03:04:05.679Z", given.get("resumed")) == (found.time, found.resumed)


def test_a_plain_save_is_stamped_by_the_clock_of_its_host() -> None:
    """And says nothing of a step that it had gone on from."""
    store = MemoryStore()
    save_step(store, 200)
    (found,) = Catalog(store).look()
    assert (None, True) == (found.resumed, found.time < AHEAD)


def test_thinned_and_fenced_steps_say_it_still() -> None:
    """Both write the record anew, and keep time and origin of the save."""
    store = MemoryStore()
    save_step(store, 200, resumed=BACK)
    own = StoreBelow(store, step_prefix(200))
    thin_step(own, ["model"])
    write_pending(store, 200)
    assert clean_step(own, CleanRules(0.0, 0.0)).fenced == 3
    manifest = resolve(own).manifest
    assert (BACK, "2100-01-02T03:04:05.679Z", 3) == (manifest.resumed, manifest.time, manifest.generation)


def test_a_job_that_goes_on_where_a_clock_is_late_is_not_behind() -> None:
    """Steps 300 and 400, saved on a host ten minutes behind, are newer than 100 and 200 were."""
    store = MemoryStore()
    save_step(store, 100)
    save_step(store, 200, after=AHEAD)
    for step in (300, 400):
        save_step(store, step, after=Catalog(store).look()[-1].time)
    assert [False] * 4 == [one.is_stale for one in Catalog(store).look()]


def test_steps_that_a_rollback_left_behind_are_stale_by_a_higher_one() -> None:
    """100, 200 and 300, back to 100, then 500: the steps between are of another branch."""
    store = MemoryStore()
    for step in (100, 200, 300):
        save_step(store, step)
    newest = Catalog(store).look()[-1].time
    save_step(store, 500, after=newest, resumed=replace(BACK, time=newest))
    assert [200, 300] == [one.step for one in Catalog(store).look() if one.is_stale]


# ------------------------------------------------------------------------------------------------------------------------ runs


def train(place: Store, *steps: int, back_to: int | None = None) -> int | None:
    """A job that goes on from a step (None: the newest), saves these, and ends; the step that it went on from."""
    state = {"model": {"w": torch.zeros(3)}}
    with open_run(place) as run:
        report = run.restore_or_init(state) if back_to is None else run.load(state, step=back_to)
        for step in steps:
            run.save(step, state)
    return None if report is None else report.step


def test_a_restart_on_a_host_whose_clock_is_late_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it saves is the newest all the same, and the next restart goes on from there."""
    place = MemoryStore()
    train(place, 100, 200)
    late = "2020-01-02T03:04:05.678Z"
    monkeypatch.setattr("anyshard.committing.utc_now", lambda: late)
    monkeypatch.setattr("anyshard.run.custody.utc_now", lambda: late)
    assert (200, 400) == (train(place, 300, 400), train(place))


def test_a_fallback_never_takes_a_step_of_an_abandoned_branch() -> None:
    """100 to 400, back to 200, then 500: with 500 damaged it is 200 that counts, not 400."""
    place = MemoryStore()
    train(place, 100, 200, 300, 400)
    train(place, 500, back_to=200)
    place.delete([next(key for key in place.snapshot() if key.startswith("step_500/index"))])
    assert 200 == train(place)


def test_an_error_of_the_storage_sets_no_run_back() -> None:
    """A record that cannot be read this time ends the start, and the step stays as it is."""
    place = MemoryStore()
    train(place, 100, 200)
    with pytest.raises(StorageError, match="no answer"):
        train(FaultStore(place, [Rule(Verb.READ, "step_200/manifest-1.json", fail(StorageError("no answer", file="m")))]), 200)
    assert 200 == train(place)

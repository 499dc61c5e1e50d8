"""A rank dies or freezes in the middle of a load."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import anyshard
from anyshard.testing.launch import Launcher
from tests.ranks import death_cases
from tests.ranks.death_cases import make_tensors
from tests.ranks.scenes import tell_deaths, wake_all

pytestmark = pytest.mark.slow

# Who dies where, and the phase in which the others miss it, before and after the first tensor has changed.
BEFORE = {
    (1, "load.begin"): "ready",
    (1, "load.plan.end"): "ready",
    (1, "post of ready"): "ready",
    (0, "load.begin"): "records",
    (0, "load.records.begin"): "fill",
    (0, "post of ready"): "fill",
}
AFTER = {
    (1, "load.fill.begin"): "filled",
    (1, "post of filled"): "filled",
    (0, "load.fill.begin"): "decide",
    (0, "load.apply.end"): "decide",
}
DEATHS = BEFORE | AFTER


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    place = tmp_path_factory.mktemp("run") / "step_1"
    anyshard.save(place, {"model": make_tensors("1")})
    return place


@pytest.fixture(scope="module")
def outcomes(launch: Launcher, stored: Path) -> dict[tuple[int, str], list[Any]]:
    """Of all deaths, what the ranks that live tell of the load and of their state."""
    kill = int(signal.SIGKILL)
    cases = {(victim, at): (victim, death_cases.load_and_strike, (str(stored), kill, at, victim)) for victim, at in DEATHS}
    return tell_deaths(launch, cases)


@pytest.mark.parametrize("death", BEFORE, ids=str)
def test_a_death_before_the_fill(outcomes: dict[tuple[int, str], list[Any]], death: tuple[int, str]) -> None:
    """The others name rank and phase in time, and nothing of theirs has changed."""
    missed = {"error": "RankMissing", "failures": {death[0]: [BEFORE[death], "RankMissing"]}, "is_soon": True}
    assert [(missed, True)] * 2 == outcomes[death]


@pytest.mark.parametrize("death", AFTER, ids=str)
def test_a_death_after_the_fill_has_begun(outcomes: dict[tuple[int, str], list[Any]], death: tuple[int, str]) -> None:
    """The others are told in time that their state is undefined, and for want of whom."""
    told = {"error": "LoadInterrupted", "failures": {death[0]: [AFTER[death], "RankMissing"]}, "is_soon": True}
    assert [told] * 2 == [outcome for outcome, _ in outcomes[death]]


@pytest.mark.parametrize("at", ["load.plan.end", "load.fill.begin"])
def test_a_rank_that_was_frozen_in_a_load(launch: Launcher, stored: Path, at: str) -> None:
    """It fails as the others have, and all of them load the checkpoint afterwards."""
    with launch(death_cases.load_and_freeze, str(stored), at, 1, size=3) as launched:
        ended = [one.value or one.error for one in wake_all(launched, 1)]
    whole = {name: tensor.numpy().tobytes() for name, tensor in make_tensors("1").items()}
    error = "LoadInterrupted" if at == "load.fill.begin" else "RankMissing"
    assert [(error, whole)] * 3 == [(outcome["error"], found) for outcome, found in ended]

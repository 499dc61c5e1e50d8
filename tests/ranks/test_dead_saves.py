"""A rank dies in the middle of a save: what the others raise, what is on storage, what the next save makes of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import anyshard
from anyshard.testing.launch import Launcher
from tests.ranks import death_cases
from tests.ranks.death_cases import NUM_RANKS, make_tensors
from tests.ranks.scenes import look, ranks_with_blobs, tell_deaths

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Death:
    """Who dies where; the phase in which the others miss it, None if they have saved; the ranks whose blobs are left."""

    victim: int
    at: str
    phase: str | None
    left: frozenset[int] = frozenset()  # the coordinator removes all that the attempt has made
    is_new: bool = False

    def __str__(self) -> str:
        return f"rank {self.victim} at {self.at}{', new structure' if self.is_new else ''}"


FIRST, EVERYBODY = frozenset({0}), frozenset(range(NUM_RANKS))

DEATHS = (
    Death(1, "save.begin", "durable"),
    Death(1, "save.begin", "structure", is_new=True),
    Death(1, "post of structure", "structure", is_new=True),
    Death(1, "save.begin.begin", "durable", is_new=True),
    Death(1, "save.block.staged", "durable"),
    Death(1, "save.blob.durable", "durable"),
    Death(1, "post of durable", "durable"),
    Death(1, "save.compare.begin", None, EVERYBODY),
    Death(0, "save.begin", "begin"),
    Death(0, "save.plan.end", "begin", is_new=True),
    Death(0, "save.attempt.begun", "begin"),
    Death(0, "save.block.staged", "question"),
    Death(0, "save.compare.begin", "question", FIRST),
    Death(0, "save.compare.end", "decide", FIRST),
    Death(0, "save.publish.begin", "published", EVERYBODY),  # decided, so nothing may be deleted
    Death(0, "storage.create.renamed manifest-1.json", None, EVERYBODY),
    Death(0, "save.published", None, EVERYBODY),
)
each_death = pytest.mark.parametrize("death", DEATHS, ids=str)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[Death, Path]:
    """A directory for the steps of each death."""
    return {death: tmp_path_factory.mktemp("death") for death in DEATHS}


@pytest.fixture(scope="module")
def outcomes(launch: Launcher, places: dict[Death, Path]) -> dict[Death, list[Any]]:
    """What the ranks that live tell of each death."""
    kill = int(signal.SIGKILL)
    return tell_deaths(
        launch,
        {
            death: (death.victim, death_cases.save_and_strike, (str(place), kill, death.at, death.victim, death.is_new))
            for death, place in places.items()
        },
    )


@each_death
def test_the_others_end_with_one_error(outcomes: dict[Death, list[Any]], death: Death) -> None:
    """They name the dead rank and the phase in time, or have saved without it."""
    failed = {"error": "RankMissing", "failures": {death.victim: [death.phase, "RankMissing"]}, "is_soon": True}
    expected = {"error": None} if death.phase is None else failed
    assert [expected] * 2 == outcomes[death]


@each_death
def test_the_step_is_whole_or_absent(outcomes: dict[Death, list[Any]], places: dict[Death, Path], death: Death) -> None:
    """It is whole where the others say that it is, the step before it is untouched, and each rank removes its own blobs only."""
    place = places[death]
    assert ("1", None if death.phase else "2", death.left) == (
        look(place / "step_1"),
        look(place / "step_2"),
        ranks_with_blobs(place / "step_2"),
    )


@each_death
def test_a_later_process_saves_over_what_is_left(
    outcomes: dict[Death, list[Any]], places: dict[Death, Path], death: Death
) -> None:
    """Whatever is there, the next save of the step commits."""
    place = places[death] / "step_2"
    anyshard.save(place, {"model": make_tensors("3")}, overwrite=True)
    assert "3" == look(place)


def test_a_death_while_a_step_is_saved_over(launch: Launcher, tmp_path: Path) -> None:
    """Until the new generation is published readers get the old one, whose blobs are all there."""
    moments = {"save.block.staged": "1", "save.publish.begin": "1", "save.published": "2"}
    cases = {at: (0, death_cases.save_over_and_strike, (str(tmp_path / at), at, 0)) for at in moments}
    errors = {at: [outcome["error"] for outcome in outcomes] for at, outcomes in tell_deaths(launch, cases).items()}
    assert {at: ["RankMissing" if seed == "1" else None] * 2 for at, seed in moments.items()} == errors
    assert moments == {at: look(tmp_path / at) for at in moments}


def test_a_coordinator_that_dies_with_the_store(launch: Launcher, tmp_path: Path) -> None:
    """The others know of nothing but the loss of the store, unless the storage shows that the save is committed."""
    moments = {"save.block.staged": None, "save.publish.begin": None, "save.published": "2"}
    cases = {at: (0, death_cases.save_and_strike_with_store, (str(tmp_path / at), at)) for at in moments}
    errors = {at: [outcome["error"] for outcome in outcomes] for at, outcomes in tell_deaths(launch, cases).items()}
    assert {at: [None if seed else "KeyValueStoreLost"] * 2 for at, seed in moments.items()} == errors
    assert moments == {at: look(tmp_path / at / "step_2") for at in moments}
    assert {0, 1, 2} == ranks_with_blobs(tmp_path / "save.publish.begin" / "step_2")

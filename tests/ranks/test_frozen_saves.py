"""A rank is frozen in the middle of a save and wakes when the others have given it up, or when a new job has come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anyshard import ops
from anyshard.testing.launch import Launcher
from tests.ranks import death_cases
from tests.ranks.death_cases import NUM_RANKS
from tests.ranks.scenes import look, play, ranks_with_blobs, wake_all

pytestmark = pytest.mark.slow

# Who freezes where; the phase in which the others miss it, or None if they have saved without it.
FREEZES: dict[tuple[int, str], str | None] = {
    (1, "save.begin"): "durable",
    (1, "save.block.staged"): "durable",
    (1, "save.compare.begin"): None,
    (0, "save.attempt.begun"): "begin",
    (0, "save.block.staged"): "question",
    (0, "save.compare.end"): "decide",
}
SAVED = {"error": None}


def missed(rank: int, phase: str) -> dict[str, Any]:
    return {"error": "RankMissing", "failures": {rank: [phase, "RankMissing"]}, "is_soon": True}


@pytest.fixture(scope="module")
def scenes(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], tuple[Path, list[Any]]]:
    """All freezes: the directory of the steps, and each rank's outcome of step 2 and of step 3."""
    places = {freeze: tmp_path_factory.mktemp("freeze") for freeze in FREEZES}
    cases = {freeze: (death_cases.save_and_freeze, (str(place), freeze[1], freeze[0])) for freeze, place in places.items()}
    played = play(launch, cases)
    return {
        freeze: (places[freeze], [one.value or one.error for one in wake_all(launched, freeze[0])]) for freeze, launched in played
    }


@pytest.mark.parametrize("freeze", FREEZES, ids=str)
def test_all_ranks_end_alike_and_save_again(
    scenes: dict[tuple[int, str], tuple[Path, list[Any]]], freeze: tuple[int, str]
) -> None:
    """The rank that was frozen ends as the others have; nothing of the step is left if it failed, and the next one commits."""
    phase, (place, outcomes) = FREEZES[freeze], scenes[freeze]
    told = [{**outcome, "is_soon": True} if outcome["error"] else outcome for outcome, _ in outcomes]  # time stood still there
    assert [missed(freeze[0], phase) if phase else SAVED] * NUM_RANKS == told
    assert [SAVED] * NUM_RANKS == [outcome for _, outcome in outcomes]
    left = set() if phase else set(range(NUM_RANKS))
    assert ("1", None if phase else "2", "3", left) == (
        *(look(place / f"step_{step}") for step in (1, 2, 3)),
        ranks_with_blobs(place / "step_2"),
    )


def save_in_a_new_job(launch: Launcher, place: Path) -> None:
    with launch(death_cases.save_once, str(place), "3", size=NUM_RANKS) as launched:
        assert [SAVED] * NUM_RANKS == [one.value for one in launched.wait()]


def clean(launch: Launcher, place: Path) -> None:
    ops.clean(place, older_than_s=0, grace_s=0)


def do_nothing(launch: Launcher, place: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("meanwhile", "error", "seen"),
    [(do_nothing, None, "2"), (save_in_a_new_job, "CommitConflict", "3"), (clean, "CommitConflict", None)],
)
def test_a_coordinator_that_wakes_after_its_decision(
    launch: Launcher, tmp_path: Path, meanwhile: Callable[[Launcher, Path], None], error: str | None, seen: str | None
) -> None:
    """It publishes a whole checkpoint if nobody took the generation meanwhile, and none if somebody did."""
    with launch(death_cases.save_and_freeze, str(tmp_path), "save.publish.begin", 0, size=NUM_RANKS) as launched:
        for rank in range(NUM_RANKS):
            launched.wait_until_stopped(rank)
        meanwhile(launch, tmp_path / "step_2")
        first, *others = [one.value or one.error for one in wake_all(launched, 0)]
    assert (error, [missed(0, "published")] * 2) == (first[0]["error"], [outcome for outcome, _ in others])
    assert (seen, "3") == (look(tmp_path / "step_2"), look(tmp_path / "step_3"))

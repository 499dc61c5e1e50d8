"""The structure of the app state changes between saves: on all ranks, on some, or for a process that knows of no save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anyshard
from anyshard.testing.world import Worlds
from tests.ranks import agreement_cases

pytestmark = pytest.mark.slow

NUM_RANKS = 4
PLANNED, CACHED = {"cached": False}, {"cached": True}
NO_PLAN = "has no plan of an earlier save (a new process, or its earlier saves failed)"
GROWN = "holds another structure than at its last save: new model/grown"


def differ(rank: int, text: str) -> dict[str, Any]:
    return {"error": "StructureChanged", "failures": {rank: text}}


def steps_in(place: Path) -> list[int]:
    steps = []
    for step in range(1, 6):
        try:
            with anyshard.open(place / f"step_{step}"):
                steps.append(step)
        except anyshard.CheckpointNotFound:
            pass
    return steps


def test_a_change_on_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """All plan afresh, once."""
    found = worlds(NUM_RANKS).run(agreement_cases.change, str(tmp_path), "all_grow", [0, 1, 2, 3])
    assert [[PLANNED, CACHED, PLANNED, CACHED, CACHED]] * NUM_RANKS == found


@pytest.mark.parametrize("rank", [0, 2])
def test_a_change_on_one_rank(worlds: Worlds, tmp_path: Path, rank: int) -> None:
    """The save fails on all ranks, naming rank and address, and leaves nothing; the next one plans afresh and commits."""
    found = worlds(NUM_RANKS).run(agreement_cases.change, str(tmp_path), f"{rank}_grows", [rank])
    assert [[PLANNED, CACHED, differ(rank, GROWN), PLANNED, CACHED]] * NUM_RANKS == found
    assert [1, 2, 4, 5] == steps_in(tmp_path)
    assert [] == list((tmp_path / "step_3").rglob("*.*"))


def test_a_restarted_rank(worlds: Worlds, tmp_path: Path) -> None:
    """A rank that comes again with an empty cache fails the save on all ranks; the next one plans afresh and commits."""
    found = worlds(NUM_RANKS).run(agreement_cases.restart, str(tmp_path), "1_restarts", [1])
    assert [[PLANNED, CACHED, differ(1, NO_PLAN), PLANNED, CACHED]] * NUM_RANKS == found


def test_a_restarted_job(worlds: Worlds, tmp_path: Path) -> None:
    """Ranks that have all come again plan afresh."""
    found = worlds(NUM_RANKS).run(agreement_cases.restart, str(tmp_path), "all_restart", [0, 1, 2, 3])
    assert [[PLANNED, CACHED, PLANNED, CACHED, CACHED]] * NUM_RANKS == found


def test_a_restarted_coordinator(worlds: Worlds, tmp_path: Path) -> None:
    """The others wait for the one that they know, up to the timeout; then they find each other, and that its cache is empty."""
    found = worlds(NUM_RANKS).run(agreement_cases.restart, str(tmp_path), "0_restarts", [0])
    assert [[PLANNED, CACHED, "RankMissing", differ(0, NO_PLAN), PLANNED]] * NUM_RANKS == [
        [*outcomes[:2], outcomes[2]["error"], *outcomes[3:]] for outcomes in found
    ]

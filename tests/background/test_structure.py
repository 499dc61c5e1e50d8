"""The structure of the app state changes between asynchronous saves, on all ranks or on one, waited for or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anyshard
from anyshard.testing.world import Worlds
from tests.background import rank_cases
from tests.background.rank_cases import NUM_CALLS

pytestmark = pytest.mark.slow

NUM_RANKS = 4
PLANNED, CACHED = {"cached": False}, {"cached": True}
BEGUN = None
GROWN = ["holds another structure than at its last save", "new model/grown"]


def list_steps(place: Path) -> list[int]:
    """The steps that a reader finds."""
    found = []
    for step in range(1, NUM_CALLS + 1):
        try:
            with anyshard.open(place / f"step_{step}"):
                found.append(step)
        except anyshard.CheckpointNotFound:
            pass
    return found


def list_errors(outcomes: list[Any]) -> list[str]:
    """The classes of the errors of some calls."""
    return [outcome[0] for outcome in outcomes if isinstance(outcome, list)]


def differ(rank: int) -> list[Any]:
    return ["StructureChanged", {rank: GROWN}]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_change_on_one_rank(worlds: Worlds, tmp_path: Path, rank: int) -> None:
    """Who waits for the save hears of rank and address, on all ranks; the next save plans afresh and commits."""
    found = worlds(NUM_RANKS).run(rank_cases.change, str(tmp_path), f"async_{rank}_grows", [rank], True, 1)
    assert [[PLANNED, CACHED, differ(rank), PLANNED, CACHED, CACHED, CACHED, None]] * NUM_RANKS == found
    assert [1, 2, 4, 5, 6, 7] == list_steps(tmp_path)
    assert [] == list((tmp_path / "step_3").rglob("*.*"))


def test_a_change_that_nobody_waits_for(worlds: Worlds, tmp_path: Path) -> None:
    """The changed rank hears of it by the call itself, the others by their next one, which saves nothing; then saves commit."""
    changed = 2
    found = worlds(NUM_RANKS).run(rank_cases.change, str(tmp_path), "async_2_grows_unseen", [changed], False, 1)
    own = found.pop(changed)
    assert [[BEGUN, BEGUN, BEGUN, differ(changed), BEGUN, BEGUN, BEGUN, None]] * (NUM_RANKS - 1) == found
    assert [BEGUN, BEGUN, differ(changed), own[3], BEGUN, BEGUN, BEGUN, None] == own
    assert ["EarlierSaveFailed"] == list_errors([own[3]])
    assert [1, 2, 5, 6, 7] == list_steps(tmp_path)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_change_in_a_ring(worlds: Worlds, tmp_path: Path, rank: int) -> None:
    """With two saves under way the next one may differ too: each rank hears of both, two calls are refused, then saves commit."""
    found = worlds(NUM_RANKS).run(rank_cases.change, str(tmp_path), f"async_{rank}_grows_ring", [rank], False, 2)
    errors = [list_errors(outcomes) for outcomes in found]
    assert {1, 2} >= {names.count("StructureChanged") for names in errors} > set()
    assert {"StructureChanged", "EarlierSaveFailed"} >= {name for names in errors for name in names}
    steps = list_steps(tmp_path)
    assert ([1, 2], 7) == (steps[:2], steps[-1])
    assert 3 not in steps


@pytest.mark.parametrize(("waits", "limit"), [(True, 1), (False, 2)])
def test_a_change_on_all_ranks(worlds: Worlds, tmp_path: Path, waits: bool, limit: int) -> None:
    """All plan afresh, once, and every save commits."""
    name = f"async_all_grow_{limit}"
    found = worlds(NUM_RANKS).run(rank_cases.change, str(tmp_path), name, [0, 1, 2, 3], waits, limit)
    planned = [PLANNED, CACHED, PLANNED, CACHED, CACHED, CACHED, CACHED]
    assert [[*(planned if waits else [BEGUN] * NUM_CALLS), None]] * NUM_RANKS == found
    assert list(range(1, NUM_CALLS + 1)) == list_steps(tmp_path)

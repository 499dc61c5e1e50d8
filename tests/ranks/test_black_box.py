"""Ranks that come late to a save or load, or not at all, or to another one: no collective, one error, and the next call works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anyshard.testing.world import Worlds
from tests.ranks import agreement_cases

pytestmark = pytest.mark.slow

NUM_RANKS = 4


def missing(ranks: list[int], phase: str) -> dict[str, Any]:
    return {"error": "RankMissing", "failures": dict.fromkeys(ranks, f"{phase}: RankMissing: not heard of")}


def test_a_late_rank(worlds: Worlds, tmp_path: Path) -> None:
    """With an unchanged structure the others write at once, whatever one rank does; all wait for it to commit."""
    found = worlds(NUM_RANKS).run(agreement_cases.come_late, str(tmp_path), 1)
    others = [one["times_s"] for rank, one in enumerate(found) if rank != 1]
    assert [True] * NUM_RANKS == [one["cached"] for one in found]
    assert max(times_s["save.write.end"] for times_s in others) < found[1]["called_s"] < min(t["save.end"] for t in others)


def test_a_save_calls_no_collective(worlds: Worlds, tmp_path: Path) -> None:
    """No process group's count of collectives rises in a save, and no process group is made; one collective would be seen."""
    found = worlds(NUM_RANKS).run(agreement_cases.count_collectives, str(tmp_path))
    assert [{"save": [0, 0], "planned save": [0, 0], "load": [0, 0], "all_reduce": [1, 0]}] * NUM_RANKS == found


@pytest.mark.parametrize(
    ("callers", "blamed", "phase"), [([0], [1, 2, 3], "durable"), ([1], [0], "begin"), ([0, 2, 3], [1], "durable")]
)
def test_a_save_called_on_some_ranks(worlds: Worlds, tmp_path: Path, callers: list[int], blamed: list[int], phase: str) -> None:
    """They name those that are missing at the timeout; who comes later is told the same at once; the next save commits."""
    found = worlds(NUM_RANKS).run(agreement_cases.save_on_some, str(tmp_path), callers)
    assert [[missing(blamed, phase), {"cached": True}]] * NUM_RANKS == found


@pytest.mark.parametrize(("callers", "blamed", "phase"), [([0], [1, 2, 3], "ready"), ([1], [0], "records")])
def test_a_load_called_on_some_ranks(worlds: Worlds, tmp_path: Path, callers: list[int], blamed: list[int], phase: str) -> None:
    """As a save."""
    found = worlds(NUM_RANKS).run(agreement_cases.load_on_some, str(tmp_path / "step_1"), callers)
    assert [[missing(blamed, phase), {"loaded": 2}]] * NUM_RANKS == found


def test_saves_to_different_places(worlds: Worlds, tmp_path: Path) -> None:
    """All ranks are told of both places; the next save commits."""
    for error, last in worlds(NUM_RANKS).run(agreement_cases.save_apart, str(tmp_path)):
        assert ("OperationFailed", [1], {"cached": True}) == (error["error"], list(error["failures"]), last)
        assert all(str(tmp_path / step) in error["failures"][1] for step in ("step_2", "step_3"))


def test_loads_from_different_places(worlds: Worlds, tmp_path: Path) -> None:
    """All ranks are told of both places and nothing changes; the next load works."""
    for error, is_unchanged, last in worlds(NUM_RANKS).run(agreement_cases.load_apart, str(tmp_path)):
        assert ("OperationFailed", [1], True, {"loaded": 2}) == (error["error"], list(error["failures"]), is_unchanged, last)
        assert all(str(tmp_path / step) in error["failures"][1] for step in ("step_1", "step_2"))

"""Asynchronous saves of several ranks: nobody waits for a late one, and what happens to one of them reaches all."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from anyshard.testing.launch import Launcher
from anyshard.testing.world import Worlds
from tests.background import exit_scripts, rank_cases
from tests.ranks.death_cases import NUM_RANKS as NUM_LAUNCHED
from tests.ranks.scenes import look, play, ranks_with_blobs, tell_deaths, wake_all

pytestmark = pytest.mark.slow

NUM_RANKS = 4
FAILED = ["StorageError", {2: ["write", "StorageError"]}]


def test_a_late_rank(worlds: Worlds, tmp_path: Path) -> None:
    """Calls of an unchanged structure return, and all is written, before the late rank calls; commit waits for it."""
    found = worlds(NUM_RANKS).run(rank_cases.come_late, str(tmp_path), 1)
    others = [one["times_s"] for rank, one in enumerate(found) if rank != 1]
    called_s = found[1]["times_s"]["called"]
    assert [True] * NUM_RANKS == [one["cached"] for one in found]
    assert max(max(times_s["returned"], times_s["written"]) for times_s in others) < called_s
    assert called_s < min(times_s["committed"] for times_s in others)


def test_no_collective(worlds: Worlds, tmp_path: Path) -> None:
    """No process group's count of collectives rises, and no process group is made, by a first save and by a later one."""
    found = worlds(NUM_RANKS).run(rank_cases.count_collectives, str(tmp_path))
    assert [{"step 1": [0, 0], "step 2": [0, 0]}] * NUM_RANKS == found


def test_sixty_saves(worlds: Worlds, tmp_path: Path) -> None:
    """Keys in the store, threads, descriptors and process groups are as many after 60 saves as after 10."""
    for early, late in worlds(NUM_RANKS).run(rank_cases.save_often, str(tmp_path / "step_1"), [10, 60]):
        assert early == late


def test_status_of_a_stuck_rank(worlds: Worlds, tmp_path: Path) -> None:
    """Rank 0 is told phase, bytes, file and time of each rank: one writes, the others are done; by the end all have committed."""
    stuck = 2
    statuses, *_ = worlds(NUM_RANKS).run(rank_cases.ask_status, str(tmp_path), stuck)
    assert list(range(NUM_RANKS)) == [status["rank"] for status in statuses]
    own = statuses.pop(stuck)
    assert ("write", 0, "", True) == (own["phase"], own["written_nbytes"], own["file"], own["phase_s"] > 1)
    assert all(status["phase"] in ("digest", "compare") for status in statuses)
    assert all(status["written_nbytes"] == status["nbytes"] > 0 and status["file"].endswith(".bin") for status in statuses)
    assert 2 == len(list(tmp_path.glob("step_*/manifest*")))


# ------------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("waiting", [[], [0, 1], [2], [0, 1, 2, 3]], ids=str)
def test_a_storage_that_fails_on_one_rank(worlds: Worlds, tmp_path: Path, waiting: list[int]) -> None:
    """Each rank raises it once, by a wait or by its next call; ranks of which some have waited meet again after one save."""
    found = worlds(NUM_RANKS).run(rank_cases.fail_and_go_on, str(tmp_path), 2, waiting)
    for rank, outcome in enumerate(found):
        has_waited = rank in waiting
        first = outcome["ends"][0]
        assert (FAILED if has_waited else None) == outcome["waited"]
        assert (["begun"] * 3 if has_waited else [FAILED, "begun", "begun"]) == outcome["calls"]
        assert ["EarlierSaveFailed" if has_waited and len(waiting) < NUM_RANKS else (3 if has_waited else None), 4, 5] == [
            first[0] if isinstance(first, list) else first,
            *outcome["ends"][1:],
        ]
    assert [] == list((tmp_path / "step_2").rglob("manifest*"))


def test_a_failure_in_a_ring(worlds: Worlds, tmp_path: Path) -> None:
    """Nobody waits for anything and training goes on: each rank raises the failure once, and all else commits."""
    found = worlds(NUM_RANKS).run(rank_cases.fail_without_waiting, str(tmp_path), 2)
    assert [[FAILED]] * NUM_RANKS == [[outcome for outcome in outcomes if outcome is not None] for outcomes in found]
    refused = {outcomes.index(FAILED) + 1 for outcomes in found}
    assert set(range(1, 9)) - {2} - refused == {int(path.parent.name[5:]) for path in tmp_path.glob("step_*/manifest*")}


@pytest.mark.parametrize(("place", "limit", "raised"), [("{0}/run/step", 1, 3), ("run/step_{0}", 1, 2), ("run/step_{0}", 3, 4)])
def test_a_failure_is_raised_by_the_same_call(worlds: Worlds, tmp_path: Path, place: str, limit: int, raised: int) -> None:
    """Places of one run or in directories of their own: all ranks raise it at the same call, at which they wait for that save."""
    places = [str(tmp_path / place.format(number)) for number in range(7)]
    found = worlds(2).run(rank_cases.fail_in_places, places, 1, limit)
    failed = ["StorageError", {1: ["write", "StorageError"]}]
    assert [[failed if number == raised else None for number in range(8)]] * 2 == found
    assert set(range(7)) - {1, raised} == {number for number, path in enumerate(places) if list(Path(path).glob("manifest*"))}


@pytest.mark.parametrize("is_blocking", [True, False])
@pytest.mark.parametrize(("absent", "num"), [(1, 1), (0, 2), (1, 2), (1, 3)])
def test_saves_that_a_rank_leaves_out(worlds: Worlds, tmp_path: Path, absent: int, num: int, is_blocking: bool) -> None:
    """Ranks of which one has left out some saves meet again after as many more, and save."""
    found = worlds(2).run(rank_cases.leave_out, str(tmp_path), absent, num, is_blocking)
    good = [True] * 2, [True] * (9 - 2 * num)
    assert [*good[0], *[False] * num, *good[1]] == found[absent]
    assert [*good[0], *[False] * 2 * num, *good[1]] == found[1 - absent]


@pytest.mark.parametrize(("how", "own"), [("interrupt", "interrupted"), ("turn", ["OperationFailed", {}])])
def test_a_call_that_ends_before_it_begins(worlds: Worlds, tmp_path: Path, how: str, own: object) -> None:
    """Ctrl-C while it waits, or another thread's long call: it is one operation all the same, which fails on all at once."""
    found = worlds(2).run(rank_cases.break_a_call, str(tmp_path), 1, how)
    assert [[1, 2, ["OperationFailed", {1: ["call", "OperationFailed"]}], 4], [1, 2, own, 4]] == found


# --------------------------------------------------------------------------------------------------- dead and frozen ranks

# Who dies where, and the phase in which the others miss it.
DEATHS = {
    (1, "save.begin"): "durable",
    (1, "save.block.staged"): "durable",
    (1, "post of durable"): "durable",
    (0, "save.attempt.begun"): "begin",
    (0, "save.compare.end"): "decide",
    (0, "save.publish.begin"): "published",
}
FREEZES = {(1, "save.block.staged"): "durable", (0, "save.attempt.begun"): "begin", (0, "save.compare.end"): "decide"}
COMMITTED = {"error": None}


def missed(rank: int, phase: str) -> dict[str, Any]:
    return {"error": "RankMissing", "failures": {rank: [phase, "RankMissing"]}, "is_soon": True, "trained": True}


def test_a_rank_dies(launch: Launcher, tmp_path: Path) -> None:
    """Training goes on; the next call of the others names the dead rank and the phase in time, and nothing is visible."""
    kill = int(signal.SIGKILL)
    cases = {
        (victim, at): (victim, exit_scripts.save_and_strike, (str(tmp_path / f"{victim} {at}"), kill, at, victim))
        for victim, at in DEATHS
    }
    told = tell_deaths(launch, cases)
    assert {death: [missed(death[0], phase)] * (NUM_LAUNCHED - 1) for death, phase in DEATHS.items()} == told
    seen = {(victim, at): [look(tmp_path / f"{victim} {at}" / f"step_{step}") for step in (1, 2, 3)] for victim, at in DEATHS}
    assert [["1", None, None]] * len(DEATHS) == list(seen.values())


def test_a_rank_is_frozen(launch: Launcher, tmp_path: Path) -> None:
    """As above; when it wakes it ends as the others have, nothing is left of that save, and the next one of all commits."""
    cases = {
        (victim, at): (exit_scripts.save_and_freeze, (str(tmp_path / f"{victim} {at}"), at, victim)) for victim, at in FREEZES
    }
    told = {freeze: [one.value or one.error for one in wake_all(found, freeze[0])] for freeze, found in play(launch, cases)}
    told = {freeze: [({**first, "is_soon": True}, last) for first, last in outcomes] for freeze, outcomes in told.items()}
    assert {freeze: [(missed(freeze[0], phase), COMMITTED)] * NUM_LAUNCHED for freeze, phase in FREEZES.items()} == told
    for victim, at in FREEZES:
        place = tmp_path / f"{victim} {at}"
        assert ["1", None, None, "1"] == [look(place / f"step_{step}") for step in (1, 2, 3, 4)]
        assert set() == ranks_with_blobs(place / "step_2")

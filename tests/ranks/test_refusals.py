"""Saves that one rank refuses, disturbs, or does otherwise than the others: who hears what, and what is left on storage."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

import anyshard
from anyshard.testing.world import Worlds
from tests.ranks import refusal_cases

pytestmark = pytest.mark.slow

CHECKS = list(permutations(["sample", "full", "off"], 2))


def files_in(place: Path) -> list[str]:
    return [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]


def test_a_save_within_a_save(worlds: Worlds, tmp_path: Path) -> None:
    """It is refused at once and says within what; the outer save and the next one are none the worse."""
    for name, text in worlds(2).run(refusal_cases.save_within_a_save, str(tmp_path)):
        assert ("OperationFailed", True) == (name, f"found this thread in the save to {tmp_path}/step_2" in text), text
    assert ["step_1", "step_2"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_save_in_a_signal_handler(worlds: Worlds, tmp_path: Path) -> None:
    """A handler that saves in the middle of a save is refused rather than hanging, and may save once that has returned."""
    for ((name, text),) in worlds(2).run(refusal_cases.save_in_a_handler, str(tmp_path)):
        assert ("OperationFailed", True) == (name, "a signal handler sets a flag" in text), text
    assert ["last", "step_1"] == sorted(path.parent.name for path in tmp_path.glob("*/manifest-1.json"))


@pytest.mark.parametrize("checks", CHECKS, ids=" and ".join)
def test_other_options_on_other_ranks(worlds: Worlds, tmp_path: Path, checks: tuple[str, str]) -> None:
    """How replicas are compared is what the coordinator says, so that equal tensors are equal."""
    assert [("none", "")] * 2 == worlds(2).run(refusal_cases.save_with_other_options, str(tmp_path), checks)


def test_a_failure_that_comes_from_a_conflict(worlds: Worlds, tmp_path: Path) -> None:
    """All ranks raise the same failure, and the coordinator notes that another save has taken the generation."""
    name, text, num_notes = "StorageError", "\n  rank 1: write: StorageError: boom", [1, 0]
    found = worlds(2).run(refusal_cases.lose_a_race, str(tmp_path / "step_1"))
    assert [(name, True, num) for num in num_notes] == [(kind, message.endswith(text), num) for kind, message, num in found]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_storage_that_hangs_on_one_rank(worlds: Worlds, tmp_path: Path, victim: int) -> None:
    """That rank asks it for nothing more; the other one removes what it may, the coordinator all."""
    found = worlds(2).run(refusal_cases.save_to_a_stuck_store, str(tmp_path / "step_1"), victim)
    assert [("StorageStuck", rank != victim) for rank in (0, 1)] == [(error[0], has_cleaned) for error, has_cleaned in found]
    assert [] == files_in(tmp_path)


def test_a_bad_value_of_one_rank(worlds: Worlds, tmp_path: Path) -> None:
    """It is refused on all ranks with its address before storage is touched, though only one rank has it."""
    for (name, text), events in worlds(2).run(refusal_cases.save_a_bad_value, str(tmp_path / "step_1")):
        assert ("UnsupportedValue", True, []) == (name, "\n  rank 1: adapt: UnsupportedValue: loader: " in text, events), text
    assert [] == list(tmp_path.iterdir())


def test_room_for_all_ranks(worlds: Worlds) -> None:
    """What all ranks have of their own has to fit, not only the coordinator's."""
    found = worlds(2).run(refusal_cases.save_without_room, 2_000_000, 4_000_000)
    assert ["StorageFull"] * 2 == [name for name, _ in found]
    assert "\n  rank 0: begin: StorageFull: [Errno 28] memory:small: expected room for 50" in found[1][1]


def test_a_failure_ends_a_long_digest(worlds: Worlds, tmp_path: Path) -> None:
    """A rank that compares replicas hears soon that another one has failed."""
    found = worlds(2).run(refusal_cases.digest_for_ever, str(tmp_path / "step_1"))
    assert found[0] == found[1]
    assert "\n  rank 0: write: StorageError: boom" in found[1][1]
    assert [] == files_in(tmp_path)


def test_what_the_coordinator_finds(worlds: Worlds, tmp_path: Path) -> None:
    """The text says which call ended on how many ranks, then whose finding it was, in which phase, and what to do."""
    place = tmp_path / "step_3"
    missing, exists = worlds(2).run(refusal_cases.miss_and_meet, str(tmp_path))[1]
    assert ("CheckpointNotFound", True) == (
        missing[0],
        missing[1].startswith(f"load of {place} was given up on all 2 ranks:\n  rank 0: resolve: CheckpointNotFound: {place}: "),
    )
    with anyshard.open(place) as checkpoint:
        begin = f"save of {place}, step 3, was given up on all 2 ranks:\n  rank 0: begin: CheckpointExists: {place}: a checkpoint"
        end = "is there; pass overwrite=True to replace it, or another path"
        assert ("CheckpointExists", f"{begin} (step 3, saved on {checkpoint.manifest.time}) {end}") == exists

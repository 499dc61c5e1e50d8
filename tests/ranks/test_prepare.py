"""Rehearsals of several ranks: what differs between them, what they do not share, and what the first save then finds."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from anyshard.testing.world import Worlds
from tests.ranks import prepare_cases

pytestmark = pytest.mark.slow

HOST = platform.node()

# What the ranks hold, the error that all of them raise, and what it says.
REFUSED = {
    "replica": ("InvalidAppState", "other bytes: model/w: rank 0 against rank 1."),
    "moment": ("InvalidAppState", "other bytes: optimizer/m/1: rank 0 against rank 1."),
    "value": ("InvalidAppState", "other ones: extra/loss: one value on rank 0, another on rank 1."),
    "equal keys": ("InvalidAppState", "other ones: loader: one value on rank 0, another on rank 1."),
    "other shapes": ("InvalidAppState", "model/weight"),
    "other dtypes": ("InvalidAppState", "model/w"),
    "kinds": ("InvalidAppState", "other ones: extra: one value on rank 0, another on rank 1."),
    "unfitting": ("InvalidAppState", "rank 1: adapt: InvalidAppState: model/w: expected a local tensor of shape (4, 2)"),
    "bad value": ("UnsupportedValue", "rank 1: adapt: UnsupportedValue: loader: "),
    "meta": ("InvalidAppState", "rank 1: adapt: InvalidAppState: model/w: "),
}


def files_in(place: Path) -> list[str]:
    return [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() or path.name == "data"]


@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_do_not_fit_together(worlds: Worlds, tmp_path: Path, what: str) -> None:
    """All ranks raise the same error, which names the address and the ranks; nothing is left."""
    name, message = REFUSED[what]
    first, second = worlds(2).run(prepare_cases.rehearse_bad, what, str(tmp_path / "runs"))
    assert first == second
    assert (name, True) == (first[0], message in first[1]), first[1]
    assert [] == files_in(tmp_path)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rehearsal_and_the_first_save(worlds: Worlds, tmp_path: Path, size: int) -> None:
    """All ranks report alike what the save then does, which has a plan; the load that was forecast is the one that comes."""
    found = worlds(size).run(prepare_cases.rehearse_and_save, str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for rank in found:
        num_ranks, num_tensors, nbytes, num_files = rank["said"]
        assert (size, rank["saved"], len(files), True) == (num_ranks, (num_tensors, nbytes), num_files, rank["cached"])
        assert rank["shares"][0] <= nbytes / size <= rank["shares"][1]
        assert max(other["loaded"][1] for other in found) == rank["loads"][0][1]
        assert found[0]["loads"] == rank["loads"]
        assert f"ranks         {size}" in rank["page"]
    assert found[0]["loaded"][0] == found[0]["loads"][1][0]


def test_a_place_that_is_not_shared(worlds: Worlds) -> None:
    """The error names the ranks and hosts that do not see what the first rank writes."""
    found = worlds(4).run(prepare_cases.rehearse_on_own_disks)
    message = f"memory:own: expected one place that all 4 ranks share, found that what rank 0 on {HOST} writes is not seen by "
    assert [("InvalidPath", True)] * 4 == [(name, message in text) for name, text in found], found
    assert f"rank 1 on {HOST}, rank 2 on {HOST}, rank 3 on {HOST}. Save to a shared" in found[0][1]


def test_a_rank_that_writes_elsewhere(worlds: Worlds, tmp_path: Path) -> None:
    """So does that of a rank whose files the first one does not see; nothing is left."""
    found = worlds(2).run(prepare_cases.rehearse_blind, str(tmp_path / "runs"))
    message = f"found that what is written by rank 1 on {HOST} is not seen by rank 0 on {HOST}"
    assert [("InvalidPath", True)] * 2 == [(name, message in text) for name, text in found], found
    assert [] == files_in(tmp_path)


@pytest.mark.parametrize(("verb", "victim"), [("create_blob", 0), ("create_blob", 1), ("create", 1), ("read_into", 1)])
def test_storage_that_fails_on_one_rank(worlds: Worlds, tmp_path: Path, verb: str, victim: int) -> None:
    """All ranks raise it and remove what they made, and none keeps the plan."""
    found = worlds(2).run(prepare_cases.rehearse_on_a_bad_store, str(tmp_path), verb, victim)
    message = f"\n  rank {victim}: storage: StorageDenied: boom"
    assert [("StorageDenied", True, False)] * 2 == [(name, message in text, cached) for (name, text), cached in found], found
    assert ["step_1"] == [path.name for path in tmp_path.iterdir()]


def test_a_rank_outside_of_the_group(worlds: Worlds, tmp_path: Path) -> None:
    """It is refused alone, and the members rehearse."""
    found = worlds(2).run(prepare_cases.rehearse_as_a_stranger, str(tmp_path))
    assert ["none", "InvalidOption"] == [name for name, _ in found]
    assert "found rank 1 outside of [0]" in found[1][1]


def test_a_structure_that_has_changed(worlds: Worlds, tmp_path: Path) -> None:
    """One rank alone is refused with what is new on it, and the next rehearsal plans afresh."""
    found = worlds(2).run(prepare_cases.rehearse_a_changed_structure, str(tmp_path))
    assert [["StructureChanged", "none"]] * 2 == [[name for name, _ in ends] for ends in found]
    assert f"rehearsal of saves to {tmp_path} was given up on all 2 ranks" in found[0][0][1]

"""Saves that die or sleep at every event: readers get a whole checkpoint or none, nothing is lost, and the next save succeeds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Case = dict[str, Any]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """All cases of one run of the script, in memory if possible: a kill loses nothing that was written, synced or not."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        command = [sys.executable, "-m", "tests.crash.runner", directory]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert (0, "") == (done.returncode, done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def select(cases: list[Case], mode: str, **members: str) -> list[Case]:
    found = [case for case in cases if case["mode"] == mode and members.items() <= case.items()]
    assert found, (mode, members)
    return found


def published(case: Case) -> bool:
    return "save.published" in case["events"]


@pytest.mark.parametrize("before", ["none", "old"])
def test_there_are_enough_named_points(cases: list[Case], before: str) -> None:
    """A save and an overwrite pass at least twelve differently named points."""
    (record,) = select(cases, "record", before=before)
    assert 12 <= len(set(record["events"]))


def test_every_kill_hit_and_every_stop_stopped(cases: list[Case]) -> None:
    """No case passed because nothing was interrupted."""
    assert {"killed"} == {case["end"] for case in select(cases, "kill")}
    assert {True} == {case["stopped"] for case in select(cases, "stop")}


@pytest.mark.parametrize("before", ["none", "old"])
def test_b128_a_kill_leaves_the_complete_old_or_new_state(cases: list[Case], before: str) -> None:
    """Nothing is torn or lost, and what was reported as published is there."""
    for case in select(cases, "kill", before=before):
        allowed = {"new"} if published(case) else {before, "new"} if "save.publish.begin" in case["events"] else {before}
        assert case["seen"][0] in allowed, case


def test_a_clean_after_a_kill_changes_nothing_for_readers(cases: list[Case]) -> None:
    """What was seen after the kill is seen after a clean without any grace, or simply again."""
    assert [] == [case for case in select(cases, "kill") if case["seen"][0] != case["seen"][1]]


def test_the_next_save_after_a_kill_succeeds_and_leaves_nothing_of_the_dead(cases: list[Case]) -> None:
    """The next save loads, before and after a clean, which leaves one attempt's files only."""
    assert [] == [case for case in select(cases, "kill") if case["seen"][2:] != ["next", "next", "1"]]


@pytest.mark.parametrize("before", ["none", "old"])
def test_a_second_writer_is_never_undone_by_one_that_wakes(cases: list[Case], before: str) -> None:
    """One that slept before its first look comes after the second writer; any other leaves that one's state as it is."""
    (record,) = select(cases, "record", before=before)
    looked = record["events"].index("storage.prepare.done")
    for case in select(cases, "stop", before=before, other="writer"):
        later = "new" if record["events"].index(case["at"]) < looked else "next"
        assert ["next", later] == case["seen"][2:4], case


@pytest.mark.parametrize("before", ["none", "old"])
def test_a_cleaner_never_tears_the_save_that_wakes(cases: list[Case], before: str) -> None:
    """After the cleaner readers see what they saw before; the one that wakes wins whole or loses with an error."""
    for case in select(cases, "stop", before=before, other="cleaner"):
        earlier, cleaned, woken = case["seen"][0], case["seen"][2], case["seen"][3]
        assert (earlier, cleaned) in {(before, before), ("new", "new")}, case
        assert woken == ("new" if case["end"] == "saved" else cleaned), case


def test_one_that_wakes_too_late_is_told(cases: list[Case]) -> None:
    """A save that lost ends with the error that says so, never with success or with the trouble that followed."""
    ends = {case["end"].split(":")[0] for case in select(cases, "stop")}
    assert {"saved", "CommitConflict"} == ends


def test_the_next_save_after_any_sleep_succeeds(cases: list[Case]) -> None:
    """After all that the place takes a save, and a clean leaves one attempt's files only."""
    assert [] == [case for case in select(cases, "stop") if case["seen"][5:] != ["next", "next", "1"]]


def seen_of(cases: list[Case], mode: str) -> list[str]:
    """What readers saw after each kill, in the order of the moments, each once."""
    seen = [case["seen"][0] for case in select(cases, mode)]
    return [what for i, what in enumerate(seen) if i == 0 or what != seen[i - 1]]


@pytest.mark.parametrize("mode", ["thin", "delete"])
def test_every_kill_of_a_change_hit_but_the_last(cases: list[Case], mode: str) -> None:
    """The last round is undisturbed, and there were at least eight moments before it."""
    *killed, last = [case["end"] for case in select(cases, mode)]
    assert ({"killed"}, "done", True) == ({*killed}, last, len(killed) >= 8)


def test_a_thinner_that_is_killed_leaves_the_checkpoint_whole_or_thinned(cases: list[Case]) -> None:
    """First it is as it was, from one moment on it is thinned; thinning again leaves the record, the index and one blob."""
    assert ["whole", "thin"] == seen_of(cases, "thin")
    assert {("thin", "3")} == {tuple(case["seen"][1:]) for case in select(cases, "thin")}


def test_a_delete_of_parts_that_is_killed_leaves_no_step_with_a_part_less(cases: list[Case]) -> None:
    """The step goes first, then one part after the other; deleting again leaves a tombstone of each."""
    assert ["published", "deleted, 2 left", "deleted, 1 left", "deleted, 0 left"] == seen_of(cases, "delete")
    assert {("deleted, 0 left", "3")} == {tuple(case["seen"][1:]) for case in select(cases, "delete")}

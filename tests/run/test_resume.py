"""Loading the newest good step: the order of candidates, which errors lead to the next one, and ranks that all go alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import anyshard
from anyshard.errors import (
    AnyshardError,
    BlobNotFound,
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointReplaced,
    LoadInterrupted,
    NotACheckpoint,
    RankMissing,
    StateMismatch,
    StorageUnavailable,
    UnsupportedFormat,
    make_failure,
)
from anyshard.reports import LoadReport
from anyshard.run.resume import Candidate, Candidates, decode_candidates, is_damage, list_candidates, load_newest
from anyshard.run.step_info import Condition
from anyshard.run.when import EverySteps
from anyshard.testing.world import Worlds
from tests.run import run_cases
from tests.run.made_steps import OTHER, RUN, make_info
from tests.run.run_cases import damaged, list_damages, make_state, open_run

DAMAGED = CheckpointDamaged("data/w: expected a digest, found another", file="data/w")


class Loads:
    """Loads that end as a table says; `calls` are steps with the options that a call has overruled."""

    def __init__(self, ends: dict[int, list[BaseException | None]]) -> None:
        self.calls: list[tuple[int, str | None, bool | None]] = []
        self._ends = ends

    def __call__(self, step: int, *, verify: Any, strict: bool | None) -> LoadReport:
        self.calls.append((step, verify, strict))
        ends = self._ends.get(step, [])
        error = ends.pop(0) if ends else None
        if error is not None:
            raise error
        return LoadReport(f"memory:/step_{step}", step, 1, "a" * 13, 1, 1, 1, 0.1)


def interrupted(cause: Exception) -> LoadInterrupted:
    error = LoadInterrupted("half-way", addresses=("model/w",))
    error.__cause__ = cause
    return error


def try_all(ends: dict[int, list[BaseException | None]], numbers: tuple[int, ...] = (3, 2, 1)) -> tuple[Loads, int, LoadReport]:
    loads = Loads(ends)
    step, report = load_newest([Candidate(number) for number in numbers], loads, url="memory:")
    return loads, step, report


# ------------------------------------------------------------------------------------------------------------- the candidates


def test_candidates_are_the_good_steps_of_the_run() -> None:
    """The newest first, by number; not those of another run, of before a rollback, or deleted, and thinned ones last."""
    steps = [
        make_info(8),
        make_info(9, dropped=("optimizer",)),
        make_info(10),
        make_info(11, is_stale=True),
        make_info(12, run_id=OTHER),
        make_info(13, condition=Condition.DELETED),
    ]
    assert (Candidate(10), Candidate(8), Candidate(9)) == list_candidates(steps, RUN).found


def test_steps_with_faults_are_candidates_that_say_why() -> None:
    """Damage, missing files, and an unfinished save above all that is whole."""
    steps = [
        make_info(1, condition=Condition.PENDING, run_id=None),
        make_info(2),
        make_info(3, condition=Condition.INCOMPLETE, note="a file is missing"),
        make_info(4, condition=Condition.DAMAGED, run_id=None, note="no digest line"),
        make_info(5, condition=Condition.PENDING, run_id=None),
    ]
    expected = {5: "only an unfinished save is there", 4: "no digest line", 3: "a file is missing", 2: ""}
    assert expected == {one.step: one.fault for one in list_candidates(steps, RUN).found}


def test_an_unfinished_save_alone_is_no_candidate() -> None:
    """A run of which nothing was ever committed begins anew."""
    assert Candidates(()) == list_candidates([make_info(5, condition=Condition.PENDING, run_id=None)], None)


def test_steps_of_no_run_are_candidates_of_no_run() -> None:
    """What `anyshard.save` has put into the directory can be gone on with, as long as no run has saved there."""
    steps = [make_info(1, run_id=None), make_info(2, run_id=None)]
    assert (Candidate(2), Candidate(1)) == list_candidates(steps, None).found
    assert () == list_candidates(steps, RUN).found


def test_roles_choose_steps_in_parts() -> None:
    """And who leaves the role out, or has a wrong one, is told which there are."""
    steps = [make_info(1, parts=("actor",)), make_info(2, parts=("actor", "critic"))]
    assert (Candidate(2), Candidate(1)) == list_candidates(steps, RUN, role="actor").found
    assert "pass role= one of actor, critic" in list_candidates(steps, RUN).advice
    assert "'actor': load without role=" in list_candidates([make_info(1)], RUN, role="actor").advice


def test_candidates_travel() -> None:
    """All ranks hear what the coordinator has found."""
    told = Candidates((Candidate(3, "no digest \u00e9"), Candidate(2)), "advice")
    assert told == decode_candidates(told.encode())


# ---------------------------------------------------------------------------------------------------------- one after another


def test_damage_leads_to_the_step_before() -> None:
    """The report names what was skipped and why, and so does the log."""
    loads, step, report = try_all({3: [DAMAGED]})
    assert (2, 2) == (step, report.step)
    assert ((3, "CheckpointDamaged: data/w: expected a digest, found another"),) == report.skipped
    assert ("step 3 was skipped: CheckpointDamaged: data/w: expected a digest, found another",) == report.warnings
    assert [(3, None, None), (2, None, None)] == loads.calls


def test_a_known_fault_is_not_tried() -> None:
    """It is skipped for what the look has found."""
    loads = Loads({})
    step, report = load_newest([Candidate(3, "no record"), Candidate(2)], loads, url="memory:")
    assert (2, ((3, "no record"),), [(2, None, None)]) == (step, report.skipped, loads.calls)


def test_a_load_that_was_interrupted_is_verified_and_then_left() -> None:
    """The step that was loaded in part is tried with all bytes checked first, and an older one has to fill everything."""
    loads, step, report = try_all({3: [interrupted(DAMAGED), DAMAGED]})
    assert [(3, None, None), (3, "first", None), (2, None, True)] == loads.calls
    assert (2, [3]) == (step, [skipped for skipped, _ in report.skipped])


def test_bytes_that_are_right_the_second_time_are_loaded() -> None:
    """Then nothing is skipped: the damage was on the way, not in the storage."""
    loads, step, report = try_all({3: [interrupted(DAMAGED)]})
    assert (3, ()) == (step, report.skipped)
    assert [(3, None, None), (3, "first", None)] == loads.calls


RAISED = {
    "state mismatch": StateMismatch("memory:", (), ""),
    "storage": StorageUnavailable("no answer", file="data/w"),
    "a later format": UnsupportedFormat("version 2"),
    "missing ranks": RankMissing("given up", {1: "filled: RankMissing: not heard of"}),
    "interrupted by the storage": interrupted(StorageUnavailable("no answer", file="data/w")),
    "interrupted by ranks": make_failure("half", {1: "filled: RankMissing: not heard of"}, kinds=("LoadInterrupted",)),
    "a failure of many kinds": make_failure("failed", {0: "fill: CheckpointDamaged: x", 1: "fill: StorageDenied: y"}, kinds="ab"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_all_other_errors_are_raised(kind: str) -> None:
    """An older step would not help, or nobody knows whether it would."""
    with pytest.raises(type(RAISED[kind])) as caught:
        try_all({3: [RAISED[kind]]})
    assert RAISED[kind] is caught.value


@pytest.mark.parametrize("kind", [CheckpointNotFound, NotACheckpoint, CheckpointReplaced, BlobNotFound, CheckpointDamaged])
def test_damage_is_damage_on_every_rank(kind: type[AnyshardError]) -> None:
    """Whether this rank has had it itself or has only heard of it."""
    own = kind("gone", file="data/w") if kind is BlobNotFound else kind("gone")
    heard = make_failure("given up on all 4 ranks", {2: f"fill: {kind.__name__}: gone"}, kinds=(kind.__name__,))
    assert [True, True] == [is_damage(own), is_damage(heard)]


def test_damage_of_two_kinds_is_damage() -> None:
    """Ranks may meet different halves of it."""
    failures = {0: "fill: CheckpointDamaged: x", 3: "open: BlobNotFound: y: z"}
    error = make_failure("failed", failures, kinds=("CheckpointDamaged", "BlobNotFound"))
    assert is_damage(error)
    _, step, report = try_all({3: [error]})
    assert (2, "rank 0: fill: CheckpointDamaged: x; rank 3: open: BlobNotFound: y: z") == (step, report.skipped[0][1])


def test_no_whole_step_is_an_error_that_lists_all() -> None:
    """It says of each what is wrong, and that nothing has changed."""
    with pytest.raises(CheckpointDamaged, match=r"(?s)found 2 .*step 3: no record.*step 2: Check.*Nothing has changed"):
        load_newest([Candidate(3, "no record"), Candidate(2)], Loads({2: [DAMAGED]}), url="memory:")


def test_no_whole_step_after_a_change_says_so() -> None:
    """The app state must not be used."""
    with pytest.raises(LoadInterrupted, match=r"(?s)step 3: .*step 2: .*undefined now"):
        try_all({3: [interrupted(DAMAGED), DAMAGED], 2: [DAMAGED]}, (3, 2))


def test_an_error_after_skipped_steps_tells_of_them() -> None:
    """Or nobody would know why an older step was loaded at all, and in which state the app state is."""
    with pytest.raises(StateMismatch) as caught:
        try_all({3: [interrupted(DAMAGED), DAMAGED], 2: [StateMismatch("memory:", (), "")]})
    notes = "; ".join(caught.value.__notes__)
    assert "step 3 was skipped" in notes
    assert "undefined now" in notes


# ------------------------------------------------------------------------------------------------------------- real storage


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run of two steps."""
    with open_run(tmp_path / "run") as run:
        run.save(1, make_state("1"))
        run.save(2, make_state("2"))
    return tmp_path / "run"


def test_every_damage_of_the_newest_step_is_named_and_passed_over(place: Path) -> None:
    """Each file damaged in each way: the step before is loaded in full (acceptance 4, on one rank)."""
    outcomes = run_cases.load_past_damage(str(place.parent / "other"))
    assert {name for name in outcomes if outcomes[name] != (1, outcomes[name][1], True)} == set()
    assert {name for name in outcomes if [step for step, _ in outcomes[name][1]] != [2]} == set()
    assert len(outcomes) >= 15


def test_a_named_step_is_loaded_or_fails(place: Path) -> None:
    """Nobody who asks for step 2 gets step 1."""
    name, data = list_damages(place / "step_2")["manifest cut"]
    with damaged(place / "step_2", name, data), open_run(place) as run:
        with pytest.raises(CheckpointDamaged):
            run.load(make_state("blank"), step=2)
        assert 1 == run.load(make_state("blank"), step=1).step


def test_a_damaged_step_that_was_passed_over_is_saved_again(place: Path) -> None:
    """The run goes on from the older step, so the number comes again, and its damage is replaced."""
    name, data = list_damages(place / "step_2")["manifest cut"]
    (place / "step_2" / name).write_bytes(data or b"")
    with open_run(place) as run:
        assert 1 == run.load(make_state("blank")).step
        assert "it is replaced" in run.save(2, make_state("new")).warnings[0]
        state = make_state("blank")
        assert (2, ()) == ((report := run.load(state)).step, report.skipped)
    assert "new" == state["seed"]


def test_damage_alone_is_never_a_new_beginning(place: Path) -> None:
    """With steps of which none is whole nothing is initialised, and the error lists them."""
    for step in ("step_1", "step_2"):
        name, data = list_damages(place / step)["index cell"]
        (place / step / name).write_bytes(data or b"")
    with open_run(place) as run, pytest.raises(CheckpointDamaged, match=r"(?s)step 2: .*step 1: "):
        run.restore_or_init(make_state("blank"), pytest.fail)


def test_a_load_without_strictness_does_not_leave_half_a_step(place: Path) -> None:
    """What the damaged step has touched must be refilled: an older step that cannot do that is an error (B052)."""
    with open_run(place) as run:
        run.restore_or_init(make_state("blank"))
        run.save(3, {**make_state("3"), "more": {"m": torch.ones(100_000)}})
    blob = next((place / "step_3" / "data" / "more").iterdir())
    blob.write_bytes(blob.read_bytes()[:200_000] + b"!" + blob.read_bytes()[200_001:])
    state = {**make_state("blank"), "more": {"m": torch.zeros(100_000)}}
    loose = anyshard.LoadOptions(strict=False, threads=1)
    with open_run(place) as run, pytest.raises(StateMismatch, match="more: missing") as caught:
        run.load(state, options=loose)
    assert "undefined now" in "; ".join(caught.value.__notes__)


def test_after_a_rollback_the_same_step_is_saved_again(place: Path) -> None:
    """Though it was the last one that this run has saved: what was loaded meanwhile is another past."""
    with open_run(place, every=EverySteps(1)) as run:
        run.restore_or_init(make_state("blank"))
        saved = [run.end_step(3, make_state("3")), run.end_step(3, make_state("3"))]
        (saved[0] or pytest.fail("step 3 is due")).result(30)
        run.load(make_state("blank"), step=2)
        saved.append(run.end_step(3, make_state("new")))
    assert [True, False, True] == [pending is not None for pending in saved]
    state = make_state("blank")
    open_run(place).load(state, step=3)
    assert "new" == state["seed"]


@pytest.mark.slow
def test_two_ranks_load_what_the_coordinator_sees(worlds: Worlds, tmp_path: Path) -> None:
    """It alone looks for the part of a role; a rank that would not get an answer to that need not ask."""
    ranks = worlds(2).run(run_cases.load_what_one_rank_cannot_see, str(tmp_path / "run"), "actor", timeout_s=120)
    assert [[2, True]] * 2 == [list(one) for one in ranks]


@pytest.mark.slow
def test_four_ranks_pass_over_every_damage_alike(worlds: Worlds, tmp_path: Path) -> None:
    """Each file of the newest step damaged in each way: all load the one before in full, and name the same (acceptance 4)."""
    ranks: list[dict[str, Any]] = worlds(4).run(run_cases.load_past_damage, str(tmp_path / "run"), timeout_s=240)
    assert [ranks[0]] * 4 == ranks
    assert {name for name, (step, skipped, is_right) in ranks[0].items() if (step, is_right) != (1, True) or not skipped} == set()
    assert len(ranks[0]) >= 22


@pytest.mark.slow
def test_four_ranks_with_no_whole_step_fail_alike(worlds: Worlds, tmp_path: Path) -> None:
    """And are together again in the next load."""
    names = ["manifest-1.json", "index-*.parquet", "data/model/2.0-*.bin"]
    ranks = worlds(4).run(run_cases.fail_past_damage, str(tmp_path / "run"), names, timeout_s=120)
    assert [["CheckpointDamaged"] * 3] * 4 == ranks

"""Asynchronous saves, blocking ones and loads in one order on all ranks; several groups; jobs that follow each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import anyshard
from anyshard.testing.launch import Launcher
from anyshard.testing.world import Worlds
from tests.background import exit_scripts, rank_cases
from tests.ranks.scenes import look

pytestmark = pytest.mark.slow

NUM_RANKS = 4


def test_calls_of_all_kinds(worlds: Worlds, tmp_path: Path) -> None:
    """They are made in the order of the calls, though early saves are slow, and each stores the state of its call."""
    found = worlds(NUM_RANKS).run(rank_cases.mix, str(tmp_path))
    expected = {"ends": [1, 2, 3, 4, 5, 6], "loaded": [5.0, 2.0], "were_done": [False, False]}
    assert [expected] * NUM_RANKS == found
    for step in range(1, 7):
        with anyshard.open(tmp_path / f"step_{step}") as checkpoint:
            assert [float(step)] * 3 == checkpoint["model/bias"][...].tolist()


def test_two_groups_at_once(worlds: Worlds, tmp_path: Path) -> None:
    """Two groups save at the same time, each twice, and with all of them under way all ranks together."""
    found = worlds(NUM_RANKS).run(rank_cases.save_in_groups, str(tmp_path))
    assert [[2, 2, 4]] * NUM_RANKS == found
    for place, ranks in (("group_0/step_2", (0, 1)), ("group_2/step_2", (2, 3)), ("all/step_1", (0, 1, 2, 3))):
        with anyshard.open(tmp_path / place) as checkpoint:
            assert {f"model/of_{rank}" for rank in ranks} == set(checkpoint)


def test_jobs_that_begin_while_saves_are_under_way(launch: Launcher, tmp_path: Path) -> None:
    """The saves of a job whose process group was destroyed go on beside those of the next one; all commit."""
    with launch(exit_scripts.begin_new_jobs, str(tmp_path), size=NUM_RANKS) as launched:
        ended = launched.wait()
    assert [[False, True, True, True]] * NUM_RANKS == [one.value or one.error for one in ended]
    assert ["1", "2", "3"] == [look(tmp_path / f"run_{step}" / f"step_{step}") for step in (1, 2, 3)]

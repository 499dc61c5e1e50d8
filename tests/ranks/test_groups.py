"""Saves and loads of some ranks of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

import anyshard
from anyshard.testing.world import Worlds
from tests.ranks import agreement_cases

pytestmark = pytest.mark.slow

NUM_RANKS = 4


def test_two_groups_at_once(worlds: Worlds, tmp_path: Path) -> None:
    """A list of ranks and a process group save and load at the same time, each at a place of its own."""
    found = worlds(NUM_RANKS).run(agreement_cases.save_in_groups, str(tmp_path))
    assert [{"num_tensors": 2, "loaded": [rank] * 5} for rank in range(NUM_RANKS)] == found
    for group in (0, 1):
        with anyshard.open(tmp_path / f"group_{group}") as checkpoint:
            assert (2, {f"model/of_{group}", f"model/of_{group + 2}"}) == (checkpoint.manifest.world_size, set(checkpoint))


def test_only_members_call(worlds: Worlds, tmp_path: Path) -> None:
    """The others go on, and one of them that calls is refused without disturbing the members."""
    found = worlds(NUM_RANKS).run(agreement_cases.save_on_members, str(tmp_path / "step_1"))
    assert ["saved", "went on", "saved", "refused"] == found

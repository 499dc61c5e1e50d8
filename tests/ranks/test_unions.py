"""A dict that is empty on one rank and has keys on another: one tree for both, and a plan that holds as long as it is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import anyshard
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow


def save_twice(place: str) -> tuple[bool, dict[int, str]]:
    """Rank 0 fills a dict in which rank 1 has a tensor, then has a number in its place; how the saves end."""
    below = {} if dist.get_rank() == 0 else {"a": torch.ones(2)}
    anyshard.save(f"{place}/step_1", {"union": {"w": torch.ones(3), "x": below}})
    was_cached = anyshard.save(f"{place}/step_2", {"union": {"w": torch.ones(3), "x": below}}).plan_was_cached
    with pytest.raises(anyshard.StructureChanged) as caught:
        anyshard.save(f"{place}/step_3", {"union": {"w": torch.ones(3), "x": below or 5}})
    return was_cached, dict(caught.value.failures)


def test_a_value_in_place_of_an_empty_dict_is_no_cached_plan(worlds: Worlds, tmp_path: Path) -> None:
    """With keys of another rank in its place it would make a checkpoint that cannot be opened: nothing is committed."""
    changed = {0: "holds another structure than at its last save: changed union/x"}
    assert [(True, changed)] * 2 == worlds(2).run(save_twice, str(tmp_path))
    assert ["w", "x"] == list(anyshard.open(tmp_path / "step_2")["union"])
    with pytest.raises(anyshard.CheckpointNotFound):
        anyshard.open(tmp_path / "step_3")

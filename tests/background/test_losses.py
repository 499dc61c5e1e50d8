"""Training is the same with asynchronous saves at each step as without any, to the last bit of each loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyshard.testing.world import Worlds
from tests.background import scenes
from tests.background.loss_cases import train
from tests.background.torn_cases import IMPLEMENTATIONS

pytestmark = pytest.mark.slow

NUM_RANKS, NUM_STEPS = 2, 50
STAGINGS = (None, "eager", "lazy")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def assert_same(place: Path, found: dict[str | None, dict[str, Any]], num_steps: int) -> None:
    """All trainings are the same, they were saved at each step, and those saves were lazy that should be."""
    counts = {staging: one.pop("num_lazy") for staging, one in found.items()}
    assert {None: 0, "eager": 0, "lazy": num_steps} == counts  # the eager one has left the plan
    assert [num_steps] * len(found) == [len(set(one["losses"])) for one in found.values()]
    assert [found[None]] * len(found) == list(found.values())
    for staging in ("eager", "lazy"):
        assert num_steps == len(list((place / staging).glob("*/manifest*")))


@pytest.mark.parametrize("implementation", [pytest.param("foreach", marks=pytest.mark.long), "fused"])
def test_losses_of_one_process(tmp_path: Path, implementation: str) -> None:
    """With dropout and batch norm, the losses of 50 steps and the state after them are bit-equal in either mode."""
    how = IMPLEMENTATIONS[implementation]
    found = {staging: train(str(tmp_path / str(staging)), staging, how, NUM_STEPS) for staging in STAGINGS}
    assert_same(tmp_path, found, NUM_STEPS)


@pytest.mark.parametrize(
    ("implementation", "num_steps"),
    [("foreach", NUM_STEPS // 3), *(pytest.param(how, NUM_STEPS, marks=pytest.mark.long) for how in ("foreach", "fused"))],
)
def test_losses_under_fsdp2(worlds: Worlds, tmp_path: Path, implementation: str, num_steps: int) -> None:
    """The same on each of two ranks, over fewer steps most days."""
    args = IMPLEMENTATIONS[implementation], num_steps
    found = {staging: worlds(NUM_RANKS).run(train, str(tmp_path / str(staging)), staging, *args) for staging in STAGINGS}
    for rank in range(NUM_RANKS):
        assert_same(tmp_path, {staging: of_ranks[rank] for staging, of_ranks in found.items()}, num_steps)

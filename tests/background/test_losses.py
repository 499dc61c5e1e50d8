"""Training is the same with asynchronous saves at each step as without any, to the last bit of each loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyshard.testing.world import Worlds
from tests.background import loss_cases, scenes
from tests.background.loss_cases import NUM_STEPS, train
from tests.background.torn_cases import IMPLEMENTATIONS

pytestmark = pytest.mark.slow

NUM_RANKS = 2
STAGINGS = (None, "eager", "lazy")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def assert_same(place: Path, found: dict[str | None, dict[str, Any]]) -> None:
    """All trainings are the same, they were saved at each step, and those saves were lazy that should be."""
    counts = {staging: one.pop("num_lazy") for staging, one in found.items()}
    assert {None: 0, "eager": 0, "lazy": NUM_STEPS} == counts  # the eager one has left the plan
    assert [NUM_STEPS] * len(found) == [len(set(one["losses"])) for one in found.values()]
    assert [found[None]] * len(found) == list(found.values())
    for staging in ("eager", "lazy"):
        assert NUM_STEPS == len(list((place / staging).glob("*/manifest*")))


@pytest.mark.parametrize("implementation", [pytest.param("foreach", marks=pytest.mark.long), "fused"])
def test_losses_of_one_process(tmp_path: Path, implementation: str) -> None:
    """With dropout and batch norm, the losses of 50 steps and the state after them are bit-equal in either mode."""
    how = IMPLEMENTATIONS[implementation]
    assert_same(tmp_path, {staging: train(str(tmp_path / str(staging)), staging, how) for staging in STAGINGS})


@pytest.mark.parametrize("implementation", ["foreach", pytest.param("fused", marks=pytest.mark.long)])
def test_losses_under_fsdp2(worlds: Worlds, tmp_path: Path, implementation: str) -> None:
    """The same on each of two ranks."""
    how = IMPLEMENTATIONS[implementation]
    found = {staging: worlds(NUM_RANKS).run(loss_cases.train, str(tmp_path / str(staging)), staging, how) for staging in STAGINGS}
    for rank in range(NUM_RANKS):
        assert_same(tmp_path, {staging: of_ranks[rank] for staging, of_ranks in found.items()})

from __future__ import annotations

import functools

import pytest

from anyshard.testing.fill import assert_same_bytes
from anyshard.testing.layouts import LAYOUTS
from anyshard.testing.world import Worlds
from tests.testing import layout_cases

pytestmark = pytest.mark.slow


@functools.cache
def train_plainly() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What a single process has, in this process."""
    return layout_cases.train("plain")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_same_state_and_the_same_next_step(worlds: Worlds, name: str) -> None:
    """Every layout holds, over all its ranks, what a single process holds, byte for byte, and so it is after a step."""
    results = worlds(LAYOUTS[name].size).run(layout_cases.train, name)
    for before, after in results:
        assert_same_bytes(train_plainly()[0], before)
        assert_same_bytes(train_plainly()[1], after)
    assert LAYOUTS[name].size == len(results)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("plain", "ddp2")])
def test_fills_agree_with_torch(worlds: Worlds, name: str) -> None:
    """A DTensor filled region by region is, gathered by torch itself, the plain tensor filled at once."""
    assert [[]] * LAYOUTS[name].size == worlds(LAYOUTS[name].size).run(layout_cases.compare_with_torch, name)


@pytest.mark.parametrize(("num_data", "num_tensor", "size"), [(4, 2, 9), (4, 2, 25), (3, 2, 7)])
def test_regions_of_real_ranks(worlds: Worlds, num_data: int, num_tensor: int, size: int) -> None:
    """Uneven FSDP over TP on real ranks: the regions are the rows that each rank holds, and all ranks hold each row once."""
    world = worlds(num_data * num_tensor)
    results = world.run(layout_cases.list_fsdp_over_tp, num_data, num_tensor, size)
    assert [rows for rows, _ in results] == [
        [row for start, num in runs for row in range(start, start + num)] for _, runs in results
    ]
    assert list(range(size)) == sorted(row for rows, _ in results for row in rows)


def test_a_step_changes_parameters_and_moments() -> None:
    """The control: what is compared after the step is not what it was before it, buffers and the empty parameter apart."""
    before, after = train_plainly()
    unchanged = {address for address in before if before[address] == after[address]}
    empty = {address for address in before if address.startswith(("model/empty", "optimizer/state/empty/exp"))}
    assert {"model/mean", "model/count", *empty} == unchanged

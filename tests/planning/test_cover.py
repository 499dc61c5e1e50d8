"""Cover: every logical tensor is held exactly once, or the flaw is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.planning.cover import check_cover
from anyshard.records.tables import make_tensor_table, whole_shards
from tests.planning.simulated import Simulated, make_shards, simulated_checkpoints


@pytest.mark.slow
@given(simulated_checkpoints())
def test_whole_checkpoints_have_no_flaw(stored: Simulated) -> None:
    """Any partition of any tensors passes."""
    assert () == check_cover(stored.index.shards)


@pytest.mark.slow
@given(simulated_checkpoints(), st.data())
def test_a_row_less_or_twice_is_found(stored: Simulated, data: st.DataObject) -> None:
    """Taking out or repeating any row that has elements is a flaw of its tensor."""
    shards = stored.index.shards
    rows = [row for row in range(len(shards)) if stored.index.blob[row] >= 0]
    if rows:
        chosen = data.draw(st.sampled_from(rows))
        regions = [(int(shards.tensor[row]), shards.region(row)) for row in range(len(shards))]
        address = shards.tensors.addresses[shards.tensor[chosen]]
        changed = {"hole": [r for row, r in enumerate(regions) if row != chosen], "overlap": [*regions, regions[chosen]]}
        for kind, table in changed.items():
            flaws = check_cover(make_shards(shards.tensors, table))
            assert {(address, kind)} == {(flaw.address, flaw.flaw.kind.value) for flaw in flaws}


def test_flaws_name_address_region_and_table_rows() -> None:
    """A message says where to look; rows are those of the whole table."""
    tensors = make_tensor_table(["m/a", "m/b\n", "m/c"], ["uint8"] * 3, [(4,), (4, 2), (9,)], {"m/c": "m/a"})
    rows = [(0, ((0,), (4,))), (1, ((0, 0), (3, 2))), (1, ((2, 0), (2, 2)))]
    assert ["m/b\\n: overlap at (2, 0) of lengths (1, 2) (rows (1, 2))"] == list(
        map(str, check_cover(make_shards(tensors, rows)))
    )


def test_unstored_tensors_are_holes_up_to_the_limit() -> None:
    """A tensor without any row is a hole of its whole shape, and the list ends at the limit."""
    tensors = make_tensor_table([f"m/{i}" for i in range(9)], ["uint8"] * 9, [(3,)] * 9, {})
    flaws = check_cover(make_shards(tensors, []), limit=2)
    assert ["m/0: hole at (0,) of lengths (3,)", "m/1: hole at (0,) of lengths (3,)"] == list(map(str, flaws))
    assert () == check_cover(whole_shards(tensors))

import dataclasses

import numpy as np
import pytest

from anyshard.errors import CheckpointDamaged
from anyshard.records.checks import check_slots
from tests.records.samples import make_index, make_tail


def test_records_that_belong_together_pass():
    """An index agrees with the tails of its blobs, whichever of them are at hand."""
    check_slots(make_index(), {0: make_tail()}, files=["blob"])
    check_slots(make_index(), {}, files=["blob"])


def test_padding_to_other_numbers_of_dims_does_not_matter():
    """A blob of small tensors has fewer columns than the index, or more."""
    tail = make_tail()
    wide = {name: np.pad(getattr(tail, name), ((0, 0), (0, 2)), constant_values=1) for name in ("shapes", "lengths")}
    check_slots(make_index(), {0: dataclasses.replace(tail, **wide)}, files=["blob"])


@pytest.mark.parametrize(
    "changes",
    [
        {"dtypes": ("int64", "bfloat16", "float16", "msgpack")},
        {"dtypes": ("float64", "bfloat16", "bfloat16", "msgpack")},
        {"ndims": np.array([0, 2, 1, 0], dtype=np.int8)},
        {"lengths": np.array([[1, 1], [3, 64], [64, 5], [1, 1]])},
    ],
)
def test_slot_of_another_dtype_or_box_is_damage_of_the_blob(changes):
    """Bytes are never read as something else than what they were written as."""
    with pytest.raises(CheckpointDamaged, match=r"slot [02]: expected 'model/(weight|scalar)'") as caught:
        check_slots(make_index(), {0: make_tail(**changes)}, files=["blob"])
    assert "blob" == caught.value.file


def test_rows_without_a_slot_or_a_blob_are_damage():
    """A row that points nowhere is found before anything is read."""
    with pytest.raises(CheckpointDamaged, match="expected slot 4, found 4 slots"):
        check_slots(make_index(slot=np.array([-1, 0, 1, 4])), {0: make_tail()}, files=["blob"])
    with pytest.raises(CheckpointDamaged, match="expected one of 1 blobs, found 1"):
        check_slots(make_index(blob=np.array([-1, 0, 0, 1])), {}, files=["blob"])
    with pytest.raises(CheckpointDamaged, match="msgpack"):
        check_slots(make_index(slot=np.array([-1, 0, 1, 3])), {0: make_tail()}, files=["blob"])

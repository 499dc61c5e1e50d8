"""Packing: which row goes into which blob and slot, and the index of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.planning.pack import make_index, order_blobs, plan_save, shard_nbytes
from anyshard.records.layout import lay_out
from anyshard.records.tables import NO_BLOB, SavePlan, TensorTable, make_tensor_table, whole_shards
from tests.planning.simulated import make_shards, tensor_tables


def summary(plan: SavePlan) -> list[tuple[str, int, list[int]]]:
    """Section, k and rows of each blob."""
    return [(blob.section, blob.k, blob.rows.tolist()) for blob in plan.blobs]


def test_rows_are_grouped_by_section_in_address_order() -> None:
    """Every section has a blob 0, tensors without elements have no slot, escaped names find their section."""
    addresses = ["model/b", "model/a", "optimizer/x", "a~1b/y", "model/empty"]
    tensors = make_tensor_table(addresses, ["float32"] * 5, [(2,), (3,), (), (1,), (0, 3)], {})
    plan = plan_save(whole_shards(tensors), ("optimizer", "model", "a/b", "extra"), rank=3, max_blob_nbytes=1 << 20)
    assert ("a~1b/y", "model/a", "model/b", "model/empty", "optimizer/x") == plan.shards.tensors.addresses
    assert [("optimizer", 0, [4]), ("model", 0, [1, 2]), ("a/b", 0, [0]), ("extra", 0, [])] == summary(plan)
    assert {3} == {blob.rank for blob in plan.blobs}


def test_sections_are_cut_where_a_blob_would_be_too_long() -> None:
    """The next blob begins where the extents would pass the limit; a row longer than the limit is alone."""
    tensors = make_tensor_table([f"m/{i}" for i in range(6)], ["uint8"] * 6, [(64,), (65,), (1,), (500,), (64,), (128,)], {})
    plan = plan_save(whole_shards(tensors), ("m",), rank=0, max_blob_nbytes=256)
    # Extents begin at 64: the first two end at 193, and a third would lie at 256.
    assert [("m", 0, [0, 1]), ("m", 1, [2]), ("m", 2, [3]), ("m", 3, [4, 5])] == summary(plan)


def test_an_address_outside_of_the_sections_is_refused() -> None:
    """An address whose section is not saved is an error that names both."""
    tensors = make_tensor_table(["m/a", "x/b"], ["uint8"] * 2, [(1,), (1,)], {})
    with pytest.raises(ValueError, match="expected addresses in the sections m, found x/b"):
        plan_save(whole_shards(tensors), ("m",), rank=0, max_blob_nbytes=256)


@given(tensor_tables(), st.integers(1, 2000))
def test_every_row_with_elements_has_one_slot(tensors: TensorTable, max_blob_nbytes: int) -> None:
    """Whatever the limit, slots are the rows with elements, once each, and blobs with several of them keep to it."""
    shards = whole_shards(tensors)
    plan = plan_save(shards, ("a", "b"), rank=0, max_blob_nbytes=max_blob_nbytes)
    nbytes = shard_nbytes(shards)
    rows = np.concatenate([blob.rows for blob in plan.blobs])
    assert np.flatnonzero(nbytes).tolist() == sorted(rows.tolist())
    for blob in plan.blobs:
        ends = lay_out(nbytes[blob.rows]) + nbytes[blob.rows]
        assert len(blob.rows) <= 1 or ends[-1] <= max_blob_nbytes


def test_index_says_where_everything_is() -> None:
    """Rows of all ranks are sorted by address, then offsets; empty tensors have a row without a place, aliases none."""
    addresses, shapes = ["m/a", "m/b", "m/e", "o/c"], [(4, 2), (4, 2), (0, 2), ()]
    tensors = make_tensor_table(addresses, ["uint8"] * 4, shapes, {"m/b": "m/a"})
    second = make_shards(tensors, [(0, ((0, 0), (2, 2))), (3, ((), ()))])
    own = make_tensor_table(["m/a"], ["uint8"], [(4, 2)], {})
    first = make_shards(own, [(0, ((2, 0), (2, 2)))])
    plans = [plan_save(shards, ("o", "m"), rank=rank, max_blob_nbytes=99) for rank, shards in enumerate([first, second])]
    index = make_index(plans, tensors)
    assert [("o", 0), ("o", 1), ("m", 0), ("m", 1)] == [(blob.section, blob.rank) for blob in order_blobs(plans)]
    assert [0, 0, 2, 3] == index.shards.tensor.tolist()
    assert [[0, 0], [2, 0], [0, 0], [0, 0]] == index.shards.offsets.tolist()
    assert [[2, 2], [2, 2], [0, 2], [1, 1]] == index.shards.lengths.tolist()
    assert [3, 2, NO_BLOB, 1] == index.blob.tolist()
    assert [0, 0, NO_BLOB, 0] == index.slot.tolist()


def test_same_plan_same_index() -> None:
    """The index depends on structure and plan only, so it is the same table at every step."""
    tensors = make_tensor_table(["m/a", "m/b"], ["float64"] * 2, [(4,), (5, 5)], {})
    plans = [plan_save(whole_shards(tensors), ("m",), rank=0, max_blob_nbytes=150) for _ in range(2)]
    one, other = (make_index([plan], tensors) for plan in plans)
    assert one.blob.tolist() == other.blob.tolist() == [0, 1]
    assert one.shards.offsets.tolist() == other.shards.offsets.tolist()


def test_scalars_alone_need_no_dims() -> None:
    """A checkpoint of 0-d tensors has an index without dim columns."""
    tensors = make_tensor_table(["m/a", "m/b"], ["float64", "bool"], [(), ()], {})
    index = make_index([plan_save(whole_shards(tensors), ("m",), rank=0, max_blob_nbytes=999)], tensors)
    assert ((2, 0), [0, 0], [0, 1]) == (index.shards.offsets.shape, index.blob.tolist(), index.slot.tolist())

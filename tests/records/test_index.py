import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.errors import CheckpointDamaged, LimitExceeded
from anyshard.records.index import ROW_GROUP, decode_index, encode_index
from anyshard.records.tables import Index, ShardTable, make_tensor_table, whole_shards
from tests.records.samples import make_index

TEXTS = ["address", "dtype", "alias_of"]


def decode(data, *, max_rows=5):
    return decode_index(data, max_rows=max_rows, file="index")


def read_table(data):
    return pq.read_table(pa.BufferReader(data), read_dictionary=TEXTS)


def write_table(table, **options):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **({"compression": "zstd", "store_schema": False} | options))
    return sink.getvalue().to_pybytes()


def change_columns(**columns):
    """The sample index with other values in some columns."""
    table = read_table(encode_index(make_index()))
    for name, values in columns.items():
        position = table.schema.get_field_index(name)
        array = values if isinstance(values, pa.Array) else pa.array(values, table.schema.field(position).type)
        table = table.set_column(position, name, array)
    return write_table(table)


def assert_same_index(expected, found):
    for left, right in ((expected, found), (expected.shards, found.shards), (expected.shards.tensors, found.shards.tensors)):
        for field in dataclasses.fields(left):
            one, two = getattr(left, field.name), getattr(right, field.name)
            if isinstance(one, np.ndarray):
                assert (one.dtype, one.tolist()) == (two.dtype, two.tolist()), field.name
            elif isinstance(one, tuple):
                assert one == two, field.name


def make_regular(num_tensors, num_shards):
    """Each tensor in shards of one row, shard i in blob i."""
    tensors = make_tensor_table(
        [f"model/{i:06d}" for i in range(num_tensors)], ["uint8"] * num_tensors, [(num_shards, 4)] * num_tensors, {}
    )
    tensor = np.repeat(np.arange(num_tensors), num_shards)
    offsets = np.zeros((len(tensor), 2), dtype=np.int64)
    offsets[:, 0] = np.tile(np.arange(num_shards), num_tensors)
    lengths = np.tile([1, 4], (len(tensor), 1))
    return Index(ShardTable(tensors, tensor, offsets, lengths), blob=offsets[:, 0].copy(), slot=tensor.copy())


def test_index_comes_back_equal():
    """Empty tensors, scalars, shards and aliases all come back, and the same index gives the same bytes."""
    data = encode_index(make_index())
    assert_same_index(make_index(), decode(data))
    assert data == encode_index(decode(data))


def test_number_of_rows_counts_aliases_too():
    """What the manifest announces is what the file has."""
    assert 5 == make_index().num_rows == read_table(encode_index(make_index())).num_rows


def test_rows_are_as_the_format_page_says():
    """One row per shard, alias or empty tensor; null exactly where there is nothing to say."""
    rows = read_table(encode_index(make_index())).to_pylist()
    expected = [
        ("model/empty", "float32", 2, None, None, None, 0, 0, 0, 4),
        ("model/scalar", "int64", 0, 0, 0, None, None, None, None, None),
        ("model/tied", "bfloat16", 2, None, None, "model/weight", 8, None, None, 64),
        ("model/weight", "bfloat16", 2, 0, 1, None, 8, 0, 3, 64),
        ("model/weight", "bfloat16", 2, 0, 2, None, 8, 3, 5, 64),
    ]
    names = "address dtype ndim blob slot alias_of shape_0 offset_0 length_0 shape_1".split()
    assert expected == [tuple(row[name] for name in names) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", [make_regular(0, 1), make_regular(3, 30_000), make_regular(70_000, 1), make_regular(1, 131_072)]
)
def test_index_of_any_number_of_row_groups_comes_back_equal(index):
    """Runs of one address may go on from one row group to the next."""
    data = encode_index(index)
    metadata = pq.read_metadata(pa.BufferReader(data))
    assert -(-len(index.shards) // ROW_GROUP) == metadata.num_row_groups
    assert_same_index(index, decode(data, max_rows=len(index.shards)))


def test_regular_index_is_small_and_delta_encoded():
    """Columns are flat, so that a regular layout takes a fraction of a byte per row."""
    data = encode_index(make_regular(100, 1000))
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(6)
    assert ("shape_0", True) == (chunk.path_in_schema, "DELTA_BINARY_PACKED" in chunk.encodings)
    assert chunk.is_stats_set
    assert len(data) < 100_000 / 4


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=8), st.randoms())
@settings(max_examples=50, deadline=None)
def test_any_tensors_come_back_equal(shapes, random):
    """Whatever the shapes and names, all of the table survives."""
    names = sorted({"".join(random.choices("a/~\u00e9\U0001f600\ue000", k=5)) for _ in shapes})
    shapes = [tuple(shape) for shape in shapes[: len(names)]]
    shards = whole_shards(make_tensor_table(names, ["int8"] * len(names), shapes, {}))
    full = shards.lengths.prod(axis=1) > 0
    index = Index(shards, blob=np.where(full, 3, -1), slot=np.where(full, np.arange(len(shards)), -1))
    assert_same_index(index, decode(encode_index(index), max_rows=len(names)))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"dtype": ["float32", None, "bfloat16", "bfloat16", "bfloat16"]}, "row 1: expected dtype, found null"),
        ({"address": ["b", "a", "c", "d", "d"]}, "sorted"),
        ({"address": ["a", "d", "c", "d", "d"], "alias_of": [None, None, "d", None, None]}, "sorted"),
        ({"dtype": ["float32", "int64", "bfloat16", "bfloat16", "int8"]}, "row 4: expected the dtype and shape"),
        ({"dtype": ["float32", "int64", "int16", "bfloat16", "bfloat16"]}, "alias"),
        ({"shape_0": [0, None, 8, 8, 9]}, "row 4: expected the dtype and shape"),
        ({"shape_0": [0, None, 9, 8, 8]}, "alias"),
        ({"shape_0": [0, None, 8, None, 8]}, "null beyond"),
        ({"shape_0": [0, 1, 8, 8, 8]}, "null beyond"),
        ({"ndim": [2, 0, 2, 2, 3]}, "ndim from 0 to 2"),
        ({"ndim": [2, 0, 2, 2, -1]}, "ndim from 0 to 2"),
        ({"offset_0": [0, None, 0, 0, 3]}, "row 2"),
        ({"offset_0": [1, None, None, 0, 3]}, "within the shape"),
        ({"offset_0": [0, None, None, 0, 4]}, "within the shape"),
        ({"offset_0": [0, None, None, -1, 3]}, "negative"),
        ({"offset_0": [0, None, None, 3, 0], "length_0": [0, None, None, 5, 3]}, "order of their offsets"),
        ({"offset_0": [0, None, None, 3, 3], "length_0": [0, None, None, 4, 4]}, "order of their offsets"),
        ({"length_0": [0, None, None, 2, 5]}, "fill it"),
        ({"length_0": [0, None, None, 4, 5]}, "fill it"),
        ({"length_0": [0, None, None, 0, 5]}, "stored elements"),
        ({"length_1": [0, None, None, 64, 64]}, "whole of a tensor"),
        ({"length_0": [0, None, None, 3, (1 << 63) - 1]}, "within the shape"),
        ({"shape_0": [0, None, 1 << 32, 1 << 32, 1 << 32], "shape_1": [4, None, 1 << 32, 1 << 32, 1 << 32]}, "2\\^62"),
        ({"shape_0": [0, None, 1 << 61, 8, 8]}, "2\\^62"),
        ({"blob": [0, 0, None, 0, 0]}, "row 0: expected blob exactly"),
        ({"blob": [None, None, None, 0, 0]}, "row 1: expected blob exactly"),
        ({"slot": [None, 0, 1, 1, 2]}, "row 2: expected slot exactly"),
        ({"slot": [None, 0, None, 1, -2]}, "not negative"),
        ({"alias_of": [None, None, "model/other", None, None]}, "alias"),
        ({"alias_of": [None, None, "model/tied", None, None]}, "alias"),
        ({"alias_of": [None, None, "model/scalar", None, None]}, "alias"),
        ({"blob": pa.array([None, 0, None, 0, 0], pa.int64())}, "column blob: expected int32, found int64"),
        ({"address": pa.array(list("abcde"), pa.binary())}, "column address"),
        ({"shape_1": pa.array([4.0] * 5)}, "column shape_1"),
    ],
)
def test_wrong_rows_are_damage(columns, reason):
    """Every rule of the format is checked for every row, also in an index whose digest fits."""
    with pytest.raises(CheckpointDamaged, match=reason):
        decode(change_columns(**columns))


def test_unchanged_rewrite_is_taken():
    """The cases above fail because of their change, not because they were rewritten."""
    assert_same_index(make_index(), decode(change_columns(slot=[None, 0, None, 1, 2])))


def test_alias_has_one_row_also_across_row_groups():
    """An alias that is listed twice is damaged."""
    table = read_table(encode_index(make_index()))
    doubled = pa.concat_tables([table.slice(0, 3), table.slice(2)])
    with pytest.raises(CheckpointDamaged, match="one row of an alias"):
        decode(write_table(doubled), max_rows=6)


def test_more_rows_than_the_manifest_says_is_damage():
    """The manifest bounds what an index may unfold to."""
    with pytest.raises(CheckpointDamaged, match="at most 4 rows"):
        decode(encode_index(make_index()), max_rows=4)


def test_further_columns_are_ignored_and_missing_ones_are_damage():
    """A later release may add columns, never drop one."""
    table = read_table(encode_index(make_index()))
    added = table.append_column("added", pa.array([[1], None, [], [2, 3], [4]]))
    assert_same_index(make_index(), decode(write_table(added)))
    for name in set(table.column_names) - {"shape_0", "shape_1"}:
        with pytest.raises(CheckpointDamaged, match=name):
            decode(write_table(table.drop_columns([name])))


def test_row_groups_of_other_lengths_are_damage():
    """Many tiny row groups would cost a reader far more than their rows."""
    with pytest.raises(CheckpointDamaged, match="row groups"):
        decode(write_table(read_table(encode_index(make_index())), row_group_size=2))


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_page_that_unfolds_to_far_more_than_its_rows_is_refused(use_dictionary):
    """The size of every page is known before any page is unfolded."""
    table = read_table(encode_index(make_index()))
    bomb = pa.array(["a" * 4_000_000 + str(i) for i in range(5)])
    data = write_table(table.set_column(0, "address", bomb), use_dictionary=use_dictionary)
    assert len(data) < 20_000
    with pytest.raises(CheckpointDamaged, match="pages of 20"):
        decode(data)


@pytest.mark.parametrize("cut", [0, 1, 4, 8, 100, -1])
def test_cut_index_is_damaged(cut):
    """No part of an index is taken for an index."""
    with pytest.raises(CheckpointDamaged):
        decode(encode_index(make_index())[:cut])


def test_addresses_that_no_reader_would_take_are_refused_before_writing():
    """The bound of readers holds for writers as well."""
    shards = whole_shards(make_tensor_table(["a" * 2_000_000], ["int8"], [(1,)], {}))
    with pytest.raises(LimitExceeded, match="shorten"):
        encode_index(Index(shards, blob=np.array([0]), slot=np.array([0])))

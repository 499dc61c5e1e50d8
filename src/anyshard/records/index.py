"""The index: one Parquet table of all stored shards, aliases and empty tensors of a checkpoint.

Written and read one row group at a time, so that no step needs much more memory than the columns themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anyshard.errors import CheckpointDamaged, LimitExceeded
from anyshard.records.columns import TEXT, check_schema, dim_fields, find_width
from anyshard.records.index_rows import IndexRows, join_rows, read_rows
from anyshard.records.parquet_pages import measure_parquet
from anyshard.records.tables import NO_BLOB, NOT_AN_ALIAS, Index, IntColumn, TensorTable

ROW_GROUP = 65_536

_MAX_THRIFT_ITEMS = 1 << 20
_MAX_THRIFT_TEXT_NBYTES = 64 << 20
# Bounds of the unfolded pages: before any of them is unfolded.
_PAGE_NBYTES_FIXED, _PAGE_NBYTES_PER_ROW = 1 << 20, 4096
_TEXTS = ("address", "dtype", "alias_of")
_FIXED = (
    pa.field("address", TEXT),
    pa.field("dtype", TEXT),
    pa.field("ndim", pa.int8()),
    pa.field("blob", pa.int32()),
    pa.field("slot", pa.int32()),
    pa.field("alias_of", TEXT),
)


def encode_index(index: Index) -> bytes:
    """The Parquet bytes of an index: delta-encoded flat columns, zstd, row groups of 65,536 rows.

    The same index gives the same bytes within one environment. Raises `LimitExceeded` if addresses are so long that no
    reader would take the index.
    """
    tensors, shards = index.shards.tensors, index.shards
    _check_addresses(tensors)
    schema = pa.schema([*_FIXED, *dim_fields(tensors.shapes.shape[1])])
    aliases = np.flatnonzero(tensors.alias_of != NOT_AN_ALIAS)
    owners = np.concatenate([shards.tensor, aliases])
    order = np.argsort(owners, kind="stable")
    sink = pa.BufferOutputStream()
    with _open_writer(sink, schema) as writer:
        for start in range(0, len(order), ROW_GROUP):
            rows = order[start : start + ROW_GROUP]
            writer.write_batch(_make_batch(index, rows, owners[rows], schema), row_group_size=ROW_GROUP)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _check_addresses(tensors: TensorTable) -> None:
    # An address stands at most twice in a row (also as alias_of); what remains is for the numbers.
    nbytes = sum(len(address.encode()) for address in tensors.addresses)
    if nbytes > (limit := _PAGE_NBYTES_FIXED + _PAGE_NBYTES_PER_ROW // 4 * len(tensors)):
        raise LimitExceeded(f"the addresses take {nbytes} bytes, expected at most {limit} for {len(tensors)}; shorten them")


def _open_writer(sink: pa.BufferOutputStream, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=list(_TEXTS),
        dictionary_pagesize_limit=1 << 30,
        column_encoding={name: "DELTA_BINARY_PACKED" for name in schema.names if name not in _TEXTS},
        write_statistics=True,
        store_schema=False,
    )


def _make_batch(index: Index, rows: IntColumn, owners: IntColumn, schema: pa.Schema) -> pa.RecordBatch:
    """One row group. `rows` counts the shards and after them the aliases, `owners` are the tensors of the rows."""
    shards, tensors = index.shards, index.shards.tensors
    is_alias = rows >= len(shards)
    shard = np.where(is_alias, 0, rows)
    blob, slot = index.blob[shard], index.slot[shard]
    no_slot = is_alias | (blob == NO_BLOB)
    columns = {
        "address": _make_texts(tensors.addresses, owners),
        "dtype": _make_texts(tensors.dtypes, owners),
        "ndim": pa.array(tensors.ndims[owners], pa.int8()),
        "blob": pa.array(blob.astype(np.int32), mask=no_slot),
        "slot": pa.array(slot.astype(np.int32), mask=no_slot),
        "alias_of": _make_texts(tensors.addresses, np.where(is_alias, tensors.alias_of[owners], NOT_AN_ALIAS)),
    }
    for i in range(tensors.shapes.shape[1]):
        outside = tensors.ndims[owners] <= i
        columns[f"shape_{i}"] = pa.array(tensors.shapes[owners, i], mask=outside)
        columns[f"offset_{i}"] = pa.array(shards.offsets[shard, i], mask=outside | is_alias)
        columns[f"length_{i}"] = pa.array(shards.lengths[shard, i], mask=outside | is_alias)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _make_texts(texts: tuple[str, ...], rows: IntColumn) -> pa.DictionaryArray:
    """The texts at `rows` (-1: null) with a dictionary of only those: each row group carries its own."""
    used, codes = np.unique(rows[rows >= 0], return_inverse=True)
    indices = np.zeros(len(rows), dtype=np.int32)
    indices[rows >= 0] = codes
    names = pa.array([texts[row] for row in used.tolist()], pa.string()).dictionary_encode()
    return names.take(pa.array(indices, mask=rows < 0)) if len(used) else pa.nulls(len(rows), TEXT)


def decode_index(data: bytes, *, max_rows: int, file: str) -> Index:
    """Check schema, sizes and every row of an index whose digest was already compared; damage names `file`."""
    try:
        num_rows = _check_sizes(data, max_rows, file)
        table = _open_table(data)
        groups = list(_read_row_groups(table, file))
        if num_rows != (found := sum(group.num_rows for group in groups)):
            raise ValueError(f"{found} rows instead of {num_rows}")
        return join_rows(groups, width=find_width(table.schema_arrow), file=file)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"{file}: expected a Parquet table, found damage: {error}", file=file) from None


def _open_table(data: bytes) -> pq.ParquetFile:
    return pq.ParquetFile(
        pa.BufferReader(data),
        read_dictionary=list(_TEXTS),
        pre_buffer=False,
        thrift_string_size_limit=_MAX_THRIFT_TEXT_NBYTES,
        thrift_container_size_limit=_MAX_THRIFT_ITEMS,
        arrow_extensions_enabled=False,
    )


def _read_row_groups(table: pq.ParquetFile, file: str) -> Iterator[IndexRows]:
    names = check_schema(table.schema_arrow, _FIXED, file=file)
    num_rows = 0
    for batch in table.iter_batches(ROW_GROUP, columns=names, use_threads=False):
        if not batch.num_rows:
            continue
        batch.validate(full=True)
        yield read_rows({name: batch.column(name) for name in names}, first_row=num_rows, file=file)
        num_rows += batch.num_rows


def _check_sizes(data: bytes, max_rows: int, file: str) -> int:
    """The number of rows, once rows, row groups and pages are known to be no more than the manifest announced."""
    sizes = measure_parquet(data)
    num_rows, groups = sizes.num_rows, sizes.group_rows
    if not 0 <= num_rows <= max_rows:
        raise CheckpointDamaged(f"{file}: expected at most {max_rows} rows, found {num_rows}", file=file)
    if list(groups) != [min(ROW_GROUP, num_rows - start) for start in range(0, num_rows, ROW_GROUP)]:
        raise ValueError(f"row groups of {groups[:4]} rows instead of {ROW_GROUP}, for {num_rows} in all")
    if sizes.page_nbytes > (limit := _PAGE_NBYTES_FIXED + _PAGE_NBYTES_PER_ROW * num_rows):
        raise ValueError(f"pages of {sizes.page_nbytes} bytes, more than the {limit} that {num_rows} rows may take")
    return num_rows

"""Records built anew with lies in them: right in form, wrong in content. What random bytes would find only in years."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.hostile.mutate import NUMBERS, pick_number

TYPES = (
    pa.int8(),
    pa.int32(),
    pa.int64(),
    pa.uint64(),
    pa.float64(),
    pa.bool_(),
    pa.null(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.binary(16),
    pa.list_(pa.uint32()),
    pa.struct([("a", pa.int64())]),
    pa.map_(pa.string(), pa.int64()),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.int64()),
    pa.timestamp("us"),
    pa.decimal128(20, 2),
)
TEXTS = (
    "",
    "a",
    "model",
    "model/weight",
    "model/tied",
    "float32",
    "bfloat16",
    "msgpack",
    "int64",
    "x" * 5000,
    "\0",
    "\u202e",
    "../x",
)
PYTHON_VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1 << 40,
    -(1 << 70),
    1.5,
    1e308,
    "",
    "x",
    "committed",
    "\u0000",
    [],
    {},
    [[]],
    {"a": 1},
)


def make_array(random: Random, kind: pa.DataType, num_rows: int) -> pa.Array:
    """A random array of any type; `safe` conversions that fail give nulls."""
    if pa.types.is_dictionary(kind) and kind.value_type == pa.string() and random.random() < 0.7:
        names = pa.array(random.choices((*TEXTS, None), k=random.randrange(1, 6)), pa.string())
        codes = pa.array(random.choices((0, 0, 0, 1, 2, 3, -1, 100, None), k=num_rows), kind.index_type)
        return pa.DictionaryArray.from_arrays(codes, names, safe=random.random() < 0.3)
    values: list[Any] = random.choices((*NUMBERS, None, -1, -(1 << 63)), k=num_rows)
    values = [value if value is None or value < 1 << 63 else value - (1 << 64) for value in values]
    try:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return pa.array(random.choices((*TEXTS, None), k=num_rows), kind)
        return pa.array(values, pa.int64()).cast(kind, safe=False)
    except (pa.ArrowException, OverflowError):
        return pa.nulls(num_rows, kind)


def change_table(table: pa.Table, random: Random) -> pa.Table:
    """The table with one to three columns or its metadata changed."""
    for _ in range(random.choice((1, 1, 2, 3))):
        try:
            table = random.choice(_TABLE_CHANGES)(table, random)
        except (pa.ArrowException, OverflowError, ValueError, RecursionError):
            continue
    return table


def _set_cells(table: pa.Table, random: Random) -> pa.Table:
    position = random.randrange(table.num_columns)
    column = table.column(position)
    values = column.to_pylist()
    others: tuple[Any, ...] = (*TEXTS, None) if pa.types.is_dictionary(column.type) else (*NUMBERS, None, -1, *values)
    for _ in range(random.choice((1, 1, 2))):
        if values:
            values[random.randrange(len(values))] = random.choice(others)
    return table.set_column(position, table.column_names[position], pa.array(values, column.type))


def _set_column(table: pa.Table, random: Random) -> pa.Table:
    position = random.randrange(table.num_columns)
    kind = table.schema.field(position).type if random.random() < 0.5 else random.choice(TYPES)
    return table.set_column(position, table.column_names[position], make_array(random, kind, table.num_rows))


def _drop(table: pa.Table, random: Random) -> pa.Table:
    return table.remove_column(random.randrange(table.num_columns))


def _double(table: pa.Table, random: Random) -> pa.Table:
    return table.append_column(random.choice(table.column_names), table.column(random.randrange(table.num_columns)))


def _add(table: pa.Table, random: Random) -> pa.Table:
    name = random.choice(("added", "shape_2", "shape_64", "length_2", "codec"))
    return table.append_column(name, make_array(random, random.choice(TYPES), table.num_rows))


def _slice(table: pa.Table, random: Random) -> pa.Table:
    rows = [random.randrange(table.num_rows) for _ in range(random.randrange(8))] if table.num_rows else []
    return table.take(pa.array(rows, pa.int64()))


def _metadata(table: pa.Table, random: Random) -> pa.Table:
    old = (table.schema.metadata or {}).get(b"anyshard")
    if old is None or random.random() < 0.2:
        return table.replace_schema_metadata({b"anyshard": random.randbytes(8), b"ARROW:schema": random.randbytes(20)})
    return table.replace_schema_metadata({b"anyshard": change_json(json.loads(old), random)})


_TABLE_CHANGES = (_set_cells, _set_cells, _set_cells, _set_column, _drop, _double, _add, _slice, _metadata)


def write_stream(table: pa.Table, random: Random) -> bytes:
    """The table as an Arrow IPC stream, in one of the ways that Arrow has."""
    options = pa.ipc.IpcWriteOptions(
        compression=random.choice((None, None, None, "lz4", "zstd")),
        emit_dictionary_deltas=random.random() < 0.2,
        unify_dictionaries=random.random() < 0.8,
        use_legacy_format=random.random() < 0.1,
    )
    sink = pa.BufferOutputStream()
    try:
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=random.choice((None, None, None, 1, 2)))
    except pa.ArrowException:
        return b""
    return bytes(sink.getvalue().to_pybytes())


def write_parquet(table: pa.Table, random: Random) -> bytes:
    """The table as a Parquet file, in one of the ways that Parquet has."""
    sink = pa.BufferOutputStream()
    try:
        table.validate(full=True)  # the writer follows codes beyond a dictionary
        pq.write_table(
            table,
            sink,
            compression=random.choice(("zstd", "zstd", "none", "snappy", "gzip", "lz4", "brotli")),
            use_dictionary=random.random() < 0.7,
            row_group_size=random.choice((None, None, None, 1, 2)),
            data_page_version=random.choice(("1.0", "2.0")),
            version=random.choice(("1.0", "2.4", "2.6")),
            store_schema=random.random() < 0.5,
            write_statistics=random.random() < 0.8,
            write_page_index=random.random() < 0.2,
        )
    except (pa.ArrowException, OSError, ValueError):
        return b""
    return bytes(sink.getvalue().to_pybytes())


def change_json(tree: Any, random: Random) -> bytes:
    """JSON text of the tree with one to three of its nodes changed, sometimes by means that are no JSON."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 3))):
        _change_node(tree, random)
    text = json.dumps(tree, allow_nan=True)
    change: Callable[[str, Random], str] = random.choice((_keep, _keep, _keep, _keep, _twice, _odd_number, _deep))
    return change(text, random).encode("utf-8", "surrogatepass")


def _change_node(node: Any, random: Random) -> None:
    names = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not names:
        return
    name = random.choice(names)
    if isinstance(node[name], (dict, list)) and node[name] and random.random() < 0.75:
        _change_node(node[name], random)
    elif random.random() < 0.1:
        del node[name]
    elif random.random() < 0.1 and isinstance(node, list):
        node.append(copy.deepcopy(node[name]))
    elif isinstance(node[name], str) and random.random() < 0.5:
        position = random.randrange(len(node[name]) + 1)
        node[name] = node[name][:position] + random.choice(("\0", "/", "..", "\ud800", "A", "9", "")) + node[name][position + 1 :]
    elif random.random() < 0.5:
        node[name] = pick_number(random)
    else:
        node[name] = copy.deepcopy(random.choice((*PYTHON_VALUES, float("nan"), float("inf"))))


def _keep(text: str, random: Random) -> str:
    return text


def _twice(text: str, random: Random) -> str:
    return text[:-1] + random.choice((',"step":1}', ',"format":"anyshard"}', ',"a":1,"a":2}'))


def _odd_number(text: str, random: Random) -> str:
    return text.replace(": 1", ": " + random.choice(("1e999", "-0", "1.0", "01", "9" * 5000, "1e-999", "NaN")), 1)


def _deep(text: str, random: Random) -> str:
    depth = random.choice((20, 33, 900, 50_000))
    return text[:-1] + ',"deep":' + "[" * depth + "]" * depth + "}"

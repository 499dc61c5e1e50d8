"""Arrow columns from strangers to NumPy columns that can be computed with: schema, texts, integers, boxes.

Shared by the index and the tails. Everything works on whole columns; a check answers with the rows that fail it, and the
caller says which file is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anyshard.errors import CheckpointDamaged
from anyshard.records.dtypes import DTYPES
from anyshard.records.tables import IntColumn

MAX_NDIM = 64
MAX_COUNT = 1 << 62
TEXT = pa.dictionary(pa.int32(), pa.string())

BoolColumn: TypeAlias = NDArray[np.bool_]
Columns: TypeAlias = Mapping[str, pa.Array]
Check: TypeAlias = tuple[str, BoolColumn]


def dim_fields(width: int) -> list[pa.Field]:
    """The fields `shape_i`, `offset_i`, `length_i` for dims below `width`."""
    return [pa.field(f"{kind}_{i}", pa.int64()) for i in range(width) for kind in ("shape", "offset", "length")]


def find_width(schema: pa.Schema) -> int:
    """How many dims a schema has columns for: `shape_0`, `shape_1`, ... without a gap."""
    names = set(schema.names)
    return next(i for i in range(len(names) + 1) if f"shape_{i}" not in names)


def check_schema(schema: pa.Schema, fixed: Sequence[pa.Field], *, file: str) -> list[str]:
    """Names of the columns to read: `fixed` and those of all dims, each there once with its type. Others are ignored."""
    width = find_width(schema)
    if width > MAX_NDIM:
        raise CheckpointDamaged(f"{file}: expected at most {MAX_NDIM} dims, found {width}", file=file)
    fields = [*fixed, *dim_fields(width)]
    for field in fields:
        types = [schema.field(position).type for position in schema.get_all_field_indices(field.name)]
        if types != [field.type]:
            found = " and ".join(map(str, types)) or "no such column"
            raise CheckpointDamaged(f"{file}: column {field.name}: expected {field.type}, found {found}", file=file)
    return [field.name for field in fields]


def check_rows(checks: Iterator[Check], *, file: str, first_row: int = 0) -> None:
    """Raise `CheckpointDamaged`, naming the first bad row, for the first check that has one."""
    for expected, bad in checks:
        if bad.any():
            raise CheckpointDamaged(f"{file}: row {first_row + int(bad.argmax())}: expected {expected}", file=file)


def read_ints(array: pa.Array) -> tuple[IntColumn, BoolColumn]:
    """Values of an integer column (0 where null), and where it is null."""
    values = array.fill_null(0) if array.null_count else array
    return values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False), read_nulls(array)


def read_nulls(array: pa.Array) -> BoolColumn:
    """Where a column is null."""
    if not array.null_count:
        return np.zeros(len(array), dtype=np.bool_)
    nulls: BoolColumn = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


@dataclass(frozen=True, slots=True)
class Texts:
    """A dictionary column: the distinct texts and, for each row, the code of its text (-1 where null)."""

    names: list[str]
    codes: IntColumn

    def __getitem__(self, row: int) -> str:
        return self.names[int(self.codes[row])]

    def itemsizes(self) -> IntColumn:
        """For each row the bytes per element of the dtype it names, 0 if this release does not know it."""
        sizes = [DTYPES[name].itemsize if name in DTYPES else 0 for name in self.names]
        column: IntColumn = np.array([*sizes, 0], dtype=np.int64)[self.codes]
        return column

    def take(self) -> list[str]:
        """The text of every row; none may be null."""
        names = self.names
        return [names[code] for code in self.codes.tolist()]


def read_texts(array: pa.DictionaryArray, *, file: str) -> Texts:
    """A dictionary column whose array was validated in full."""
    if array.dictionary.null_count:
        raise CheckpointDamaged(f"{file}: expected a dictionary without nulls", file=file)
    codes, nulls = read_ints(array.indices)
    return Texts(names=array.dictionary.to_pylist(), codes=np.where(nulls, -1, codes))


@dataclass(frozen=True, slots=True)
class Boxes:
    """Shapes and regions of rows, padded as in `ShardTable`: beyond a row's ndim shape and length 1, offset 0."""

    ndims: IntColumn
    shapes: IntColumn
    offsets: IntColumn
    lengths: IntColumn

    def volumes(self) -> IntColumn:
        """Elements of each region; only after `box_checks` have passed (no product wraps then)."""
        volumes: IntColumn = np.prod(self.lengths, axis=1, dtype=np.int64)
        return volumes


def read_boxes(columns: Columns, has_box: BoolColumn) -> tuple[Boxes, Check]:
    """The boxes of all rows, and the check that exactly the entries are null that have to be.

    `shape_i` is there for i < ndim; `offset_i` and `length_i` likewise, but only in rows that have a box. A row without one
    reads as the whole tensor.
    """
    ndims, bad = read_ints(columns["ndim"])
    width = sum(name.startswith("shape_") for name in columns)
    inside = np.arange(width) < ndims[:, None]
    boxed = inside & has_box[:, None]
    shapes, shape_faults = _read_dims(columns, "shape", inside)
    offsets, offset_faults = _read_dims(columns, "offset", boxed)
    lengths, length_faults = _read_dims(columns, "length", boxed)
    bad = bad | (ndims < 0) | (ndims > width) | shape_faults | offset_faults | length_faults
    boxes = Boxes(ndims, np.where(inside, shapes, 1), offsets, np.where(boxed, lengths, np.where(inside, shapes, 1)))
    return boxes, (f"ndim from 0 to {width} and a shape, offset and length for each dim, null beyond", bad)


def _read_dims(columns: Columns, kind: str, expected: BoolColumn) -> tuple[IntColumn, BoolColumn]:
    """Values of the columns of all dims (0 where null), and the rows that are null elsewhere than beside `expected`."""
    values = np.zeros(expected.shape, dtype=np.int64)
    bad = np.zeros(len(expected), dtype=np.bool_)
    for i in range(expected.shape[1]):
        values[:, i], nulls = read_ints(columns[f"{kind}_{i}"])
        bad |= nulls == expected[:, i]
    return values, bad


def box_checks(boxes: Boxes, itemsizes: IntColumn) -> Iterator[Check]:
    """Regions lie within shapes, and no count of elements or bytes comes near the end of int64."""
    shapes, offsets, lengths = boxes.shapes, boxes.offsets, boxes.lengths
    negative = (shapes < 0) | (offsets < 0) | (lengths < 0)
    yield "no negative shape, offset or length", np.any(negative, axis=1)
    # Not offsets + lengths > shapes: that sum could wrap.
    yield "offset + length within the shape", np.any(offsets > shapes - lengths, axis=1)
    counts = np.prod(np.maximum(shapes, 1), axis=1, dtype=np.float64) * np.maximum(itemsizes, 1)
    yield "fewer than 2^62 bytes in a tensor", counts >= MAX_COUNT

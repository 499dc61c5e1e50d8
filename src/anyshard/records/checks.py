"""Checks between records: what the index says of a slot has to agree with what the blob's tail says of it.

The index is the truth about where a logical tensor lies, the tail about the bytes. Addresses are not compared: names may have
been mapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from anyshard.errors import CheckpointDamaged
from anyshard.records.tables import NO_BLOB, Index, IntColumn
from anyshard.records.tail import Tail


def check_slots(index: Index, tails: Mapping[int, Tail], *, files: Sequence[str]) -> None:
    """Raise `CheckpointDamaged` unless every row in a blob of `tails` has a slot of its dtype, ndim and lengths there.

    `files` are the names of all blobs of the manifest; rows that name a blob beyond them are damage too.
    """
    if (bad := index.blob >= len(files)).any():
        row = int(bad.argmax())
        raise CheckpointDamaged(
            f"index: {_show(index, row)}: expected one of {len(files)} blobs, found {index.blob[row]}", file="index"
        )
    for blob, rows in _rows_by_blob(index):
        if blob in tails:
            _check_blob(index, rows, tails[blob], files[blob])


def _rows_by_blob(index: Index) -> Iterator[tuple[int, IntColumn]]:
    """For each blob its rows of the index."""
    order = np.argsort(index.blob, kind="stable")
    blobs, starts = np.unique(index.blob[order], return_index=True)
    for blob, rows in zip(blobs.tolist(), np.split(order, starts[1:]), strict=False):
        if blob != NO_BLOB:
            yield blob, rows


def _check_blob(index: Index, rows: IntColumn, tail: Tail, file: str) -> None:
    shards, slots = index.shards, index.slot[rows]
    if (bad := slots >= len(tail)).any():
        row = int(rows[bad.argmax()])
        raise CheckpointDamaged(
            f"{file}: {_show(index, row)}: expected slot {index.slot[row]}, found {len(tail)} slots", file=file
        )
    tensors = shards.tensor[rows]
    bad = shards.tensors.ndims[tensors] != tail.ndims[slots]
    bad |= np.any(_widen(shards.lengths[rows], tail.lengths) != _widen(tail.lengths[slots], shards.lengths), axis=1)
    bad |= _dtype_numbers(shards.tensors.dtypes, tail)[tensors] != _dtype_numbers(tail.dtypes, tail)[slots]
    if bad.any():
        row, slot = int(rows[bad.argmax()]), int(slots[bad.argmax()])
        lengths = tuple(tail.lengths[slot, : tail.ndims[slot]].tolist())
        raise CheckpointDamaged(
            f"{file}: slot {slot}: expected {_show(index, row)}, found {tail.dtypes[slot]} {lengths}; "
            f"index and blob do not belong together",
            file=file,
        )


def _widen(lengths: IntColumn, other: IntColumn) -> IntColumn:
    """Padding (length 1) up to the number of dims of the other table."""
    return np.pad(lengths, ((0, 0), (0, max(other.shape[1] - lengths.shape[1], 0))), constant_values=1)


def _dtype_numbers(dtypes: Sequence[str], tail: Tail) -> IntColumn:
    """Dtypes as their position among those of the tail; those that the tail lacks are -1."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(tail.dtypes))}
    return np.array([numbers.get(name, -1) for name in dtypes], dtype=np.int64)


def _show(index: Index, row: int) -> str:
    tensor = int(index.shards.tensor[row])
    offsets, lengths = index.shards.region(row)
    return f"{index.shards.tensors.addresses[tensor]!r} {index.shards.tensors.dtypes[tensor]} {lengths} at {offsets}"

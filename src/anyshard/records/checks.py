"""Checks between records: of the index with the manifest, with the tails of blobs, and with the marks in value trees.

The index is the truth about where a logical tensor lies, the tail about the bytes. Their addresses are not compared: names may
have been mapped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from anyshard.errors import CheckpointDamaged
from anyshard.records.addresses import component, section_of, show
from anyshard.records.manifest import Manifest
from anyshard.records.tables import NO_BLOB, Index, IntColumn
from anyshard.records.tail import Tail
from anyshard.records.values_tree import collect_marks


def check_sections(index: Index, manifest: Manifest) -> None:
    """Raise `CheckpointDamaged` unless every address is in a section of the manifest and every row in a blob of that section."""
    shards, file = index.shards, "index" if manifest.index is None else manifest.index.name
    section = _section_numbers(shards.tensors.addresses, manifest.sections)
    for tensor in np.flatnonzero(section < 0)[:1]:
        raise CheckpointDamaged(
            f"{file}: expected addresses in the sections {', '.join(map(show, manifest.sections))}, "
            f"found {show(shards.tensors.addresses[tensor])}; load another checkpoint",
            file=file,
        )
    numbers = {name: number for number, name in enumerate(manifest.sections)}
    of_blob = np.array([numbers[blob.section] for blob in manifest.blobs], dtype=np.int64)
    rows = np.flatnonzero(index.blob != NO_BLOB)
    is_known = index.blob[rows] < len(of_blob)
    bad = ~is_known
    bad[is_known] = of_blob[index.blob[rows[is_known]]] != section[shards.tensor[rows[is_known]]]
    for row in rows[bad][:1].tolist():
        raise CheckpointDamaged(
            f"{file}: {_show(index, row)}: expected one of the {len(of_blob)} blobs, and one of its own section, "
            f"found blob {index.blob[row]}; load another checkpoint",
            file=file,
        )


def _section_numbers(addresses: Sequence[str], sections: Sequence[str]) -> IntColumn:
    """For each of the sorted addresses the number of its section, or -1."""
    numbers = np.full(len(addresses), -1, dtype=np.int64)
    for number, section in enumerate(sections):
        name = component(section)
        # A section's own address, and all that goes on with a slash ("0" is the character after it).
        for low, high in ((name, name + "\0"), (name + "/", name + "0")):
            numbers[bisect_left(addresses, low) : bisect_left(addresses, high)] = number
    return numbers


def check_marks(tree: object, section: str, index: Index, *, file: str) -> None:
    """Raise `CheckpointDamaged` unless every mark in a section's value tree stands for a tensor of the index in that section."""
    for mark in collect_marks(tree):
        if mark.address not in index.shards.tensors.rows or section_of(mark.address) != section:
            raise CheckpointDamaged(
                f"{file}: expected marks of tensors that the index lists in section {show(section)}, found {show(mark.address)}; "
                "load another checkpoint",
                file=file,
            )


def check_slots(index: Index, tails: Mapping[int, Tail], *, files: Sequence[str]) -> None:
    """Raise `CheckpointDamaged` unless every row in a blob of `tails` has a slot of its dtype, ndim and lengths there.

    `files` are the names of all blobs of the manifest; rows that name a blob beyond them are damage too.
    """
    if (bad := index.blob >= len(files)).any():
        row = int(bad.argmax())
        raise CheckpointDamaged(
            f"index: {_show(index, row)}: expected one of {len(files)} blobs, found {index.blob[row]}", file="index"
        )
    for blob, rows in _rows_by_blob(index, list(tails)):
        _check_blob(index, rows, tails[blob], files[blob])


def _rows_by_blob(index: Index, blobs: list[int]) -> Iterator[tuple[int, IntColumn]]:
    """For each of these blobs that has any its rows of the index."""
    rows = np.flatnonzero(np.isin(index.blob, blobs))
    rows = rows[np.argsort(index.blob[rows], kind="stable")]
    found, starts = np.unique(index.blob[rows], return_index=True)
    return zip(found.tolist(), np.split(rows, starts[1:]), strict=False)


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

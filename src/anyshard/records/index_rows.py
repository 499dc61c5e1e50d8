"""The rows of an index: one row group at a time to columns, every rule of the format checked, then all joined.

Rows are sorted by address, so each row group is a sequence of runs, one per logical tensor; a run can go on in the next group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from anyshard.errors import CheckpointDamaged
from anyshard.records.columns import (
    BoolColumn,
    Boxes,
    Check,
    Columns,
    Texts,
    box_checks,
    check_rows,
    read_boxes,
    read_ints,
    read_nulls,
    read_texts,
)
from anyshard.records.tables import NO_BLOB, NOT_AN_ALIAS, Index, IntColumn, ShardTable, TensorTable


@dataclass(frozen=True, slots=True)
class Run:
    """What all rows of one address in a row group agree on."""

    address: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class IndexRows:
    """A checked row group: its runs, and for each of its rows with a box (aliases have none) the run and the columns."""

    num_rows: int
    runs: list[Run]
    run: IntColumn
    offsets: IntColumn
    lengths: IntColumn
    blob: IntColumn
    slot: IntColumn


def read_rows(columns: Columns, *, first_row: int, file: str) -> IndexRows:
    """Check everything that can be seen in one row group, whose arrays were validated in full."""
    address, dtype, alias_of = (read_texts(columns[name], file=file) for name in ("address", "dtype", "alias_of"))
    is_stored = alias_of.codes < 0
    boxes, nulls = read_boxes(columns, is_stored)
    blob, slot = read_ints(columns["blob"])[0], read_ints(columns["slot"])[0]
    check_rows(iter([nulls, *_null_checks(columns)]), file=file, first_row=first_row)
    check_rows(box_checks(boxes, dtype.itemsizes()), file=file, first_row=first_row)
    is_full = boxes.volumes() > 0
    has_slot = is_stored & is_full
    check_rows(_slot_checks(columns, boxes, has_slot), file=file, first_row=first_row)
    starts = np.flatnonzero(np.diff(address.codes, prepend=-1))
    run = np.cumsum(np.diff(address.codes, prepend=-1) != 0) - 1
    check_rows(_run_checks(starts[run], dtype, boxes, alias_of), file=file, first_row=first_row)
    return IndexRows(
        num_rows=len(run),
        runs=[_make_run(row, address, dtype, boxes, alias_of) for row in starts.tolist()],
        run=run[is_stored],
        offsets=boxes.offsets[is_stored],
        lengths=boxes.lengths[is_stored],
        blob=np.where(has_slot, blob, NO_BLOB)[is_stored],
        slot=np.where(has_slot, slot, NO_BLOB)[is_stored],
    )


def _null_checks(columns: Columns) -> Iterator[Check]:
    for name in ("address", "dtype", "ndim"):
        yield f"{name}, found null", read_nulls(columns[name])


def _slot_checks(columns: Columns, boxes: Boxes, has_slot: BoolColumn) -> Iterator[Check]:
    for name in ("blob", "slot"):
        values, nulls = read_ints(columns[name])
        yield f"{name} exactly in rows of stored elements", nulls == has_slot
        yield f"{name} that is not negative", values < 0
    empty = boxes.volumes() == 0
    whole = np.all((boxes.offsets == 0) & (boxes.lengths == boxes.shapes), axis=1)
    yield "a region with elements, or the whole of a tensor without any", empty & ~whole


def _run_checks(first: IntColumn, dtype: Texts, boxes: Boxes, alias_of: Texts) -> Iterator[Check]:
    """All rows of a run agree with its first row; an alias has one row only."""
    same = (dtype.codes == dtype.codes[first]) & (boxes.ndims == boxes.ndims[first])
    same &= np.all(boxes.shapes == boxes.shapes[first], axis=1)
    yield "the dtype and shape of the other rows of its address", ~same
    yield "one row of an alias", (first != np.arange(len(first))) & ((alias_of.codes >= 0) | (alias_of.codes[first] >= 0))


def _make_run(row: int, address: Texts, dtype: Texts, boxes: Boxes, alias_of: Texts) -> Run:
    shape = tuple(boxes.shapes[row, : boxes.ndims[row]].tolist())
    return Run(address[row], dtype[row], shape, None if alias_of.codes[row] < 0 else alias_of[row])


def join_rows(groups: Sequence[IndexRows], *, width: int, file: str) -> Index:
    """One index of all row groups, after the checks that need more than one of them."""
    runs, tensor = _join_runs(groups, file)
    tensors = _make_tensors(runs, width, file)
    shards = ShardTable(
        tensors=tensors,
        tensor=tensor,
        offsets=_join([group.offsets for group in groups], width),
        lengths=_join([group.lengths for group in groups], width),
    )
    check_rows(_order_checks(shards), file=file)
    _check_volumes(shards, file)
    return Index(shards, _join([group.blob for group in groups]), _join([group.slot for group in groups]))


def _join(columns: list[IntColumn], *width: int) -> IntColumn:
    return np.concatenate([np.zeros((0, *width), dtype=np.int64), *columns])


def _join_runs(groups: Sequence[IndexRows], file: str) -> tuple[list[Run], IntColumn]:
    """All runs in order, those that go on in the next row group joined, and the tensor of each row with a box."""
    runs: list[Run] = []
    tensor = []
    for group in groups:
        goes_on = bool(runs) and runs[-1].address == group.runs[0].address
        if goes_on and (runs[-1] != group.runs[0] or runs[-1].alias_of is not None):
            raise CheckpointDamaged(f"{file}: expected all rows of {runs[-1].address!r} to agree", file=file)
        tensor.append(group.run + len(runs) - goes_on)
        runs += group.runs[goes_on:]
    # Code points sort as UTF-8 bytes do.
    for before, after in itertools.pairwise(run.address for run in runs):
        if before >= after:
            raise CheckpointDamaged(f"{file}: expected sorted addresses, found {before!r} before {after!r}", file=file)
    return runs, _join(tensor)


def _make_tensors(runs: list[Run], width: int, file: str) -> TensorTable:
    rows = {run.address: row for row, run in enumerate(runs)}
    for run in runs:
        _check_alias(run, runs, rows, file)
    shapes = np.ones((len(runs), width), dtype=np.int64)
    for row, run in enumerate(runs):
        shapes[row, : len(run.shape)] = run.shape
    return TensorTable(
        addresses=tuple(run.address for run in runs),
        dtypes=tuple(run.dtype for run in runs),
        ndims=np.array([len(run.shape) for run in runs], dtype=np.int8),
        shapes=shapes,
        alias_of=np.array([NOT_AN_ALIAS if run.alias_of is None else rows[run.alias_of] for run in runs], dtype=np.int64),
    )


def _check_alias(run: Run, runs: list[Run], rows: dict[str, int], file: str) -> None:
    if run.alias_of is None:
        return
    target = runs[rows[run.alias_of]] if run.alias_of in rows else None
    if target is None or target.alias_of is not None or (target.dtype, target.shape) != (run.dtype, run.shape):
        raise CheckpointDamaged(
            f"{file}: {run.address!r} is an alias of {run.alias_of!r}: expected that to be stored with the same dtype and shape",
            file=file,
        )


def _order_checks(shards: ShardTable) -> Iterator[Check]:
    """Regions of one tensor rise strictly in their offsets, the first dim counting most."""
    before, after = shards.offsets[:-1], shards.offsets[1:]
    equal = shards.tensor[:-1] == shards.tensor[1:]
    rises: BoolColumn = ~equal
    for i in range(shards.offsets.shape[1]):
        rises |= equal & (after[:, i] > before[:, i])
        equal &= after[:, i] == before[:, i]
    yield "regions in the order of their offsets, each once", ~rises


def _check_volumes(shards: ShardTable, file: str) -> None:
    """The regions of each tensor hold as many elements as the tensor (that none overlap is checked when they are read)."""
    if not len(shards):
        return
    starts = np.flatnonzero(np.diff(shards.tensor, prepend=-1))
    tensors = shards.tensor[starts]
    expected = np.prod(shards.tensors.shapes[tensors], axis=1, dtype=np.int64)
    volumes = np.prod(shards.lengths, axis=1, dtype=np.int64)
    # In float first: a sum of many regions could wrap.
    bad = np.add.reduceat(volumes.astype(np.float64), starts) > 1.5 * expected
    bad |= np.add.reduceat(volumes, starts) != expected
    if bad.any():
        address = shards.tensors.addresses[tensors[bad.argmax()]]
        raise CheckpointDamaged(f"{file}: expected the regions of {address!r} to fill it, and no more", file=file)

"""The plan of one rank, and how the coordinator hands it out: by rows of the rank's own table, so that no address is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from anyshard.planning.pack import shard_nbytes
from anyshard.planning.share import measure_rows
from anyshard.records.handles import RangeSource, Source
from anyshard.records.packed import pack_ints, pack_message, read_record, refusal, unpack_ints, unpack_message
from anyshard.records.rank_table import RankTable
from anyshard.records.tables import NOT_AN_ALIAS, BlobPlan, IntColumn, SavePlan, ShardTable, TensorTable, make_tensor_table

_PART = "save plan of a rank"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank writes: row i of the plan is `nbytes[i]` bytes from `start[i]` on of the rank's own shard `local_row[i]`.

    `replica_set` has for each of the rank's own rows the number of its replica set, the same on all ranks, or -1 if nobody else
    holds it. `held` is the rank's own table, row by row, with what the group knows: under which name a tensor is stored, and
    whether it is a buffer on any rank. So ranks that hold the same region call it the same.
    """

    plan: SavePlan
    local_row: IntColumn
    start: IntColumn
    nbytes: IntColumn
    replica_set: IntColumn
    held: RankTable

    def pick_sources(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        """The source of each row of the plan, from those of the rank's own shards."""
        picked = [sources[row] for row in self.local_row.tolist()]
        is_part = (self.plan.shards.lengths != self.held.shards.lengths[self.local_row]).any(axis=1)
        for row in np.flatnonzero(is_part).tolist():
            picked[row] = RangeSource(picked[row], int(self.start[row]), int(self.nbytes[row]))
        return tuple(picked)


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rank: int
    blobs: tuple[tuple[str, int, int], ...]  # section, k, number of rows
    ties: dict[str, str]
    local_row: bytes
    start: bytes
    nbytes: bytes
    replica_set: bytes
    is_buffer: bytes


def encode_rank_plan(part: RankPlan, *, rank: int) -> bytes:
    """The message that hands a plan to its rank."""
    tensors, held = part.held.shards.tensors, part.held.shards
    tied = np.flatnonzero(np.isin(tensors.alias_of, held.tensor) & (tensors.alias_of != NOT_AN_ALIAS))
    order = np.concatenate([np.zeros(0, dtype=np.int64), *(blob.rows for blob in part.plan.blobs)])
    message = _Part(
        rank=rank,
        blobs=tuple((blob.section, blob.k, len(blob.rows)) for blob in part.plan.blobs),
        ties={tensors.addresses[row]: tensors.addresses[tensors.alias_of[row]] for row in tied.tolist()},
        local_row=pack_ints(part.local_row[order]),
        start=pack_ints(part.start[order]),
        nbytes=pack_ints(part.nbytes[order]),
        replica_set=pack_ints(part.replica_set),
        is_buffer=pack_ints(part.held.is_buffer[held.tensor].astype(np.int64)),
    )
    return pack_message(msgspec.msgpack.encode(message))


def decode_rank_plan(message: bytes, own: RankTable) -> RankPlan:
    """The plan in a message, over the table that this rank sent. Raises `UnsupportedFormat` if it cannot be one."""
    part = read_record(unpack_message(message, what=_PART), _Part, what=_PART)
    if any(count < 0 for _, _, count in part.blobs):
        raise refusal(_PART, "blobs of 0 or more rows", str(part.blobs[:8]))
    bounds = np.cumsum([0, *(count for _, _, count in part.blobs)])
    written, held = (part.local_row, part.start, part.nbytes), (part.replica_set, part.is_buffer)
    local_row, start, nbytes = (unpack_ints(column, int(bounds[-1]), what=_PART) for column in written)
    replica_set, is_buffer = (unpack_ints(column, len(own.shards), what=_PART) for column in held)
    if ((local_row < 0) | (local_row >= len(own.shards))).any():
        raise refusal(_PART, f"rows of a table of {len(own.shards)}", "others")
    tensors, new_row = _tie(own.shards.tensors, part.ties)
    shards = cut_rows(own.shards, local_row, start=start, nbytes=nbytes)
    blobs = tuple(
        BlobPlan(section, part.rank, k, np.arange(bounds[i], bounds[i + 1])) for i, (section, k, _) in enumerate(part.blobs)
    )
    plan = SavePlan(ShardTable(tensors, new_row[shards.tensor], shards.offsets, shards.lengths), blobs)
    return RankPlan(
        plan, local_row, start, nbytes, replica_set, _rename(own, tensors, new_row[own.shards.tensor], is_buffer != 0)
    )


def _rename(own: RankTable, tensors: TensorTable, tensor: IntColumn, is_buffer: NDArray[np.bool_]) -> RankTable:
    """A rank's table over the tensors of its group; `tensor` and `is_buffer` are per row."""
    of_tensor = np.zeros(len(tensors), dtype=np.bool_)
    of_tensor[tensor] = is_buffer
    return RankTable(ShardTable(tensors, tensor, own.shards.offsets, own.shards.lengths), own.sections, of_tensor)


def cut_rows(shards: ShardTable, rows: IntColumn, *, start: IntColumn, nbytes: IntColumn) -> ShardTable:
    """The regions that are bytes [start, start + nbytes) of some shards. Raises `UnsupportedFormat` if one is not whole rows."""
    whole = ShardTable(shards.tensors, shards.tensor[rows], shards.offsets[rows], shards.lengths[rows])
    total = shard_nbytes(whole)
    if ((start < 0) | (nbytes <= 0) | (nbytes > total) | (start > total - nbytes)).any():
        raise refusal(_PART, "parts of shards", "parts that lie outside of them")
    geometry = measure_rows(whole)
    if (start % geometry.row_nbytes != 0).any() or (nbytes % geometry.row_nbytes != 0).any():
        raise refusal(_PART, "whole rows of shards", "parts of rows")
    return take_rows(whole, geometry.dim, start=start // geometry.row_nbytes, count=nbytes // geometry.row_nbytes)


def take_rows(shards: ShardTable, dim: IntColumn, *, start: IntColumn, count: IntColumn) -> ShardTable:
    """The regions that are `count` indices from `start` on in `dim` of each shard."""
    offsets, lengths = shards.offsets.copy(), shards.lengths.copy()
    if lengths.shape[1]:
        row = np.arange(len(shards))
        offsets[row, dim] += start
        lengths[row, dim] = count
    return ShardTable(shards.tensors, shards.tensor, offsets, lengths)


def _tie(tensors: TensorTable, ties: Mapping[str, str]) -> tuple[TensorTable, IntColumn]:
    """A rank's tensors with the ties that other ranks see, and for each of its tensors the row of the stored one."""
    own = {
        tensors.addresses[row]: tensors.addresses[tensors.alias_of[row]]
        for row in np.flatnonzero(tensors.alias_of != NOT_AN_ALIAS).tolist()
    }
    joined = {**own, **ties}
    if joined == own:
        return tensors, np.arange(len(tensors))
    spec = {address: (tensors.dtypes[row], tensors.shape(row)) for address, row in tensors.rows.items()}
    for alias, stored in joined.items():
        known = spec.get(alias) or spec.get(stored)
        if known is not None:
            spec.setdefault(stored, known)
    for alias, stored in ties.items():
        if stored not in spec:
            raise refusal(_PART, "ties to tensors of this rank", f"a tie to {stored}")
        spec.setdefault(alias, spec[stored])
    tied = make_tensor_table(tuple(spec), [dtype for dtype, _ in spec.values()], [shape for _, shape in spec.values()], joined)
    return tied, np.array([tied.rows[joined.get(address, address)] for address in tensors.addresses], dtype=np.int64)

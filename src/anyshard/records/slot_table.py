"""The slots of a blob on their way into a tail: Arrow columns that are made once per plan, and packed anew by every save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anyshard.errors import LimitExceeded
from anyshard.records.columns import TEXT, dim_fields
from anyshard.records.digests import CELL_ALGORITHM
from anyshard.records.layout import LARGE_ALIGNMENT, LARGE_NBYTES, SMALL_ALIGNMENT
from anyshard.records.slot_stream import pack_batch
from anyshard.records.strict_json import Json, encode_object
from anyshard.records.tables import IntColumn

# Bounds of the uncompressed slots: before anything is allocated for them.
_RAW_NBYTES_PER_SLOT, _RAW_NBYTES_FIXED, _MAX_RAW_NBYTES = 4096, 256 * 1024, 1 << 30

SLOTS_METADATA = b"anyshard"
SLOT_FIELDS = (
    pa.field("position", pa.int64()),
    pa.field("nbytes", pa.int64()),
    pa.field("stored_nbytes", pa.int64()),
    pa.field("codec", pa.string()),
    pa.field("frame_nbytes", pa.int64()),
    pa.field("frames", pa.list_(pa.uint32())),
    pa.field("address", TEXT),
    pa.field("dtype", TEXT),
    pa.field("ndim", pa.int8()),
    pa.field("content", pa.binary(16)),
    pa.field("encoding", pa.string()),
)


@dataclass(frozen=True, slots=True)
class BlobIdentity:
    """Who wrote a blob and as what; part of the tail's metadata, for recovery and for humans."""

    section: str
    rank: int
    k: int
    generation: int
    attempt: str
    step: int | None
    run_id: str | None
    world_size: int
    writer: str


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """Slots in slot order; `offsets`, `lengths` and `shapes` are padded as in `ShardTable`."""

    position: IntColumn
    nbytes: IntColumn
    addresses: tuple[str, ...]
    dtypes: tuple[str, ...]
    ndims: NDArray[np.int8]
    shapes: IntColumn
    offsets: IntColumn
    lengths: IntColumn


@dataclass(frozen=True, slots=True)
class PackedSlots:
    """The slots as they stand in a tail: one zstd frame, and the length of what is in it."""

    num_slots: int
    data: bytes
    raw_nbytes: int


@final
class SlotTable:
    """The slots of one blob, whoever writes it and when. Thread-safe: nothing of it changes.

    `also` maps stored addresses to the addresses tied to them.
    """

    def __init__(self, columns: SlotColumns, also: Mapping[str, tuple[str, ...]]) -> None:
        self._position = columns.position
        self._nbytes = columns.nbytes
        self._fields = [*SLOT_FIELDS, *dim_fields(columns.shapes.shape[1])]
        self.also = also
        made = _make_arrays(columns)
        num_slots = len(columns.position)
        self._arrays = {field.name: made.get(field.name, pa.nulls(num_slots, field.type)) for field in self._fields}

    def __len__(self) -> int:
        return len(self._position)

    def pack(self, identity: BlobIdentity, *, last: tuple[int, int] | None = None) -> PackedSlots:
        """Encode all slots, the last one with another position and length if `last` names them.

        Raises `LimitExceeded` if the addresses are so long that no reader would take them.
        """
        position, nbytes = self._position, self._nbytes
        if last is not None:
            position, nbytes = _set_last(position, last[0]), _set_last(nbytes, last[1])
        extents = {"position": pa.array(position), "nbytes": pa.array(nbytes), "stored_nbytes": pa.array(nbytes)}
        arrays = self._arrays | extents
        schema = pa.schema(self._fields, {SLOTS_METADATA: encode_object(self._describe(identity))})
        batch = pa.RecordBatch.from_arrays([arrays[field.name] for field in self._fields], schema=schema)
        data, raw_nbytes = pack_batch(batch)
        if raw_nbytes > (limit := max_raw_nbytes(len(self))):
            raise LimitExceeded(f"the slots of a blob take {raw_nbytes} bytes, expected at most {limit}; shorten the addresses")
        return PackedSlots(len(self), data, raw_nbytes)

    def _describe(self, identity: BlobIdentity) -> Json:
        return {
            "section": identity.section,
            "rank": identity.rank,
            "k": identity.k,
            "generation": identity.generation,
            "attempt": identity.attempt,
            "step": identity.step,
            "run_id": identity.run_id,
            "world_size": identity.world_size,
            "writer": identity.writer,
            "byte_order": "little",
            "cell_digest": CELL_ALGORITHM,
            "alignment": {"small": SMALL_ALIGNMENT, "large": LARGE_ALIGNMENT, "large_from": LARGE_NBYTES},
            "also": {address: list(names) for address, names in self.also.items()},
        }


def max_raw_nbytes(num_slots: int) -> int:
    """Upper bound of the length of the uncompressed slots."""
    return min(_RAW_NBYTES_FIXED + _RAW_NBYTES_PER_SLOT * num_slots, _MAX_RAW_NBYTES)


def _make_arrays(columns: SlotColumns) -> dict[str, pa.Array]:
    """All columns with values, but where the extents lie."""
    arrays: dict[str, pa.Array] = {
        "address": pa.array(columns.addresses, pa.string()).dictionary_encode(),
        "dtype": pa.array(columns.dtypes, pa.string()).dictionary_encode(),
        "ndim": pa.array(columns.ndims, pa.int8()),
    }
    for i in range(columns.shapes.shape[1]):
        outside = columns.ndims <= i
        arrays[f"shape_{i}"] = pa.array(columns.shapes[:, i], mask=outside)
        arrays[f"offset_{i}"] = pa.array(columns.offsets[:, i], mask=outside)
        arrays[f"length_{i}"] = pa.array(columns.lengths[:, i], mask=outside)
    return arrays


def _set_last(column: IntColumn, value: int) -> IntColumn:
    changed = column.copy()
    changed[-1] = value
    return changed

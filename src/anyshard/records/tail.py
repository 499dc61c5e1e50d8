"""The tail of a blob: what its slots are, where they lie, the cell digests, the footer. Also the blob's head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anyshard.errors import CheckpointDamaged, UnsupportedFormat
from anyshard.records.columns import (
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
from anyshard.records.digests import CELL_ALGORITHM
from anyshard.records.footer import (
    FOOTER_NBYTES,
    HEAD_NBYTES,
    Footer,
    decode_footer,
    decode_head,
    digest_of,
    encode_footer,
    encode_head,
)
from anyshard.records.layout import LARGE_ALIGNMENT, LARGE_NBYTES, SMALL_ALIGNMENT, align_up
from anyshard.records.names import ATTEMPT, MAX_GENERATION
from anyshard.records.slot_stream import unpack_batch
from anyshard.records.slot_table import (
    SLOT_FIELDS,
    SLOTS_METADATA,
    BlobIdentity,
    PackedSlots,
    SlotColumns,
    SlotTable,
    max_raw_nbytes,
)
from anyshard.records.strict_json import Members, decode_object
from anyshard.records.tables import IntColumn

__all__ = [
    "BLOB_ALIGNMENT",
    "CELL_NBYTES",
    "FOOTER_NBYTES",
    "HEAD_NBYTES",
    "LARGE_ALIGNMENT",
    "LARGE_NBYTES",
    "SMALL_ALIGNMENT",
    "VALUES_DTYPE",
    "BlobIdentity",
    "Tail",
    "decode_head",
    "decode_tail",
    "encode_head",
    "encode_tail",
    "join_tail",
    "max_raw_nbytes",
    "measure_blob",
]

BLOB_ALIGNMENT = 4096
CELL_NBYTES = 256 * 1024
MIN_CELL_NBYTES, MAX_CELL_NBYTES = 64 * 1024, 16 << 20
VALUES_DTYPE = "msgpack"


@dataclass(frozen=True, slots=True)
class Tail:
    """Slots in slot order as columns, and one xxh3-64 per cell of the bytes [0, tail_position).

    `offsets`, `lengths` and `shapes` are padded as in `ShardTable`. The values slot has dtype `VALUES_DTYPE`, ndim 0 and its
    section's name as address. `also` maps stored addresses to the addresses tied to them.
    """

    identity: BlobIdentity
    cell_nbytes: int
    tail_position: int
    position: IntColumn
    nbytes: IntColumn
    addresses: tuple[str, ...]
    dtypes: tuple[str, ...]
    ndims: NDArray[np.int8]
    shapes: IntColumn
    offsets: IntColumn
    lengths: IntColumn
    cell_digests: NDArray[np.uint64]
    also: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.position)


def encode_tail(tail: Tail) -> bytes:
    """All bytes from `tail_position` to the end of the blob; the blob's length becomes a multiple of 4096.

    Raises `LimitExceeded` if the slots' addresses are so long that no reader would take them.
    """
    columns = SlotColumns(**{field.name: getattr(tail, field.name) for field in fields(SlotColumns)})
    slots = SlotTable(columns, tail.also).pack(tail.identity)
    return join_tail(slots, tail.cell_digests, cell_nbytes=tail.cell_nbytes, tail_position=tail.tail_position)


def join_tail(slots: PackedSlots, cell_digests: NDArray[np.uint64], *, cell_nbytes: int, tail_position: int) -> bytes:
    """The tail of slots that are packed already. Its length is known before the digests are: `measure_blob`."""
    body = slots.data + cell_digests.astype("<u8").tobytes()
    blob_nbytes = measure_blob(slots, num_cells=len(cell_digests), tail_position=tail_position)
    body += bytes(blob_nbytes - tail_position - len(body) - FOOTER_NBYTES)
    footer = Footer(
        blob_nbytes=blob_nbytes,
        tail_position=tail_position,
        slots_nbytes=len(slots.data),
        slots_raw_nbytes=slots.raw_nbytes,
        num_slots=slots.num_slots,
        cells_position=tail_position + len(slots.data),
        num_cells=len(cell_digests),
        cell_nbytes=cell_nbytes,
        body_digest=digest_of(body),
    )
    return body + encode_footer(footer)


def measure_blob(slots: PackedSlots, *, num_cells: int, tail_position: int) -> int:
    """Length of the whole blob with its tail."""
    return align_up(tail_position + len(slots.data) + 8 * num_cells + FOOTER_NBYTES, BLOB_ALIGNMENT)


def decode_tail(data: bytes, *, tail_position: int, max_slots: int, file: str) -> Tail:
    """Check footer, sizes and every column of a tail whose digest was already compared; damage names `file`."""
    view = memoryview(data)
    footer = decode_footer(view[-FOOTER_NBYTES:], file=file)
    body = view[: len(view) - FOOTER_NBYTES]
    if fault := next(_footer_faults(footer, body, tail_position, max_slots), None):
        raise CheckpointDamaged(f"{file}: {fault}", file=file)
    schema, batch = unpack_batch(body[: footer.slots_nbytes], footer.slots_raw_nbytes, fields=SLOT_FIELDS, file=file)
    if batch.num_rows != footer.num_slots:
        raise CheckpointDamaged(f"{file}: expected {footer.num_slots} slots, found {batch.num_rows}", file=file)
    metadata = decode_object((schema.metadata or {}).get(SLOTS_METADATA, b""), file=file)
    cells = np.frombuffer(body, "<u8", footer.num_cells, footer.slots_nbytes).astype(np.uint64)
    return _make_tail(footer, metadata, batch, cells)


def _footer_faults(footer: Footer, body: memoryview, tail_position: int, max_slots: int) -> Iterator[str]:
    """What is wrong first with the numbers of a footer: after these checks every position and size is bounded."""
    nbytes = tail_position + len(body) + FOOTER_NBYTES
    if footer.tail_position != tail_position or footer.blob_nbytes != nbytes or nbytes % BLOB_ALIGNMENT:
        yield f"expected a tail from {tail_position} to {nbytes}, found {footer.tail_position} to {footer.blob_nbytes}"
    size = footer.cell_nbytes
    if not MIN_CELL_NBYTES <= size <= MAX_CELL_NBYTES or size & (size - 1):
        yield f"expected cells of a power of two between 64 KiB and 16 MiB, found {size}"
    if footer.num_cells != -(-tail_position // size):
        yield f"expected {-(-tail_position // size)} cell digests, found {footer.num_cells}"
    end = footer.slots_nbytes + 8 * footer.num_cells
    if footer.cells_position != tail_position + footer.slots_nbytes or not 0 <= len(body) - end < BLOB_ALIGNMENT:
        yield f"expected slots, cell digests and zeros in {len(body)} bytes, found {end} bytes of the first two"
    if bytes(body[end:]).strip(b"\0"):
        yield "expected zeros before the footer"
    if not 0 < footer.num_slots <= max_slots:
        yield f"expected 1 to {max_slots} slots, found {footer.num_slots}"
    if footer.slots_raw_nbytes > max_raw_nbytes(footer.num_slots):
        yield f"expected at most {max_raw_nbytes(footer.num_slots)} bytes of slots, found {footer.slots_raw_nbytes}"
    if digest_of(body) != footer.body_digest:
        yield "the digest in the footer does not fit the tail"


def _make_tail(footer: Footer, metadata: Members, batch: pa.RecordBatch, cells: NDArray[np.uint64]) -> Tail:
    file = metadata.file
    columns = {name: batch.column(name) for name in batch.schema.names}
    _check_encodings(columns, file)
    addresses, dtypes = read_texts(columns["address"], file=file), read_texts(columns["dtype"], file=file)
    boxes, nulls = read_boxes(columns, np.ones(len(batch), dtype=np.bool_))
    extents = _Extents(*(read_ints(columns[name])[0] for name in ("position", "nbytes", "stored_nbytes")))
    check_rows(iter([nulls, *_null_checks(columns)]), file=file)
    check_rows(box_checks(boxes, dtypes.itemsizes()), file=file)
    check_rows(_extent_checks(extents, _read_alignment(metadata), footer.tail_position), file=file)
    identity = _read_identity(metadata)
    check_rows(_slot_checks(extents, dtypes, boxes, values_last=identity.k == 0), file=file)
    return Tail(
        identity=identity,
        cell_nbytes=footer.cell_nbytes,
        tail_position=footer.tail_position,
        position=extents.position,
        nbytes=extents.nbytes,
        addresses=tuple(addresses.take()),
        dtypes=tuple(dtypes.take()),
        ndims=boxes.ndims.astype(np.int8),
        shapes=boxes.shapes,
        offsets=boxes.offsets,
        lengths=boxes.lengths,
        cell_digests=cells,
        also=_read_also(metadata),
    )


@dataclass(frozen=True, slots=True)
class _Extents:
    position: IntColumn
    nbytes: IntColumn
    stored_nbytes: IntColumn


@dataclass(frozen=True, slots=True)
class _Alignment:
    small: int
    large: int
    large_from: int


def _check_encodings(columns: Columns, file: str) -> None:
    for name in ("codec", "encoding"):
        if used := columns[name].drop_null().unique().slice(0, 3).to_pylist():
            raise UnsupportedFormat(f"{file}: {name} {', '.join(map(ascii, used))} is unknown to this release; use a later one")


def _null_checks(columns: Columns) -> Iterator[Check]:
    for name in ("position", "nbytes", "stored_nbytes", "address", "dtype", "ndim"):
        yield f"{name}, found null", read_nulls(columns[name])
    for name in ("frame_nbytes", "frames"):
        yield f"no {name} without a codec", ~read_nulls(columns[name])


def _extent_checks(extents: _Extents, alignment: _Alignment, tail_position: int) -> Iterator[Check]:
    """Extents lie between head and tail, one behind the other, aligned."""
    position, nbytes = extents.position, extents.stored_nbytes
    yield "a length that is not negative", (nbytes < 0) | (extents.nbytes < 0)
    yield "stored_nbytes equal to nbytes without a codec", nbytes != extents.nbytes
    yield "an extent between head and tail", (position < HEAD_NBYTES) | (position > tail_position - nbytes)
    ends = np.concatenate([[HEAD_NBYTES], (position + nbytes)[:-1]])
    yield "an extent behind the one before", position < ends
    steps = np.where(nbytes >= alignment.large_from, alignment.large, alignment.small)
    yield "an aligned position", position % steps != 0


def _slot_checks(extents: _Extents, dtypes: Texts, boxes: Boxes, *, values_last: bool) -> Iterator[Check]:
    """Lengths in bytes agree with lengths in elements; the values slot is the last of blob 0 and only there."""
    values = dtypes.codes == (dtypes.names.index(VALUES_DTYPE) if VALUES_DTYPE in dtypes.names else -1)
    expected = np.zeros(len(values), dtype=np.bool_)
    expected[-1] = values_last
    yield f"dtype {VALUES_DTYPE} in the last slot of blob 0 and nowhere else", values != expected
    yield "ndim 0 in the values slot", values & (boxes.ndims != 0)
    volumes, itemsizes = boxes.volumes(), dtypes.itemsizes()
    yield "at least one element", ~values & (volumes == 0)
    yield "nbytes equal to elements x bytes of each", (itemsizes != 0) & (extents.nbytes != volumes * itemsizes)


def _read_alignment(metadata: Members) -> _Alignment:
    if metadata.text("byte_order") != "little" or metadata.text("cell_digest") != CELL_ALGORITHM:
        raise UnsupportedFormat(
            f"{metadata.file}: expected byte order little and cell digest {CELL_ALGORITHM}; use a later release"
        )
    alignment = metadata.object("alignment")
    small, large, large_from = (alignment.integer(name, minimum=1) for name in ("small", "large", "large_from"))
    return _Alignment(small, large, large_from)


def _read_identity(metadata: Members) -> BlobIdentity:
    if not ATTEMPT.fullmatch(attempt := metadata.text("attempt")):
        metadata.fail("attempt", "13 characters of a-z and 2-7")
    return BlobIdentity(
        section=metadata.text("section"),
        rank=metadata.integer("rank"),
        k=metadata.integer("k"),
        generation=metadata.integer("generation", minimum=1, maximum=MAX_GENERATION),
        attempt=attempt,
        step=metadata.optional_integer("step"),
        run_id=metadata.optional_text("run_id"),
        world_size=metadata.integer("world_size", minimum=1),
        writer=metadata.text("writer"),
    )


def _read_also(metadata: Members) -> dict[str, tuple[str, ...]]:
    also = metadata.object("also")
    return {address: also.texts(address) for address in also.values}

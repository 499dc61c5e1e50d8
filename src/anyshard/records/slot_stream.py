"""The slots of a tail as bytes: one Arrow IPC stream with one batch, its bodies uncompressed, in one zstd frame.

A stream from a stranger can name sizes that it does not have. Sizes are bounded before anything is allocated, and the
batch is validated in full before any value of it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa
import zstandard

from anyshard.errors import CheckpointDamaged
from anyshard.records.columns import check_schema

ZSTD_LEVEL = 3
_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER = 1, 2  # positions of members in the flatbuffers of the Arrow format
_DICTIONARY_BATCH_DATA, _RECORD_BATCH_COMPRESSION = 1, 3
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


def pack_batch(batch: pa.RecordBatch) -> tuple[bytes, int]:
    """The zstd frame that holds a batch as an IPC stream, and the length of the stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    raw = sink.getvalue()
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw), raw.size


def unpack_batch(
    frame: memoryview, raw_nbytes: int, *, fields: Sequence[pa.Field], file: str
) -> tuple[pa.Schema, pa.RecordBatch]:
    """The schema and the one batch of a packed stream, cut to the columns that are known and validated in full."""
    try:
        raw = pa.py_buffer(_decompress(frame, raw_nbytes))
        _check_messages(raw)
        return _read_batch(raw, fields, file)
    except (pa.ArrowException, zstandard.ZstdError, struct.error, ValueError, TypeError, OSError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"{file}: expected a table of slots, found damage: {error}", file=file) from None


def _decompress(frame: memoryview, raw_nbytes: int) -> bytes:
    # The decompressor allocates what the frame's own header says, so that has to be the bounded length of the footer.
    if (declared := zstandard.frame_content_size(frame)) != raw_nbytes:
        raise ValueError(f"a zstd frame of {declared} bytes instead of {raw_nbytes}")
    raw: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    if len(raw) != raw_nbytes:
        raise ValueError(f"{len(raw)} bytes in a zstd frame of {raw_nbytes}")
    return raw


def _check_messages(raw: pa.Buffer) -> None:
    """One schema, then dictionaries, then one batch; no body compressed (it could unfold to any size)."""
    reader = pa.ipc.MessageReader.open_stream(raw)
    types = []
    for message in reader:
        types.append(message.type)
        if _is_compressed(bytes(message.metadata)):
            raise ValueError("a compressed body")
    if types[:1] != ["schema"] or types[-1:] != ["record batch"] or set(types[1:-1]) - {"dictionary"}:
        raise ValueError(f"messages {types[:8]} instead of one schema, dictionaries and one batch")


def _is_compressed(metadata: bytes) -> bool:
    """Whether the flatbuffer of an IPC message says that its body is compressed."""
    message = _follow(metadata, 0)
    kind = _member(metadata, message, _MESSAGE_HEADER_TYPE)
    header = _member(metadata, message, _MESSAGE_HEADER)
    if kind is None or header is None or metadata[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return False
    batch = _follow(metadata, header)
    if metadata[kind] == _DICTIONARY_BATCH:
        data = _member(metadata, batch, _DICTIONARY_BATCH_DATA)
        if data is None:
            return False
        batch = _follow(metadata, data)
    return _member(metadata, batch, _RECORD_BATCH_COMPRESSION) is not None


def _follow(data: bytes, position: int) -> int:
    offset: int = struct.unpack_from("<I", data, position)[0]
    return position + offset


def _member(data: bytes, table: int, number: int) -> int | None:
    """Position of a member of a flatbuffer table, or None if the table lacks it."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    (vtable_nbytes,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number >= vtable_nbytes:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else None


def _read_batch(raw: pa.Buffer, fields: Sequence[pa.Field], file: str) -> tuple[pa.Schema, pa.RecordBatch]:
    schema = pa.ipc.open_stream(raw).schema
    names = check_schema(schema, fields, file=file)
    positions = sorted(schema.get_field_index(name) for name in names)
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=positions)
    batch = pa.ipc.open_stream(raw, options=options).read_next_batch()
    batch.validate(full=True)
    return schema, batch

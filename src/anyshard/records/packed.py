"""Packed messages: columns and small records as few bytes, for what ranks send each other. Never stored in a checkpoint.

A message is one MessagePack value in one zstd frame; an integer column in it is its narrowest little-endian form after one byte
that says how many bytes a number takes. The sender may be of another release, or its bytes damaged: sizes are bounded before
anything is allocated, and types are checked.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import zstandard

from anyshard.errors import LimitExceeded, UnsupportedFormat
from anyshard.records.tables import IntColumn

MAX_MESSAGE_NBYTES = 1 << 30
_ZSTD_LEVEL = 3
_ITEMSIZES = (1, 2, 4, 8)

T = TypeVar("T")


def pack_ints(column: IntColumn) -> bytes:
    """An integer column as bytes, of the narrowest type that holds all of it. Two dims are packed column by column."""
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    itemsize = next(size for size in _ITEMSIZES if -(1 << (8 * size - 1)) <= low and high < 1 << (8 * size - 1))
    return bytes([itemsize]) + np.ascontiguousarray(column.T.astype(f"<i{itemsize}", copy=False)).tobytes()


def unpack_ints(data: bytes, count: int, *, what: str) -> IntColumn:
    """The `count` integers of a packed column. Raises `UnsupportedFormat` naming `what` unless they are exactly that many."""
    itemsize = data[0] if data else 0
    if itemsize not in _ITEMSIZES or len(data) - 1 != count * itemsize:
        raise refusal(what, f"{count} numbers", f"{len(data)} bytes of {itemsize} each")
    column: IntColumn = np.frombuffer(data, dtype=f"<i{itemsize}", offset=1).astype(np.int64)
    return column


def pack_message(raw: bytes) -> bytes:
    """One zstd frame."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)


def unpack_message(frame: bytes, *, what: str) -> bytes:
    """What one zstd frame holds. Raises `UnsupportedFormat` for damage, `LimitExceeded` for what is too long."""
    try:
        if (declared := zstandard.frame_content_size(frame)) > MAX_MESSAGE_NBYTES:
            raise LimitExceeded(f"{what}: expected at most {MAX_MESSAGE_NBYTES} bytes, found {declared}")
        # An unknown size is -1: then the frame would unfold to any size.
        if declared < 0:
            raise refusal(what, "a zstd frame that says how long it is", "one that does not")
        raw = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise refusal(what, "a whole zstd frame", str(error)) from None
    return raw


def read_record(raw: bytes, kind: type[T], *, what: str) -> T:
    """The MessagePack record `kind` (a `msgspec.Struct`) in `raw`, its types checked. Raises `UnsupportedFormat` for another."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refusal(what, f"a record {kind.__name__.strip('_')}", str(error)) from None


def refusal(what: str, expected: str, found: str) -> UnsupportedFormat:
    """The error for a message that is not what this release sends."""
    hint = "all ranks must run the same release of anyshard"
    return UnsupportedFormat(f"{what}: expected {expected}, found {found}; {hint}")

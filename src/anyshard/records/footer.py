"""The two ends of a blob that are plain structs: its head (64 bytes) and the footer of its tail (128 bytes)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from anyshard.errors import CheckpointDamaged, UnsupportedFormat
from anyshard.records.digests import Bytes
from anyshard.records.names import ATTEMPT

HEAD_NBYTES = 64
FOOTER_NBYTES = 128

# As in PNG: a byte that is no text, a name, a line feed that a text-mode copy would change.
HEAD_MAGIC = b"\x89ANYSHB\n"
FOOTER_MAGIC = b"\x89ANYSHF\n"
BLOB_VERSION = 1

_HEAD = struct.Struct("<8sII16s32x")
_FOOTER = struct.Struct("<8sII8Q16x16s")
_DIGEST_NBYTES = 16


def encode_head(attempt: str) -> bytes:
    """The first 64 bytes of a blob."""
    return _HEAD.pack(HEAD_MAGIC, BLOB_VERSION, HEAD_NBYTES, attempt.encode("ascii"))


def decode_head(data: Bytes, *, file: str) -> str:
    """The attempt that the first 64 bytes of a blob name; anything else is damage of `file`."""
    if len(data) < HEAD_NBYTES:
        raise CheckpointDamaged(f"{file}: expected a head of {HEAD_NBYTES} bytes, found {len(data)}", file=file)
    magic, version, nbytes, attempt = _HEAD.unpack_from(data)
    _check_magic(magic, HEAD_MAGIC, version, file=file)
    text = attempt.rstrip(b"\0").decode("ascii", "replace")
    if nbytes != HEAD_NBYTES or not ATTEMPT.fullmatch(text):
        raise CheckpointDamaged(f"{file}: expected an attempt in the head, found {text!r}", file=file)
    return str(text)


@dataclass(frozen=True, slots=True)
class Footer:
    """The last 128 bytes of a blob: where in it everything of the tail lies."""

    blob_nbytes: int
    tail_position: int
    slots_nbytes: int
    slots_raw_nbytes: int
    num_slots: int
    cells_position: int
    num_cells: int
    cell_nbytes: int
    body_digest: bytes


def encode_footer(footer: Footer) -> bytes:
    """The 128 bytes of a footer, the last 16 of them the digest of those before."""
    data = _FOOTER.pack(
        FOOTER_MAGIC,
        BLOB_VERSION,
        FOOTER_NBYTES,
        footer.blob_nbytes,
        footer.tail_position,
        footer.slots_nbytes,
        footer.slots_raw_nbytes,
        footer.num_slots,
        footer.cells_position,
        footer.num_cells,
        footer.cell_nbytes,
        footer.body_digest,
    )
    return data + digest_of(data)


def decode_footer(data: Bytes, *, file: str) -> Footer:
    """Check magic, version and digest of a footer; what its numbers mean is checked by the tail."""
    if len(data) != FOOTER_NBYTES:
        raise CheckpointDamaged(f"{file}: expected a footer of {FOOTER_NBYTES} bytes, found {len(data)}", file=file)
    view = memoryview(data)
    magic, version, nbytes, *members = _FOOTER.unpack_from(view)
    _check_magic(magic, FOOTER_MAGIC, version, file=file)
    if nbytes != FOOTER_NBYTES or digest_of(view[:-_DIGEST_NBYTES]) != view[-_DIGEST_NBYTES:]:
        raise CheckpointDamaged(f"{file}: the digest of the footer does not fit; the blob is damaged", file=file)
    return Footer(*members)


def digest_of(data: Bytes) -> bytes:
    """The xxh3-128 of `data` in its canonical form: 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(data)


def _check_magic(found: bytes, expected: bytes, version: int, *, file: str) -> None:
    if found != expected:
        raise CheckpointDamaged(f"{file}: expected {expected!r}, found {found!r}; this is no blob, or it is cut", file=file)
    if version > BLOB_VERSION:
        raise UnsupportedFormat(f"{file}: blob version {version}; this release reads version {BLOB_VERSION}, use a later one")

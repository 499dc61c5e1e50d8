"""Digests of what several ranks hold alike, and how they travel. Never stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from anyshard.records.packed import pack_message, read_record, refusal, unpack_message

DIGEST_NBYTES: Final = 8
BUFFER_DIGEST_NBYTES: Final = 4
_SETS, _ROWS = "digests of replica sets", "digests of replicas"


@dataclass(frozen=True, slots=True)
class SetDigest:
    """What one rank holds of a replica set: a digest of all tensors together, and one of each module's buffer.

    `main` is empty if the set has buffers only. Buffers may differ between ranks, so they are digested apart.
    """

    main: bytes
    buffers: tuple[bytes, ...] = ()


# For each replica set the digest of each address in it. A tensor that is cut is in several sets.
RowDigests: TypeAlias = Mapping[int, Mapping[str, bytes]]


def encode_set_digests(digests: Mapping[int, SetDigest]) -> bytes:
    """The message with one rank's digests of its replica sets."""
    return msgspec.msgpack.encode({number: (digest.main, b"".join(digest.buffers)) for number, digest in digests.items()})


def decode_set_digests(message: bytes) -> dict[int, SetDigest]:
    """The digests in a message. Raises `UnsupportedFormat` if it has none of ours."""
    record = read_record(message, dict[int, tuple[bytes, bytes]], what=_SETS)
    for main, buffers in record.values():
        if len(main) not in (0, DIGEST_NBYTES) or len(buffers) % BUFFER_DIGEST_NBYTES:
            found = f"{len(main)} and {len(buffers)}"
            raise refusal(_SETS, f"{DIGEST_NBYTES} bytes or none, and a multiple of {BUFFER_DIGEST_NBYTES}", found)
    return {number: SetDigest(main, _cut(buffers)) for number, (main, buffers) in record.items()}


def _cut(buffers: bytes) -> tuple[bytes, ...]:
    starts = range(0, len(buffers), BUFFER_DIGEST_NBYTES)
    return tuple(buffers[start : start + BUFFER_DIGEST_NBYTES] for start in starts)


def encode_row_digests(digests: RowDigests) -> bytes:
    """The message with one rank's digests of single addresses."""
    return pack_message(msgspec.msgpack.encode(digests))


def decode_row_digests(message: bytes) -> dict[int, dict[str, bytes]]:
    """The digests in a message. Raises `UnsupportedFormat` if it has none of ours."""
    record = read_record(unpack_message(message, what=_ROWS), dict[int, dict[str, bytes]], what=_ROWS)
    for digests in record.values():
        if any(len(digest) != DIGEST_NBYTES for digest in digests.values()):
            raise refusal(_ROWS, f"{DIGEST_NBYTES} bytes each", "others")
    return record

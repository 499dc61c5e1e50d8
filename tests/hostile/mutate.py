"""Random damage to bytes, as bit rot, bad tools and attackers do it; and signatures put right again afterwards."""

from __future__ import annotations

import dataclasses
import struct
from random import Random

import zstandard

from anyshard.records.digests import digest_bytes
from anyshard.records.footer import FOOTER_NBYTES, Footer, decode_footer, digest_of, encode_footer

NUMBERS = (0, 1, 2, 3, 7, 64, 127, 128, 255, 256, 4095, 4096, 65_535, 65_536, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 32)
NUMBERS += (1 << 40, 1 << 61, 1 << 62, (1 << 62) - 1, 1 << 63, (1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 4096)


def pick_number(random: Random) -> int:
    """A number that programs get wrong, or any other."""
    number = random.choice(NUMBERS) if random.random() < 0.8 else random.getrandbits(random.randrange(1, 65))
    return (number + random.choice((-1, 0, 0, 0, 1))) % (1 << 64)


def mutate(data: bytes, random: Random) -> bytes:
    """One to four random changes of `data`."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice((_flip, _flip, _set_integer, _set_integer, _set_integer, _cut, _splice, _repeat, _insert))(
            data, random
        )
    return data


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\xff"
    position = random.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << random.randrange(8)]) + data[position + 1 :]


def _set_integer(data: bytes, random: Random) -> bytes:
    nbytes = random.choice((1, 2, 4, 4, 8, 8))
    value = (pick_number(random) % (1 << 8 * nbytes)).to_bytes(nbytes, random.choice(("little", "little", "big")))
    position = random.randrange(len(data) + 1)
    if random.random() < 0.7:
        position -= position % nbytes
    return data[:position] + value + data[position + nbytes :]


def _cut(data: bytes, random: Random) -> bytes:
    start, stop = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    return random.choice((data[:stop], data[start:], data[:start] + data[stop:]))


def _splice(data: bytes, random: Random) -> bytes:
    nbytes = random.randrange(1, 64)
    source, target = random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    return data[:target] + data[source : source + nbytes] + data[target + nbytes :]


def _repeat(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data) + 1)
    stop = min(start + random.randrange(1, 256), len(data))
    return data[:stop] + data[start:stop] * random.randrange(1, 20) + data[stop:]


def _insert(data: bytes, random: Random) -> bytes:
    position = random.randrange(len(data) + 1)
    return data[:position] + random.randbytes(random.randrange(1, 16)) + data[position:]


def sign_manifest(body: bytes) -> bytes:
    """A manifest with a right digest line."""
    body += b"\n"
    return body + digest_bytes(body).encode() + b"\n"


@dataclasses.dataclass(frozen=True, slots=True)
class TailParts:
    """A tail taken apart, so that each part can be damaged and the rest put right."""

    position: int
    raw: bytes
    cells: bytes
    footer: Footer


def take_apart(tail: bytes, position: int) -> TailParts:
    """The parts of a whole tail."""
    footer = decode_footer(tail[-FOOTER_NBYTES:], file="sample")
    raw = zstandard.ZstdDecompressor().decompress(tail[: footer.slots_nbytes])
    return TailParts(position, raw, tail[footer.slots_nbytes : footer.slots_nbytes + 8 * footer.num_cells], footer)


def sign_tail(parts: TailParts, frame: bytes, raw_nbytes: int, **lies: int) -> bytes:
    """A tail around any frame of slots, with right digests and lengths, but for the footer's members in `lies`."""
    body = frame + parts.cells
    body += bytes(-(parts.position + len(body) + FOOTER_NBYTES) % 4096)
    right = dataclasses.replace(
        parts.footer,
        blob_nbytes=parts.position + len(body) + FOOTER_NBYTES,
        slots_nbytes=len(frame),
        slots_raw_nbytes=raw_nbytes,
        cells_position=parts.position + len(frame),
        body_digest=digest_of(body),
    )
    return body + encode_footer(dataclasses.replace(right, **lies))


def sign_footer(footer: bytes) -> bytes:
    """A footer of damaged bytes with a right digest."""
    head = footer[: FOOTER_NBYTES - 16].ljust(FOOTER_NBYTES - 16, b"\0")
    return head + digest_of(head)


def pack_number(number: int) -> bytes:
    """A number as it stands in a footer."""
    return struct.pack("<Q", number)

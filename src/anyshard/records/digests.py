"""Digests: which bytes they cover is said by the format page; here is how they are made, written and compared.

All are XXH3 with seed 0. They find damage, not malice. Written out, a digest is its algorithm's name, a colon and the
canonical (big-endian) lower-case hex; cell digests are 64-bit integers.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from anyshard.errors import CheckpointDamaged

ALGORITHM = "xxh3-128"
CELL_ALGORITHM = "xxh3-64"
DIGEST = re.compile(r"xxh3-128:[0-9a-f]{32}")

Bytes: TypeAlias = bytes | bytearray | memoryview


def digest_bytes(data: Bytes) -> str:
    """The written-out digest of `data`: `xxh3-128:` and 32 hex digits. Copies nothing."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def is_digest(text: str) -> bool:
    """Whether `text` is a written-out digest that this release can compare, to the letter."""
    return DIGEST.fullmatch(text) is not None


def check_digest(data: Bytes, expected: str, *, file: str) -> None:
    """Raise `CheckpointDamaged` unless `data` has the digest `expected`."""
    if (found := digest_bytes(data)) != expected:
        raise CheckpointDamaged(
            f"{file}: expected digest {expected} over {len(data)} bytes, found {found}; the file is damaged, use another copy",
            file=file,
        )


def cell_digests(buffer: Bytes, cell_nbytes: int) -> NDArray[np.uint64]:
    """One xxh3-64 per cell of `buffer`, which starts on a cell border; the last cell may be short. Copies nothing."""
    view = memoryview(buffer).cast("B")
    digest = xxhash.xxh3_64_intdigest
    cells = [digest(view[start : start + cell_nbytes]) for start in range(0, len(view), cell_nbytes)]
    return np.array(cells, dtype=np.uint64)

"""Reading an index as its manifest names it: its length is bounded before anything is read, and its digest compared."""

from __future__ import annotations

from anyshard.errors import CheckpointDamaged
from anyshard.records.digests import check_digest
from anyshard.records.manifest import Manifest
from anyshard.storage.protocol import Store

# Bounds of the index's file: its pages (see records/index.py), even if they did not compress, and its footer.
_NBYTES_FIXED, _NBYTES_PER_ROW = 8 << 20, 4096 + 256


def read_index(store: Store, manifest: Manifest) -> bytes:
    """The index of a checkpoint that is not in parts; damage names its file.

    Raises `BlobNotFound` or `LimitExceeded` if it is not there, or longer than its manifest says.
    """
    entry = manifest.index
    if entry is None:
        raise CheckpointDamaged(f"{store.url}: its manifest names no index", file=store.url)
    limit = _NBYTES_FIXED + _NBYTES_PER_ROW * manifest.num_rows
    if entry.nbytes > limit:  # the file's own length is no bound: a sparse file has any, for nothing
        raise CheckpointDamaged(
            f"{store.url}: {entry.name}: expected an index of at most {limit} bytes, found {entry.nbytes}; "
            "load another checkpoint",
            file=entry.name,
        )
    data = store.read(entry.name, max_nbytes=entry.nbytes)
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(
            f"{store.url}: {entry.name}: expected {entry.nbytes} bytes, found {len(data)}. Copy it again from where it was whole",
            file=entry.name,
        )
    check_digest(data, entry.digest, file=entry.name)
    return data

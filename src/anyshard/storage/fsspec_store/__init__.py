"""Every store that fsspec knows: the edge for what has no backend of its own. It needs the package fsspec."""

from __future__ import annotations

from anyshard.storage.fsspec_store.opening import open_fsspec_store
from anyshard.storage.fsspec_store.s3fs_options import to_s3fs_options
from anyshard.storage.fsspec_store.store import FsspecStore

__all__ = ["FsspecStore", "open_fsspec_store", "to_s3fs_options"]

"""What errors of a local store say."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from anyshard.errors import StorageError, StorageFull
from anyshard.monitor.events import SILENT
from anyshard.storage.local import LocalStore
from anyshard.storage.posix.site import Site


def fail_with(code: int, site: Site) -> None:
    with site.translated("create", needed=846):
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize(("inodes", "expected"), [(0, "all 100 inodes are used up"), (1, "needed 846 bytes, free 40960 bytes")])
def test_a_full_disk_says_what_it_lacks(inodes: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inodes are used up, free bytes would mislead."""
    status = os.statvfs_result((4096, 4096, 1000, 10, 10, 100, inodes, inodes, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    with pytest.raises(StorageFull, match=expected):
        fail_with(errno.ENOSPC, Site(str(tmp_path), "data/x", SILENT))


def test_a_filesystem_that_counts_no_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some filesystems (btrfs) report no inodes at all: then bytes are what is full."""
    status = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    with pytest.raises(StorageFull, match="free 0 bytes"):
        fail_with(errno.ENOSPC, Site(str(tmp_path), "data/x", SILENT))


@pytest.mark.parametrize("verb", ["read", "open_blob", "delete"])
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_to_be_moved_away(kind: str, verb: str, tmp_path: Path) -> None:
    """A directory or pipe under a key is named as what it is, with what to do."""
    Path.mkdir(tmp_path / "key") if kind == "directory" else os.mkfifo(tmp_path / "key")
    store = LocalStore(tmp_path)
    calls = {"read": lambda: store.read("key", max_nbytes=1), "open_blob": lambda: store.open_blob("key")}
    with pytest.raises(StorageError, match=rf"key: is a .*{kind}.*not a regular file.*move it away"):
        calls.get(verb, lambda: store.delete(["key"]))()


def test_a_directory_that_was_removed_while_empty_is_made_again(tmp_path: Path) -> None:
    """A save whose directory a clean removed before its first blob goes on."""
    store = LocalStore(tmp_path)
    store.prepare(["data/", "data/a/"])
    store.delete(["data/a/", "data/"])
    with store.create_blob("data/a/x", nbytes=3) as writer:
        writer.write_at(0, memoryview(b"abc"))
        writer.finish()
    assert b"abc" == store.read("data/a/x", max_nbytes=3)

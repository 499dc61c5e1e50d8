"""How the local store creates a file if it is absent: the order of the primitives, and what each kind of failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from anyshard.errors import BlobExists, StorageDenied, StorageError, StorageFull
from anyshard.storage.local import LocalStore
from anyshard.storage.posix import syscalls
from anyshard.storage.posix.new_file import NewFile
from anyshard.storage.posix.publish import PRIMITIVES, Primitive, by_exclusive_open, by_link, by_rename
from anyshard.testing.store_fixtures import keys_below


def refusing(code: int) -> Primitive:
    """A primitive of a filesystem that answers with this errno."""

    def refuse(_temporary: NewFile, _name: str, _data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def by_rename_with_a_lost_answer(temporary: NewFile, name: str, data: bytes) -> None:
    """The server did it, and the client never hears of it."""
    by_rename(temporary, name, data)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP])
@pytest.mark.parametrize("last", PRIMITIVES)
def test_unsupported_primitives_are_passed_over(quick_path: Path, code: int, last: Primitive) -> None:
    """A primitive that the filesystem lacks is followed by the next one, with the same result."""
    store = LocalStore(quick_path, primitives=(refusing(code), refusing(code), last))
    store.create("a", b"first", token="t1")
    with pytest.raises(BlobExists):
        store.create("a", b"second", token="t2")
    assert (b"first", ("a",)) == (store.read("a", max_nbytes=9), keys_below(store, ""))


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EIO, StorageError), (errno.ENOSPC, StorageFull), (errno.EACCES, StorageDenied)]
)
def test_other_errors_are_not_passed_over(quick_path: Path, code: int, kind: type[StorageError]) -> None:
    """A primitive that failed for another reason may have done its work: no other one is tried, no temporary name stays."""
    store = LocalStore(quick_path, primitives=(refusing(code), by_link))
    with pytest.raises(kind) as caught:
        store.create("a", b"content", token="t")
    assert (code, ()) == (caught.value.errno, keys_below(store, ""))


def test_no_primitive_at_all_is_an_error(quick_path: Path) -> None:
    """A filesystem without any primitive is a `StorageError`, and nothing stays."""
    store = LocalStore(quick_path, primitives=(refusing(errno.ENOSYS),))
    with pytest.raises(StorageError):
        store.create("a", b"content", token="t")
    assert keys_below(store, "") == ()


def test_lost_answer_leaves_the_blob(quick_path: Path) -> None:
    """After an error whose work was done the blob is there whole: the caller reads it back (B5)."""
    store = LocalStore(quick_path, primitives=(by_rename_with_a_lost_answer,))
    with pytest.raises(StorageError):
        store.create("a", b"content", token="t")
    assert (b"content", ("a",)) == (store.read("a", max_nbytes=7), keys_below(store, ""))


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_failed_sync_of_the_content_creates_nothing(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch, primitive: Primitive
) -> None:
    """Content that could not be made durable gets no name."""
    store = LocalStore(quick_path, primitives=(primitive,))
    monkeypatch.setattr(os, "fsync", lambda _descriptor: refusing(errno.EIO)(None, "", b""))  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        store.create("a", b"content", token="t")
    assert keys_below(store, "") == ()


def test_half_written_exclusive_file_is_removed(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last primitive removes its file if the content does not fit."""
    store = LocalStore(quick_path, primitives=(by_exclusive_open,))
    write_all = NewFile.write_all

    def write_temporary_only(file: NewFile, data: bytes) -> None:
        write_all(file, data[: len(data) // 2])
        if not file.name.endswith(".tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NewFile, "write_all", write_temporary_only)
    with pytest.raises(StorageFull):
        store.create("a", b"content", token="t")
    assert keys_below(store, "") == ()


def test_stranger_under_the_temporary_name_is_kept(quick_path: Path) -> None:
    """A file that has the temporary name already is an error but no `BlobExists`, and is not touched."""
    (quick_path / "a.t.tmp").write_bytes(b"stranger")
    with pytest.raises(StorageError, match="fresh token") as caught:
        LocalStore(quick_path).create("a", b"content", token="t")
    assert (False, b"stranger") == (isinstance(caught.value, BlobExists), (quick_path / "a.t.tmp").read_bytes())


def test_missing_renameat2_is_unsupported(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library without renameat2 counts as a filesystem without it."""
    monkeypatch.setattr(syscalls, "_libc", object)
    store = LocalStore(quick_path)
    store.create("a", b"content", token="t")
    assert store.read("a", max_nbytes=7) == b"content"
    with pytest.raises(StorageError):
        LocalStore(quick_path, primitives=(by_rename,)).create("b", b"content", token="t")

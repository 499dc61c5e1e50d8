"""Backends of fsspec that can do little: what the store makes of them."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

import anyshard
from anyshard.errors import BlobExists, StorageError, StorageFull, StorageUnguarded
from anyshard.storage.fsspec_store import FsspecStore, open_fsspec_store
from anyshard.testing.store_fixtures import keys_below, pattern, write_blob
from tests.storage.fsspec_scenes import LONG_NBYTES, model_state, same


class PlainFile(io.RawIOBase):
    """A stream as of a client for files on a server: no descriptor, nothing to discard, and it may write less than asked."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self.inner.write(data[:1_000_000]))

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        self.inner.close()
        super().close()


class PlainFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Files on a disk through the least that a filesystem class of fsspec has, as it is with those for SFTP, SMB or HDFS."""

    protocol = "plain"
    full = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.disk = LocalFileSystem()

    def info(self, path: str) -> dict[str, Any]:
        found = self.disk.info(path)
        return {name: found[name] for name in ("name", "size", "type", "mtime")}

    def ls(self, path: str, detail: bool = True) -> list[Any]:
        return [self.info(name) if detail else name for name in self.disk.ls(path, detail=False)]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.disk.makedirs(path, exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        self.disk.rm_file(path)

    def mv(self, path1: str, path2: str) -> None:
        if self.disk.exists(path2):
            raise OSError(errno.EIO, "the server refused")
        self.disk.mv(path1, path2)

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> Any:
        if self.full and mode == "wb":
            raise OSError(errno.ENOSPC, "no space")
        return PlainFile(self.disk.open(path, mode)) if mode == "wb" else self.disk.open(path, mode)


@pytest.fixture
def plain(quick_path: Path) -> Iterator[FsspecStore]:
    """A store on `PlainFileSystem`."""
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)
    store = open_fsspec_store(f"plain://{quick_path}/run/step_1", {})
    store.prepare(("data/",))
    yield store
    PlainFileSystem.full = False


def test_backend_that_looks_and_writes_is_unguarded(plain: FsspecStore) -> None:
    """A class with fsspec's own way to create is known not to refuse a taken key, and says so instead of pretending."""
    assert plain.capabilities.guarded is False
    with pytest.raises(StorageUnguarded):
        plain.create("a", b"x", token="t")


def test_save_and_load_on_a_plain_backend(plain: FsspecStore) -> None:
    """Streams without a descriptor are enough for a save (B010); overwriting is refused, deleting is not."""
    state, found = model_state(1), model_state(2)
    report = anyshard.save(plain, state)
    anyshard.load(plain, found)
    assert same(state, found)
    assert report.nbytes > 0
    with pytest.raises(StorageUnguarded):
        anyshard.save(plain, state, overwrite=True)
    anyshard.ops.delete(plain)
    with pytest.raises(anyshard.CheckpointNotFound):
        anyshard.load(plain, found)


def test_put_on_a_plain_backend(plain: FsspecStore) -> None:
    """`put` moves a whole file into place, also where a move never replaces one, and leaves no temporary name."""
    for data in (b"first", b"second"):
        plain.put("a", data, token="t")
        assert plain.read("a", max_nbytes=10) == data
    assert keys_below(plain, "") == ("a",)


def test_blobs_on_a_plain_backend(plain: FsspecStore) -> None:
    """Short and long blobs are written whole, one that is given up is removed, and a taken key is kept."""
    for key, nbytes in (("data/a", 1000), ("data/b", LONG_NBYTES)):
        write_blob(plain, key, pattern(nbytes))
        assert pattern(nbytes) == plain.read(key, max_nbytes=nbytes)
        with pytest.raises(BlobExists):
            write_blob(plain, key, b"other")
    with plain.create_blob("data/c", nbytes=2 * LONG_NBYTES) as writer:
        writer.write_at(0, memoryview(pattern(LONG_NBYTES)))
    assert keys_below(plain, "data/") == ("data/a", "data/b")


def test_directories_stay_on_a_plain_backend(plain: FsspecStore) -> None:
    """Where removing a directory may take its content along, none is ever removed."""
    plain.delete(("data/",))
    assert plain.list("").prefixes == ("data/",)


def test_full_backend(plain: FsspecStore) -> None:
    """No space left is `StorageFull`."""
    PlainFileSystem.full = True
    with pytest.raises(StorageFull):
        write_blob(plain, "data/a", b"x")


class PickyFileSystem(PlainFileSystem):
    """Has a way of its own to write a whole blob, which refuses what it is given."""

    protocol = "picky"
    error: Exception = OSError()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_options: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("pipe_file() got an unexpected keyword argument 'mode'"), StorageUnguarded),
        (ValueError("only mode=overwrite is supported"), StorageUnguarded),
        (NotImplementedError(), StorageUnguarded),
        (TypeError("a bytes-like object is required, not 'NoneType'"), StorageError),
        (ValueError("signature version unknown"), StorageError),
    ],
)
def test_only_a_refused_condition_is_unguarded(
    monkeypatch: pytest.MonkeyPatch, quick_path: Path, error: Exception, kind: type[StorageError]
) -> None:
    """A wrong argument of another kind says nothing about the store, and is an error of its own."""
    fsspec.register_implementation("picky", PickyFileSystem, clobber=True)
    monkeypatch.setattr(PickyFileSystem, "error", error)
    with pytest.raises(StorageError) as caught:
        open_fsspec_store(f"picky://{quick_path}", {}).create("a", b"x", token="t")
    assert kind is type(caught.value)


class ForgottenFile(PlainFile):
    """A file whose upload was ended by a first request, of which the answer was lost: a second one finds no upload."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise FileNotFoundError("NoSuchUpload")


class ForgetfulFileSystem(PlainFileSystem):
    """As a client for an object store that makes requests again by itself."""

    protocol = "hf"

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> Any:
        self.disk.makedirs(path.rpartition("/")[0], exist_ok=True)
        return ForgottenFile(self.disk.open(path, mode)) if mode == "wb" else self.disk.open(path, mode)


def test_the_end_of_an_upload_whose_answer_was_lost(monkeypatch: pytest.MonkeyPatch, quick_path: Path) -> None:
    """What counts is what is there."""
    monkeypatch.setitem(_registry, "hf", ForgetfulFileSystem)
    store = open_fsspec_store(f"hf://{quick_path}", {})
    write_blob(store, "data/b", pattern(LONG_NBYTES))
    assert pattern(LONG_NBYTES) == store.read("data/b", max_nbytes=LONG_NBYTES)

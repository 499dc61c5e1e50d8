"""What the local store promises beyond the contract: links, other kinds of files, its root, errors of the operating system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from anyshard.errors import BlobExists, BlobNotFound, CheckpointReplaced, InvalidPath, StorageDenied, StorageError, StorageFull
from anyshard.storage.local import LocalStore
from anyshard.storage.posix import syscalls
from anyshard.storage.posix.publish import PRIMITIVES, by_link
from anyshard.testing.store_fixtures import keys_below, pattern, write_blob


def failing(code: int) -> Callable[..., None]:
    """A stand-in for a function of the operating system that always fails with this errno."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run" / "step_1")
    store.prepare(("data/model/",))
    return store


def path_of(store: LocalStore, key: str) -> Path:
    return Path(store.url) / key


# Links and other kinds of files ----------------------------------------------------------------------------------------


def verbs_on(store: LocalStore, key: str) -> tuple[Callable[[], object], ...]:
    """Every verb that takes a key."""
    return (
        lambda: store.read(key, max_nbytes=100),
        lambda: store.open_blob(key),
        lambda: store.delete((key,)),
        lambda: store.create(key, b"", token="t"),
        lambda: store.create_blob(key, nbytes=0),
    )


def test_link_to_a_file_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """No verb follows a link below the root: reading and deleting are refused, creating finds the name taken."""
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    path_of(store, "data/link").symlink_to(target)
    for verb in verbs_on(store, "data/link"):
        with pytest.raises((StorageDenied, BlobExists)):
            verb()
    assert target.read_bytes() == b"secret"
    assert path_of(store, "data/link").is_symlink()


def test_link_to_a_directory_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """No verb goes through a link to a directory below the root, and the message says that links are not followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    path_of(store, "data/link").symlink_to(outside)
    verbs = (*verbs_on(store, "data/link/a"), lambda: store.list("data/link/"), lambda: store.prepare(("data/link/x/",)))
    for verb in verbs:
        with pytest.raises(StorageDenied, match="symbolic links are never followed"):
            verb()
    assert [outside / "a"] == list(outside.iterdir())


def test_dangling_link_is_not_created_through(store: LocalStore, tmp_path: Path) -> None:
    """A link to nothing takes the name; its target is not made."""
    path_of(store, "link").symlink_to(tmp_path / "target")
    for primitive in PRIMITIVES:
        with pytest.raises(BlobExists):
            LocalStore(store.url, primitives=(primitive,)).create("link", b"", token="t")
    with pytest.raises(BlobExists):
        store.create_blob("link", nbytes=0)
    assert not (tmp_path / "target").exists()


def test_links_are_not_listed(store: LocalStore, tmp_path: Path) -> None:
    """A listing shows neither links nor pipes nor names that are no keys."""
    path_of(store, "file-link").symlink_to(__file__)
    path_of(store, "directory-link").symlink_to(tmp_path)
    path_of(store, "back\\slash").write_bytes(b"")
    os.mkfifo(path_of(store, "pipe"))
    assert (("data/",), ()) == (store.list("").prefixes, store.list("").entries)


def test_root_may_be_a_link(store: LocalStore, tmp_path: Path) -> None:
    """The root itself may be a link to a directory."""
    (tmp_path / "link").symlink_to(store.url)
    linked = LocalStore(tmp_path / "link")
    linked.prepare(("data/model/",))
    linked.create("data/a", b"content", token="t")
    assert store.read("data/a", max_nbytes=7) == b"content"


def test_pipe_is_refused_at_once(store: LocalStore) -> None:
    """A pipe under a key is an error; nobody waits for its writer, and it is not deleted."""
    os.mkfifo(path_of(store, "pipe"))
    for verb in verbs_on(store, "pipe")[:3]:
        with pytest.raises(StorageError, match="not a regular file"):
            verb()
    assert stat.S_ISFIFO(path_of(store, "pipe").stat().st_mode)


def test_directory_is_not_deleted_as_a_blob(store: LocalStore) -> None:
    """Only a key with a slash at its end removes a directory."""
    with pytest.raises(StorageError):
        store.delete(("data/model",))
    assert path_of(store, "data/model").is_dir()


# The root --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "step_1", "runs/step_1"])
def test_file_in_the_way_is_an_invalid_path(tmp_path: Path, below: str) -> None:
    """A root that is a file, or lies below one, is `InvalidPath` that names it, and the file is left alone."""
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    store = LocalStore(file / below)
    verbs = (*verbs_on(store, "a"), lambda: store.prepare(("data/",)), lambda: store.list(""))
    for verb in verbs:
        with pytest.raises(InvalidPath, match="found a file"):
            verb()
    assert file.read_bytes() == b"mine"


def test_file_in_place_of_a_prefix_is_an_invalid_path(store: LocalStore) -> None:
    """`prepare` does not replace a file by a directory."""
    store.create("data/file", b"mine", token="t")
    with pytest.raises(InvalidPath, match="found a file"):
        store.prepare(("data/file/below/",))
    assert store.read("data/file", max_nbytes=4) == b"mine"


def test_dangling_root_is_an_invalid_path(tmp_path: Path) -> None:
    """A root that is a link to nothing is not made through the link."""
    (tmp_path / "root").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidPath):
        LocalStore(tmp_path / "root").prepare(())
    assert not (tmp_path / "nowhere").exists()


def test_site_of_a_root_that_cannot_be_found(tmp_path: Path) -> None:
    """Its error is one of ours; a root that is not there yet is on the filesystem of what is above it."""
    (tmp_path / "root").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BlobNotFound, match="find the filesystem"):
        _ = LocalStore(tmp_path / "root").site
    assert LocalStore(tmp_path).site == LocalStore(tmp_path / "run" / "step_1").site


def test_relative_root_is_fixed_when_the_store_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of directory does not move the store."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run")
    monkeypatch.chdir("/")
    store.prepare(())
    assert (tmp_path / "run").is_dir()


# Errors of the operating system ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, StorageDenied),
        (errno.EROFS, StorageDenied),
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
    ],
)
def test_errors_of_a_write_are_translated(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StorageError]
) -> None:
    """An error while writing is ours, has key and errno, the system's error as cause, and leaves nothing."""
    with pytest.raises(kind) as caught, store.create_blob("data/a", nbytes=5) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(code))
        writer.write_at(0, memoryview(b"12345"))
    assert ("data/a", code, code) == (caught.value.file, caught.value.errno, getattr(caught.value.__cause__, "errno", None))
    assert keys_below(store, "data/") == ()


def test_full_disk_is_found_before_the_first_byte(quick_path: Path) -> None:
    """A blob larger than the free space fails at `create_blob`, with figures and advice, and leaves nothing (B055)."""
    store = LocalStore(quick_path)
    needed = 1 << 50
    with pytest.raises(StorageFull, match=rf"needed {needed} bytes, free \d+ bytes.*Free space") as caught:
        store.create_blob("a", nbytes=needed)
    assert (errno.ENOSPC, "a", ()) == (caught.value.errno, caught.value.file, keys_below(store, ""))


def test_full_disk_is_found_without_reserving(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that cannot reserve space is asked how much is free, and takes blobs that fit."""
    monkeypatch.setattr(syscalls, "_libc", object)
    store = LocalStore(quick_path, primitives=(by_link,))
    with pytest.raises(StorageFull):
        store.create_blob("a", nbytes=1 << 50)
    write_blob(store, "a", b"fits")
    assert store.read("a", max_nbytes=4) == b"fits"


def test_full_disk_in_a_later_write(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that says it has room and then has none is `StorageFull`; earlier blobs are intact (B053)."""
    write_blob(store, "data/earlier", b"earlier")
    with pytest.raises(StorageFull), store.create_blob("data/a", nbytes=20) as writer, monkeypatch.context() as patch:
        writer.write_at(0, memoryview(bytes(10)))
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        writer.write_at(10, memoryview(bytes(10)))
    assert (b"earlier", ("data/earlier",)) == (store.read("data/earlier", max_nbytes=7), keys_below(store, "data/"))


def test_failed_sync_gives_the_blob_up(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob whose sync failed is not reported durable and is removed."""
    with pytest.raises(StorageError, match="sync"), store.create_blob("data/a", nbytes=1) as writer:
        writer.write_at(0, memoryview(b"x"))
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        writer.finish()
    assert keys_below(store, "data/") == ()


def test_file_removed_while_it_is_written(store: LocalStore) -> None:
    """A blob whose file somebody removed is not reported durable."""
    with pytest.raises(StorageError, match="removed or replaced"), store.create_blob("data/a", nbytes=1) as writer:
        writer.write_at(0, memoryview(b"x"))
        store.delete(("data/a",))
        writer.finish()
    assert keys_below(store, "data/") == ()


def test_directories_that_cannot_be_synced_are_tolerated(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that refuses to sync directories (EINVAL) is used as it is; files are still synced."""
    fsync = os.fsync

    def fsync_files(descriptor: int) -> None:
        failing(errno.EINVAL)() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files)
    store = LocalStore(quick_path / "step_1")
    store.prepare(("data/",))
    store.create("data/a", b"content", token="t")
    assert store.read("data/a", max_nbytes=7) == b"content"


def test_missing_directory_on_create(store: LocalStore) -> None:
    """Creating below a prefix that was not prepared names the path."""
    with pytest.raises(BlobNotFound, match="data/none/a"):
        store.create("data/none/a", b"", token="t")


def test_stale_handle_is_a_replaced_checkpoint(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open file that its server dropped (ESTALE) is `CheckpointReplaced`."""
    write_blob(store, "data/a", pattern(10))
    with store.open_blob("data/a") as reader:
        monkeypatch.setattr(os, "preadv", failing(errno.ESTALE))
        with pytest.raises(CheckpointReplaced, match="data/a"):
            reader.read_into(0, memoryview(bytearray(10)))


def test_file_cut_while_open(store: LocalStore) -> None:
    """A file that becomes shorter while it is read is an error with both lengths, not a loop."""
    write_blob(store, "data/a", pattern(10_000))
    with store.open_blob("data/a") as reader:
        os.truncate(path_of(store, "data/a"), 4000)
        with pytest.raises(StorageError, match="expected 10000 bytes at 0, found a file of 4000 bytes"):
            reader.read_into(0, memoryview(bytearray(10_000)))


def test_errors_leave_no_descriptor_open(store: LocalStore, tmp_path: Path) -> None:
    """After many refused calls the process holds as many descriptors as before."""
    path_of(store, "link").symlink_to(tmp_path)
    os.mkfifo(path_of(store, "pipe"))
    write_blob(store, "data/a", b"x")
    refused = [verb for key in ("link", "pipe", "link/a", "data/a/b") for verb in verbs_on(store, key)]
    refused += verbs_on(store, "none/a")[:4]  # creating a blob makes its directory
    before = len(list(Path("/proc/self/fd").iterdir()))
    for verb in refused:
        with contextlib.suppress(StorageError, InvalidPath):
            verb()
    assert before == len(list(Path("/proc/self/fd").iterdir()))

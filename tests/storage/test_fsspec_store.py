"""The store on fsspec: the contract on three kinds of backends, and whole saves and loads through it."""

from __future__ import annotations

import os
import signal
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from aiobotocore.session import AioSession  # type: ignore[import-untyped]

import anyshard
from anyshard.errors import (
    CheckpointExists,
    CheckpointReplaced,
    StorageError,
)
from anyshard.storage.fsspec_store import FsspecStore, open_fsspec_store, to_s3fs_options
from anyshard.storage.fsspec_store.writer import WHOLE_NBYTES
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from anyshard.testing.store_contract import MakeStore, StoreContract
from anyshard.testing.store_fixtures import in_threads, keys_below, pattern, read_range, write_blob
from tests.servers import S3Server
from tests.storage.fsspec_scenes import LONG_NBYTES, Places, in_memory, model_state, numbered, quick_s3fs_options, same


class TestMemory(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return in_memory()


class TestLocal(StoreContract):
    @pytest.fixture
    def make_store(self, quick_path: Path) -> MakeStore:
        return numbered(f"file://{quick_path}")


@pytest.fixture(scope="module")
def session() -> AioSession:
    """What s3fs otherwise reads from files for each new store, most of the time that a test would take."""
    return AioSession()


class TestS3(StoreContract):
    @pytest.fixture
    def make_store(self, moto_s3: S3Server, session: AioSession) -> MakeStore:
        return numbered(f"s3://{moto_s3.make_bucket()}/run", {**to_s3fs_options(moto_s3.options), "session": session})


@pytest.fixture(params=["memory", "file", "s3"])
def make_place(request: pytest.FixtureRequest, quick_path: Path) -> Places:
    """A new place at each call, on each kind of backend in turn."""
    if request.param == "memory":
        return in_memory()
    if request.param == "file":
        return numbered(f"file://{quick_path}")
    server: S3Server = request.getfixturevalue("seaweedfs")
    options = {**to_s3fs_options(server.options), "session": request.getfixturevalue("session")}
    return numbered(f"s3://{server.make_bucket()}/run", options)


# Blobs too long to be handed over whole -------------------------------------------------------------------------------


def write_pieces(store: FsspecStore, key: str, data: bytes, nbytes: int | None) -> None:
    with store.create_blob(key, nbytes=nbytes) as writer:
        for position in range(0, len(data), 1 << 22):
            writer.write_at(position, memoryview(data)[position : position + (1 << 22)])
        writer.finish()


@pytest.mark.parametrize("known", [True, False])
def test_long_blob(make_place: Places, known: bool) -> None:
    """A blob longer than what is held is streamed and read back, its length known or not."""
    store, data = make_place(), pattern(LONG_NBYTES)
    write_pieces(store, "data/a", data, LONG_NBYTES if known else None)
    assert data[-20_000:] == read_range(store, "data/a", LONG_NBYTES - 20_000, 20_000)
    assert [entry.nbytes for entry in store.list("data/").entries] == [LONG_NBYTES]


def test_long_blob_given_up_is_gone(make_place: Places) -> None:
    """A streamed blob that is given up leaves nothing, and its key is free."""
    store, data = make_place(), pattern(LONG_NBYTES)
    with pytest.raises(KeyError), store.create_blob("data/a", nbytes=2 * LONG_NBYTES) as writer:
        writer.write_at(0, memoryview(data))
        raise KeyError
    assert keys_below(store, "data/") == ()
    write_blob(store, "data/a", b"again")
    assert store.read("data/a", max_nbytes=5) == b"again"


def test_long_blob_does_not_replace(make_place: Places) -> None:
    """A key that another writer took while a long blob was streamed keeps that writer's content, also after giving up."""
    store, data = make_place(), pattern(LONG_NBYTES)
    with pytest.raises(StorageError), store.create_blob("data/a", nbytes=LONG_NBYTES) as writer:
        writer.write_at(0, memoryview(data)[:-1])
        store.delete(("data/a",))
        store.create("data/a", b"theirs", token="t")
        writer.write_at(LONG_NBYTES - 1, memoryview(data)[-1:])
        writer.finish()
    assert store.read("data/a", max_nbytes=6) == b"theirs"


def test_two_threads_share_a_store(make_place: Places) -> None:
    """Writers and readers on one store at once do not disturb each other."""
    store = make_place()
    store.prepare(("data/",))
    contents = [pattern(300_000, seed) for seed in range(4)]

    def task(number: int) -> Callable[[], object]:
        def run() -> bytes:
            write_blob(store, f"data/{number}", contents[number])
            return b"".join(read_range(store, f"data/{number}", position, 100_000) for position in (0, 100_000, 200_000))

        return run

    assert contents == in_threads([task(number) for number in range(4)])


def test_replaced_blob_is_found(make_place: Places) -> None:
    """Reading on from a blob whose key was deleted, or taken by other content, is `CheckpointReplaced`."""
    store = make_place()
    write_blob(store, "data/a", pattern(1000))
    with store.open_blob("data/a") as reader:
        store.delete(("data/a",))
        with pytest.raises(CheckpointReplaced, match="removed"):
            reader.read_into(0, memoryview(bytearray(10)))
        write_blob(store, "data/a", pattern(1000, seed=1))
        with pytest.raises(CheckpointReplaced, match="replaced"):
            reader.read_into(0, memoryview(bytearray(10)))


def test_put_replaces(make_place: Places) -> None:
    """`put` writes a key that is free and one that is taken, and leaves nothing else."""
    store = make_place()
    store.prepare(())
    for data in (b"first", b"second, longer", b""):
        store.put("a", data, token="t")
        assert store.read("a", max_nbytes=100) == data
    assert keys_below(store, "") == ("a",)


def test_prepare_makes_no_bucket(seaweedfs: S3Server) -> None:
    """A bucket that does not exist is not made, and writing there says so."""
    store = open_fsspec_store(f"s3://none-{uuid.uuid4().hex[:8]}/run", to_s3fs_options(seaweedfs.options))
    store.prepare(("data/",))
    with pytest.raises(StorageError, match="bucket does not exist"):
        store.create("a", b"x", token="t")


def test_upload_given_up_leaves_no_parts(seaweedfs: S3Server) -> None:
    """Giving up a blob of which parts were sent aborts its upload, so that nobody pays for them."""
    bucket, options = seaweedfs.make_bucket(), quick_s3fs_options(seaweedfs)
    store = open_fsspec_store(f"s3://{bucket}/run", options)
    with store.create_blob("data/a", nbytes=3 * WHOLE_NBYTES) as writer:
        writer.write_at(0, memoryview(pattern(2 * WHOLE_NBYTES)))
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        assert len(filesystem.list_multipart_uploads(bucket)) == 1
    assert filesystem.list_multipart_uploads(bucket) == []


# Forks ----------------------------------------------------------------------------------------------------------------


def test_fork_after_use(make_place: Places) -> None:
    """A child of a process that has used a store writes through it, and the parent goes on."""
    store = make_place()
    store.prepare(("data/",))
    write_blob(store, "data/parent", b"before")
    in_child(lambda: write_blob(store, "data/child", b"child") if "memory" not in store.url else None)
    write_blob(store, "data/after", store.read("data/parent", max_nbytes=6))
    assert {"data/parent", "data/after"} <= set(keys_below(store, "data/"))
    if "memory" not in store.url:
        assert store.read("data/child", max_nbytes=5) == b"child"


def in_child(task: Callable[[], object]) -> None:
    """Run in a fork of this process; its failure, or one minute without an end, fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads here, which is what is tested
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            task()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Whole saves and loads ------------------------------------------------------------------------------------------------


def test_save_and_load(make_place: Places) -> None:
    """A model saved to a store of fsspec loads bit for bit; a second save is refused, one that overwrites wins."""
    store = make_place()
    first, second, found = model_state(1), model_state(2), model_state(3)
    anyshard.save(store, first)
    anyshard.load(store, found)
    assert same(first, found)
    with pytest.raises(CheckpointExists):
        anyshard.save(store, second)
    anyshard.save(store, second, overwrite=True)
    anyshard.load(store, found)
    assert same(second, found)
    anyshard.ops.delete(store)
    with pytest.raises(anyshard.CheckpointNotFound):
        anyshard.load(store, found)
    report = anyshard.ops.clean(store, older_than_s=0, grace_s=0)
    assert report.in_progress == ()


def test_leftovers_are_cleaned(make_place: Places) -> None:
    """Files of a save that died are removed by clean, the checkpoint beside them stays."""
    store, found = make_place(), model_state(2)
    anyshard.save(store, model_state(1))
    failing = FaultStore(store, [Rule(Verb.CREATE, "manifest-*", fail(StorageError("lost", file="")))])
    with pytest.raises(anyshard.AnyshardError):
        anyshard.save(failing, model_state(3), overwrite=True)
    anyshard.ops.clean(store, older_than_s=0, grace_s=0)
    anyshard.load(store, found)
    assert same(model_state(1), found)


def test_only_the_url_changes(quick_path: Path, seaweedfs: S3Server) -> None:
    """The same calls save to memory, a disk and S3, each named by its URL only (B157)."""
    places = {
        f"memory://run-{uuid.uuid4().hex}/step_1": {},
        f"fsspec+file://{quick_path}/step_1": {},
        f"fsspec+s3://{seaweedfs.make_bucket()}/step_1": quick_s3fs_options(seaweedfs),
    }
    for place, options in places.items():
        state, found = model_state(4), model_state(5)
        anyshard.save(place, state, options=anyshard.SaveOptions(storage_options=options))
        anyshard.load(place, found, options=anyshard.LoadOptions(storage_options=options))
        assert same(state, found)


def test_copied_checkpoint_is_complete(quick_path: Path) -> None:
    """A checkpoint copied from a disk to another backend, file by file, is as good there (B143)."""
    state, found = model_state(6), model_state(7)
    anyshard.save(quick_path / "step_1", state)
    place = f"memory://copy-{uuid.uuid4().hex}/step_1"
    fsspec.filesystem("memory").put(f"{quick_path}/step_1", place, recursive=True)
    anyshard.load(place, found)
    assert same(state, found)
    anyshard.ops.clean(place, older_than_s=0, grace_s=0)
    anyshard.load(place, found)

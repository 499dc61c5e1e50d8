"""Object stores against real servers: the contract, and whole round trips."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from anyshard.errors import BlobExists, CheckpointReplaced, LimitExceeded, StorageError, StorageUnavailable
from anyshard.options import MIB
from anyshard.storage.object_store.opening import open_object_store
from anyshard.storage.object_store.stale import abort_stale_uploads, list_stale_uploads
from anyshard.storage.object_store.store import ObjectStore
from anyshard.storage.object_store.upload import choose_part_nbytes
from anyshard.storage.protocol import Store
from anyshard.testing.store_contract import MakeStore, StoreContract
from anyshard.testing.store_fixtures import keys_below, pattern, read_range, write_blob
from tests.servers import AzureServer, S3Server

PART_NBYTES = 5 * MIB


def s3_stores(server: S3Server, bucket: str) -> MakeStore:
    """Each call gives an empty store in the bucket."""
    run, numbers = uuid.uuid4().hex, itertools.count()
    return lambda: open_object_store(f"s3://{bucket}/{run}/step {next(numbers)}", server.options)


def open_s3(server: S3Server, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """A store on a prefix in a new bucket."""
    store = open_object_store(f"s3://{server.make_bucket()}/run", {**server.options, **(options or {})})
    assert isinstance(store, ObjectStore)
    return store


class TestMoto(StoreContract):
    @pytest.fixture
    def make_store(self, moto_s3: S3Server) -> MakeStore:
        return s3_stores(moto_s3, moto_s3.make_bucket())


@pytest.fixture(scope="module")
def warm_bucket(seaweedfs: S3Server) -> str:
    """One for all tests of the contract, since the first object in a bucket takes longer than a test."""
    return seaweedfs.make_bucket()


class TestSeaweed(StoreContract):
    @pytest.fixture
    def make_store(self, seaweedfs: S3Server, warm_bucket: str) -> MakeStore:
        return s3_stores(seaweedfs, warm_bucket)

    def test_delete_of_an_empty_prefix(self, store: Store) -> None:
        """It goes on listing an emptied prefix for a while; there is nothing below."""
        store.create("data/model/a", b"", token="t")
        store.delete(("data/model/a", "data/model/", "data/"))
        assert () == (*keys_below(store, ""), *keys_below(store, "data/"), *keys_below(store, "data/model/"))


class TestAzurite(StoreContract):
    @pytest.fixture
    def make_store(self, azurite: AzureServer) -> MakeStore:
        container, numbers = azurite.make_container(), itertools.count()
        return lambda: open_object_store(f"az://{container}/run/step {next(numbers)}", azurite.options)


# Blobs in parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_a_long_blob_goes_in_parts(seaweedfs: S3Server, is_known: bool) -> None:
    """A blob longer than a part, of a known or unknown length, is read back the same, whatever its pieces were (B010)."""
    store, data = open_s3(seaweedfs, {"part_nbytes": PART_NBYTES}), pattern(2 * PART_NBYTES + 12_345)
    with store.create_blob("data/a", nbytes=len(data) if is_known else None) as writer:
        for position in range(0, len(data), 3_000_001):
            writer.write_at(position, memoryview(data)[position : position + 3_000_001])
        writer.finish()
    assert data == read_range(store, "data/a", 0, len(data))


def test_a_buffer_may_change_after_each_write(seaweedfs: S3Server) -> None:
    """What was given is sent, though the caller fills the same buffer again while parts are under way."""
    store, buffer = open_s3(seaweedfs, {"part_nbytes": PART_NBYTES}), bytearray(MIB)
    with store.create_blob("data/a", nbytes=16 * MIB) as writer:
        for number in range(16):
            buffer[:] = bytes([number]) * MIB
            writer.write_at(number * MIB, memoryview(buffer))
            buffer[:] = b"x" * MIB
        writer.finish()
    assert b"".join(bytes([number]) * MIB for number in range(16)) == read_range(store, "data/a", 0, 16 * MIB)


def test_a_long_blob_never_takes_a_key(moto_s3: S3Server) -> None:
    """What is there is looked for before the first part."""
    store = open_s3(moto_s3, {"part_nbytes": PART_NBYTES})
    write_blob(store, "data/a", b"first")
    with pytest.raises(BlobExists):
        store.create_blob("data/a", nbytes=PART_NBYTES + 1)
    assert store.read("data/a", max_nbytes=5) == b"first"


def test_an_upload_given_up_is_aborted(moto_s3: S3Server) -> None:
    """Leaving without `finish` removes the parts sent so far; a writer that was never left leaves a stale upload (D7)."""
    store = open_s3(moto_s3, {"part_nbytes": PART_NBYTES})
    with store.create_blob("data/a", nbytes=3 * PART_NBYTES) as writer:
        writer.write_at(0, memoryview(bytes(2 * PART_NBYTES)))
    assert ([], ()) == (list_stale_uploads(store, older_than_s=-60.0), keys_below(store, "data/"))


def test_stale_uploads_are_listed_and_aborted_below_the_prefix(seaweedfs: S3Server) -> None:
    """Only uploads below the prefix of the store and of the age asked for are touched."""
    store = open_s3(seaweedfs, {"part_nbytes": PART_NBYTES})
    beside = open_object_store(store.url + "-other", {**seaweedfs.options, "part_nbytes": PART_NBYTES})
    writers = [place.create_blob("data/a", nbytes=3 * PART_NBYTES) for place in (store, beside)]
    for writer in writers:
        writer.write_at(0, memoryview(bytes(2 * PART_NBYTES)))
    assert list_stale_uploads(store, older_than_s=3600.0) == []
    assert ["data/a"] == [upload.key for upload in abort_stale_uploads(store, older_than_s=-60.0)]
    assert list_stale_uploads(store, older_than_s=-60.0) == []
    for writer in writers:
        writer.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(None, 16), (0, 16), (3200 * MIB, 16), (6400 * MIB, 32), (10 << 40, 256)], ids=str
)
def test_parts_are_a_200th_of_the_blob(nbytes: int | None, expected: int) -> None:
    """A part is a 200th of the blob, at least 16 and at most 256 MiB (D5)."""
    assert expected * MIB == choose_part_nbytes(nbytes, None)


def test_a_blob_of_too_many_parts_is_refused_at_once(moto_s3: S3Server) -> None:
    """More than 10,000 parts are `LimitExceeded` before anything is sent, and the message says what to do."""
    store = open_s3(moto_s3, {"part_nbytes": PART_NBYTES})
    with pytest.raises(LimitExceeded, match="part_nbytes"):
        store.create_blob("data/a", nbytes=10_000 * PART_NBYTES + 1)


# Readers, deletion, listing ---------------------------------------------------------------------------------------------


def test_a_replaced_object_is_reported(moto_s3: S3Server) -> None:
    """A reader never gives bytes of another version, nor of a deleted one."""
    store = open_s3(moto_s3)
    write_blob(store, "data/a", b"first")
    with store.open_blob("data/a") as reader:
        store.put("data/a", b"other", token="t")
        with pytest.raises(CheckpointReplaced, match="data/a"):
            reader.read_into(0, memoryview(bytearray(5)))
        store.delete(("data/a",))
        with pytest.raises(CheckpointReplaced, match="nothing"):
            reader.read_into(0, memoryview(bytearray(5)))


def test_reads_in_many_threads(seaweedfs: S3Server) -> None:
    """Ranges of one object are read by eight threads at once (B038)."""
    store, data = open_s3(seaweedfs), pattern(8 * MIB)
    write_blob(store, "data/a", data)
    found = bytearray(len(data))
    with store.open_blob("data/a") as reader, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: reader.read_into(at, memoryview(found)[at : at + MIB]), range(0, len(data), MIB)))
    assert data == bytes(found)


def test_many_keys_are_deleted_in_batches(moto_s3: S3Server) -> None:
    """More keys than a request takes are deleted, missing ones among them (D6)."""
    store = open_s3(moto_s3)
    for number in range(5):
        store.create(f"data/{number}", b"", token="t")
    store.delete(tuple(f"data/{number}" for number in range(1500, -1, -1)))
    assert keys_below(store, "data/") == ()


def test_azure_deletes_what_is_there_beside_what_is_not(azurite: AzureServer) -> None:
    """Missing keys do not keep the others from being deleted where the service calls them an error."""
    store = open_object_store(f"az://{azurite.make_container()}/run", azurite.options)
    for key in ("data/a", "data/model/b", "c"):
        store.create(key, b"", token="t")
    store.delete(("data/none", "data/a", "none/none", "data/model/b", "none", "c"))
    assert ((), ()) == (store.list("").entries, store.list("").prefixes)


def test_a_missing_bucket_is_named_as_such(moto_s3: S3Server) -> None:
    """Every verb says that the bucket is missing, not that the checkpoint is."""
    store = open_object_store("s3://no-such-bucket/run", moto_s3.options)
    for verb in (
        lambda: store.create("a", b"", token="t"),
        lambda: store.read("a", max_nbytes=1),
        lambda: store.open_blob("a"),
        lambda: store.list(""),
        lambda: store.delete(("a",)),
    ):
        with pytest.raises(StorageError, match="bucket .* does not exist") as caught:
            verb()
        assert not isinstance(caught.value, FileNotFoundError | StorageUnavailable)


def test_wrong_credentials_are_denied(seaweedfs: S3Server) -> None:
    """A wrong secret is `StorageDenied` at once, and no message shows it."""
    store = open_s3(seaweedfs)
    wrong = open_object_store(store.url, {**seaweedfs.options, "secret_access_key": "not-the-secret"})
    with pytest.raises(PermissionError) as caught:
        wrong.create("a", b"", token="t")
    assert "not-the-secret" not in f"{caught.value!r} {caught.value.__context__!r} {wrong!r}"

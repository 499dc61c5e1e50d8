"""The part of the store contract about bytes: blob writers, whole reads, blob readers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anyshard.errors import BlobExists, BlobNotFound, CheckpointReplaced, LimitExceeded, StorageError
from anyshard.storage.protocol import Store
from anyshard.testing.store_fixtures import (
    NUM_WRITERS,
    MakeStore,
    StoreFixtures,
    in_threads,
    keys_below,
    pattern,
    read_range,
    write_blob,
)


class StoreBlobsContract(StoreFixtures):
    """`create_blob`, `read`, `open_blob`."""

    # -------------------------------------------------------------------------------------------------- blob writers

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 1 << 20, (1 << 20) + 7])
    def test_blob_of_known_length(self, store: Store, nbytes: int) -> None:
        """A blob written in one piece is read back whole."""
        write_blob(store, "data/a", pattern(nbytes))
        assert pattern(nbytes) == store.read("data/a", max_nbytes=nbytes)

    def test_blob_of_unknown_length(self, store: Store) -> None:
        """Without `nbytes` the blob is as long as what was written."""
        data = pattern(10_000)
        with store.create_blob("data/a", nbytes=None) as writer:
            writer.write_at(0, memoryview(data)[:4096])
            writer.write_at(4096, memoryview(data)[4096:])
            writer.finish()
        assert data == store.read("data/a", max_nbytes=10_000)

    @pytest.mark.parametrize("piece", [1000, 4096, 4097, 12288])
    def test_pieces_of_any_length(self, store: Store, piece: int) -> None:
        """Positions, lengths and memory need no alignment, and aligned and other pieces may be mixed."""
        data = pattern(100_000)
        with store.create_blob("data/a", nbytes=len(data)) as writer:
            for position in range(0, len(data), piece):
                writer.write_at(position, memoryview(data)[position : position + piece])
            writer.finish()
        assert data == store.read("data/a", max_nbytes=len(data))

    def test_parallel_writes_in_any_order(self, store: Store) -> None:
        """With `parallel_writes` pieces come from several threads, last ones first; without, one after the other."""
        parallel = store.capabilities.parallel_writes
        data = pattern(8 * 65536 + 5)
        positions = range(0, len(data), 65536)
        with store.create_blob("data/a", nbytes=len(data)) as writer, ThreadPoolExecutor(4 if parallel else 1) as pool:

            def write(position: int) -> None:
                writer.write_at(position, memoryview(data)[position : position + 65536])

            list(pool.map(write, reversed(positions) if parallel else positions))
            writer.finish()
        assert data == store.read("data/a", max_nbytes=len(data))

    def test_buffer_is_free_after_write(self, store: Store) -> None:
        """Changing a buffer after `write_at` returned does not change the blob."""
        buffer = bytearray(pattern(8192))
        with store.create_blob("data/a", nbytes=8192) as writer:
            writer.write_at(0, memoryview(buffer))
            buffer[:] = bytes(8192)
            writer.finish()
        assert pattern(8192) == store.read("data/a", max_nbytes=8192)

    def test_buffer_of_another_format(self, store: Store) -> None:
        """A buffer of items larger than a byte counts in bytes."""
        data = pattern(8192)
        with store.create_blob("data/a", nbytes=8192) as writer:
            writer.write_at(0, np.frombuffer(data, np.float64).data)
            writer.finish()
        assert data == store.read("data/a", max_nbytes=8192)

    def test_blob_is_there_after_finish(self, store: Store) -> None:
        """A finished blob is read and listed even before its context is left."""
        with store.create_blob("data/a", nbytes=1) as writer:
            writer.write_at(0, memoryview(b"x"))
            writer.finish()
            assert (store.read("data/a", max_nbytes=1), keys_below(store, "data/")) == (b"x", ("data/a",))

    def test_blob_given_up_is_gone(self, store: Store) -> None:
        """Leaving without `finish` leaves nothing, and the key is free."""
        with store.create_blob("data/a", nbytes=8192) as writer:
            writer.write_at(0, memoryview(pattern(4096)))
        assert keys_below(store, "data/") == ()
        write_blob(store, "data/a", b"again")
        assert store.read("data/a", max_nbytes=100) == b"again"

    def test_blob_is_gone_after_an_error(self, store: Store) -> None:
        """An error in the context passes through and leaves nothing."""
        with pytest.raises(KeyError, match="mine"), store.create_blob("data/a", nbytes=4) as writer:
            writer.write_at(0, memoryview(b"1234"))
            raise KeyError("mine")
        assert keys_below(store, "data/") == ()

    @pytest.mark.parametrize("positions", [(), (0,), (0, 8192)], ids=["all", "end", "middle"])
    def test_unwritten_bytes_are_found(self, store: Store, positions: tuple[int, ...]) -> None:
        """`finish` of a blob of which something was not written is an error and leaves nothing."""
        with pytest.raises(StorageError), store.create_blob("data/a", nbytes=12288) as writer:
            for position in positions:
                writer.write_at(position, memoryview(pattern(4096)))
            writer.finish()
        assert keys_below(store, "data/") == ()

    def test_write_past_the_end_is_refused(self, store: Store) -> None:
        """A write outside of the announced length is an error."""
        with store.create_blob("data/a", nbytes=4) as writer, pytest.raises(StorageError):
            writer.write_at(0, memoryview(b"12345"))

    def test_taken_key_is_kept(self, store: Store) -> None:
        """A second writer gets `BlobExists`, at once or at `finish`, and giving up does not touch the first one's blob."""
        write_blob(store, "data/a", b"first")
        with pytest.raises(BlobExists):
            write_blob(store, "data/a", b"second")
        assert store.read("data/a", max_nbytes=100) == b"first"

    def test_giving_up_keeps_the_blob_of_another_writer(self, store: Store) -> None:
        """A writer whose key was deleted and taken meanwhile does not remove what the other one wrote."""
        with store.create_blob("data/a", nbytes=5) as writer:
            writer.write_at(0, memoryview(b"first"))
            store.delete(("data/a",))
            write_blob(store, "data/a", b"second")
        assert store.read("data/a", max_nbytes=6) == b"second"

    def test_blob_race_has_one_winner(self, store: Store) -> None:
        """Of eight blob writers with one key exactly one succeeds, and its content is there whole."""
        contents = [pattern(10_000, seed) for seed in range(NUM_WRITERS)]

        def task(number: int) -> Callable[[], object]:
            return lambda: write_blob(store, "data/a", contents[number])

        results = in_threads([task(number) for number in range(NUM_WRITERS)])
        winners = [number for number, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert contents[winners[0]] == store.read("data/a", max_nbytes=10_000)

    # ---------------------------------------------------------------------------------------------------------- read

    def test_read_takes_exactly_the_limit(self, store: Store) -> None:
        """A blob of `max_nbytes` is read, one byte more is `LimitExceeded`."""
        write_blob(store, "data/a", pattern(1000))
        assert pattern(1000) == store.read("data/a", max_nbytes=1000)
        with pytest.raises(LimitExceeded):
            store.read("data/a", max_nbytes=999)

    def test_missing_blob(self, store: Store) -> None:
        """What is not there, or is only a prefix, cannot be read; the error is a `StorageError` that names the key."""
        verbs: tuple[Callable[[str], object], ...] = (store.open_blob, lambda key: store.read(key, max_nbytes=1))
        for verb, key in itertools.product(verbs, ("a", "data/a", "elsewhere/a", "data", "data/model")):
            with pytest.raises(StorageError) as caught:
                verb(key)
            assert key == caught.value.file

    def test_missing_blob_is_file_not_found(self, store: Store) -> None:
        """Nothing there is `BlobNotFound`, which is the built-in error as well."""
        with pytest.raises(BlobNotFound) as caught:
            store.read("data/a", max_nbytes=1)
        assert isinstance(caught.value, FileNotFoundError)

    def test_missing_root_is_not_found(self, make_store: MakeStore) -> None:
        """A store that was never prepared has no blobs and an empty listing."""
        store = make_store()
        with pytest.raises(BlobNotFound):
            store.open_blob("a")
        assert (store.list("").entries, store.list("").prefixes) == ((), ())

    # -------------------------------------------------------------------------------------------------- blob readers

    @pytest.mark.parametrize("nbytes", [0, 1, 5000])
    def test_reader_knows_its_length(self, store: Store, nbytes: int) -> None:
        """`nbytes` of a reader is the length of the blob."""
        write_blob(store, "data/a", pattern(nbytes))
        with store.open_blob("data/a") as reader:
            assert nbytes == reader.nbytes

    def test_ranges_are_exact(self, store: Store) -> None:
        """A ranged read gives these bytes and no others, whatever its alignment."""
        data = pattern(100_000)
        write_blob(store, "data/a", data)
        for position, nbytes in ((0, 100_000), (0, 4096), (1, 4096), (8192, 4095), (99_999, 1), (100_000, 0)):
            assert data[position : position + nbytes] == read_range(store, "data/a", position, nbytes)

    def test_range_past_the_end_is_an_error(self, store: Store) -> None:
        """A blob that ends earlier is a `StorageError` that names the key."""
        write_blob(store, "data/a", pattern(1000))
        for position, nbytes in ((0, 1001), (999, 2), (1000, 1), (5000, 1), (-1, 1)):
            with pytest.raises(StorageError) as caught:
                read_range(store, "data/a", position, nbytes)
            assert caught.value.file == "data/a"

    def test_one_reader_in_several_threads(self, store: Store) -> None:
        """One reader serves reads of several threads at once."""
        data = pattern(16 * 10_000)
        write_blob(store, "data/a", data)
        found = bytearray(len(data))
        with store.open_blob("data/a") as reader, ThreadPoolExecutor(4) as pool:

            def read(position: int) -> None:
                reader.read_into(position, memoryview(found)[position : position + 10_000])

            list(pool.map(read, range(0, len(data), 10_000)))
        assert data == bytes(found)

    def test_reader_keeps_a_deleted_blob(self, store: Store) -> None:
        """What is open stays as it was when its key is deleted and taken by another blob, or is reported as replaced (B013)."""
        write_blob(store, "data/a", pattern(50_000, seed=1))
        found = bytearray(50_000)
        with store.open_blob("data/a") as reader:
            store.delete(("data/a",))
            write_blob(store, "data/a", pattern(50_000, seed=2))
            try:
                reader.read_into(0, memoryview(found))
            except CheckpointReplaced:
                return
        assert pattern(50_000, seed=1) == bytes(found)

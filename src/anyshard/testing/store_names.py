"""The part of the store contract about keys: which are taken, who wins, what is listed, what is deleted."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from anyshard.errors import BlobExists, InvalidPath
from anyshard.storage.protocol import Store
from anyshard.testing.store_fixtures import (
    NUM_WRITERS,
    OTHER_TOKEN,
    TOKEN,
    MakeStore,
    StoreFixtures,
    in_threads,
    keys_below,
    pattern,
    write_blob,
)

REFUSED_KEYS = ("", "/", "/a", "a//b", "..", "../a", "a/../b", "a/.", "./a", "a\0b", "a\\b", "\ud800")
REFUSED_PREFIXES = ("data", "/", "/data/", "../", "data/../", "a//", "a\0/")


class StoreNamesContract(StoreFixtures):
    """Keys, `prepare`, `create`, `list`, `delete`."""

    # ----------------------------------------------------------------------------------------------------- the store

    def test_url_is_one_line_for_messages(self, make_store: MakeStore) -> None:
        """A store has a name to show, in one line."""
        assert len(make_store().url.splitlines()) == 1

    def test_capabilities_do_not_change(self, store: Store) -> None:
        """Capabilities are the same before and after a write."""
        before = store.capabilities
        write_blob(store, "data/a", b"x")
        assert before == store.capabilities

    def test_free_nbytes_is_a_count_or_unknown(self, store: Store) -> None:
        """Free space is None or not negative."""
        free = store.free_nbytes()
        assert free is None or free >= 0

    def test_prepare_again_keeps_blobs(self, store: Store) -> None:
        """Preparing what is there changes nothing."""
        write_blob(store, "data/model/a", b"content")
        store.prepare(("data/", "data/model/"))
        assert store.read("data/model/a", max_nbytes=7) == b"content"

    # ---------------------------------------------------------------------------------------------------------- keys

    def test_unsafe_keys_are_refused(self, store: Store) -> None:
        """No verb takes a key that could leave the root or that means something else on another backend."""
        verbs: tuple[Callable[[str], object], ...] = (
            lambda key: store.create(key, b"", token=TOKEN),
            lambda key: store.create_blob(key, nbytes=1),
            lambda key: store.read(key, max_nbytes=1),
            store.open_blob,
            lambda key: store.delete((key,)),
        )
        for verb, key in itertools.product(verbs, REFUSED_KEYS):
            with pytest.raises(InvalidPath):
                verb(key)

    def test_unsafe_prefixes_are_refused(self, store: Store) -> None:
        """`list` and `prepare` take no unsafe prefix and none without its slash."""
        verbs: tuple[Callable[[str], object], ...] = (store.list, lambda prefix: store.prepare((prefix,)))
        for verb, prefix in itertools.product(verbs, REFUSED_PREFIXES):
            with pytest.raises(InvalidPath):
                verb(prefix)

    def test_keys_are_taken_literally(self, store: Store) -> None:
        """A safe key is stored and listed letter by letter; nothing in it is decoded."""
        names = ("%2e%2e", "-", "...", "a b", "\u00fc\u4e16", "~0")
        for name in names:
            store.create(f"data/{name}", b"", token=TOKEN)
        assert tuple(sorted(f"data/{name}" for name in names)) == keys_below(store, "data/")

    # -------------------------------------------------------------------------------------------------------- create

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001])
    def test_create_stores_content(self, store: Store, nbytes: int) -> None:
        """What was created is what is read."""
        store.create("data/a", pattern(nbytes), token=TOKEN)
        assert pattern(nbytes) == store.read("data/a", max_nbytes=nbytes)

    def test_create_leaves_nothing_else(self, store: Store) -> None:
        """No temporary name stays behind, neither after success nor after a lost race."""
        store.create("a", b"first", token=TOKEN)
        with pytest.raises(BlobExists):
            store.create("a", b"second", token=OTHER_TOKEN)
        assert keys_below(store, "") == ("a",)

    def test_create_never_replaces(self, store: Store) -> None:
        """A taken key is `BlobExists`, names the key, and keeps its content."""
        store.create("data/a", b"first", token=TOKEN)
        with pytest.raises(BlobExists) as caught:
            store.create("data/a", b"second", token=OTHER_TOKEN)
        assert (caught.value.file, store.read("data/a", max_nbytes=100)) == ("data/a", b"first")

    def test_create_never_replaces_a_blob(self, store: Store) -> None:
        """A key that a blob writer took is taken."""
        write_blob(store, "data/a", b"first")
        with pytest.raises(BlobExists):
            store.create("data/a", b"second", token=TOKEN)
        assert store.read("data/a", max_nbytes=100) == b"first"

    def test_create_after_delete_succeeds(self, store: Store) -> None:
        """A deleted key is free again."""
        store.create("a", b"first", token=TOKEN)
        store.delete(("a",))
        store.create("a", b"second", token=OTHER_TOKEN)
        assert store.read("a", max_nbytes=100) == b"second"

    def test_create_race_has_one_winner(self, store: Store) -> None:
        """Of eight writers at once exactly one succeeds, and its content is there whole."""
        contents = [pattern(10_000, seed) for seed in range(NUM_WRITERS)]

        def task(number: int) -> Callable[[], object]:
            return lambda: store.create("a", contents[number], token=f"t{number}")

        results = in_threads([task(number) for number in range(NUM_WRITERS)])
        winners = [number for number, result in enumerate(results) if result is None]
        losers = [result for result in results if isinstance(result, BlobExists)]
        assert (len(winners), len(losers)) == (1, NUM_WRITERS - 1)
        assert contents[winners[0]] == store.read("a", max_nbytes=10_000)

    def test_unsafe_tokens_are_refused(self, store: Store) -> None:
        """A token that could change the meaning of a name is refused."""
        for token in ("", "a/b", "..", "a.b", "a b", "\u00fc"):
            with pytest.raises(InvalidPath):
                store.create("a", b"", token=token)

    # ----------------------------------------------------------------------------------------------- list and delete

    def test_list_shows_only_what_is_directly_below(self, store: Store) -> None:
        """A listing has blobs and prefixes of one level, sorted, with whole keys."""
        for key in ("b", "a", "data/c", "data/model/d", "data/model/e"):
            store.create(key, b"", token=TOKEN)
        top, data = store.list(""), store.list("data/")
        assert ([entry.key for entry in top.entries], top.prefixes) == (["a", "b"], ("data/",))
        assert ([entry.key for entry in data.entries], data.prefixes) == (["data/c"], ("data/model/",))

    def test_list_shows_lengths(self, store: Store) -> None:
        """An entry knows the length of its blob."""
        write_blob(store, "data/a", pattern(5000))
        assert [entry.nbytes for entry in store.list("data/").entries] == [5000]

    def test_ages_are_by_the_clock_of_the_store(self, store: Store) -> None:
        """`modified_s` of a new blob is about `now_s`."""
        write_blob(store, "data/a", b"x")
        assert abs(store.now_s() - store.list("data/").entries[0].modified_s) < 120

    def test_prefix_without_entries_is_empty(self, store: Store) -> None:
        """An empty, a missing and an impossible prefix all list nothing."""
        store.create("data/file", b"", token=TOKEN)
        for prefix in ("data/model/", "none/", "none/at/all/", "data/file/"):
            listing = store.list(prefix)
            assert (listing.entries, listing.prefixes) == ((), ())

    def test_prefix_is_no_beginning_of_a_name(self, store: Store) -> None:
        """`data/model/` does not list `data/model2`."""
        store.create("data/model2", b"", token=TOKEN)
        assert store.list("data/model/").entries == ()

    def test_delete_removes_exactly_these(self, store: Store) -> None:
        """The keys given are gone, all others stay."""
        for key in ("a", "data/a", "data/b", "data/model/a"):
            store.create(key, b"", token=TOKEN)
        store.delete(("data/a", "data/model/a"))
        assert tuple(keys_below(store, prefix) for prefix in ("", "data/", "data/model/")) == (("a",), ("data/b",), ())

    def test_delete_passes_over_what_is_missing(self, store: Store) -> None:
        """A missing key is no error and does not stop the others."""
        store.create("data/b", b"", token=TOKEN)
        store.delete(("a", "data/a", "none/a", "none/", "data/b"))
        assert keys_below(store, "data/") == ()

    def test_delete_of_a_prefix_keeps_content(self, store: Store) -> None:
        """A prefix that holds something is left as it is."""
        store.create("data/model/a", b"content", token=TOKEN)
        store.delete(("data/model/", "data/"))
        assert store.read("data/model/a", max_nbytes=7) == b"content"

    def test_delete_of_an_empty_prefix(self, store: Store) -> None:
        """Emptied prefixes that are deleted are not listed any more."""
        store.create("data/model/a", b"", token=TOKEN)
        store.delete(("data/model/a", "data/model/", "data/"))
        assert store.list("").prefixes == ()

    def test_prefix_survives_the_deletion_of_its_blobs(self, store: Store) -> None:
        """After the last blob of a prefix is deleted another one can be written there without a new `prepare`."""
        store.create("data/model/a", b"", token=TOKEN)
        store.delete(("data/model/a",))
        store.create("data/model/b", b"", token=TOKEN)
        assert keys_below(store, "data/model/") == ("data/model/b",)

"""The contract of a key-value store: every sentence of `anyshard.coord.protocol` as a test.

Subclass it in a test module and say how a store is made:

    class TestMyKeyValueStore(KeyValueContract):
        @pytest.fixture
        def make_store(self):
            return lambda: MyKeyValueStore(...)      # each call gives an empty store
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from anyshard.coord.protocol import MAX_VALUE_NBYTES, KeyValueStore

MakeKeyValueStore = Callable[[], KeyValueStore]

_NUM_WRITERS = 8
_LONG_KEY = "anyshard/" + "a-b.c_D/9" * 21  # 198 characters


class KeyValueContract:
    """Subclass it with a `make_store` fixture; every test must pass."""

    @pytest.fixture
    def make_store(self) -> MakeKeyValueStore:
        """Override: how an empty store is made."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, make_store: MakeKeyValueStore) -> KeyValueStore:
        """An empty store."""
        return make_store()

    def test_absent_key_is_none_at_once(self, store: KeyValueStore) -> None:
        """Nobody waits for a key that nobody has set."""
        assert (store.get("a/b"), store.get_many(("a/b", "c"))) == (None, (None, None))

    @pytest.mark.parametrize("value", [b"x", b"\0", bytes(range(256)), b"\xff\xfe not text"])
    def test_value_comes_back(self, store: KeyValueStore, value: bytes) -> None:
        """A value is bytes, whatever they are."""
        store.set("a/b", value)
        assert value == store.get("a/b")

    def test_largest_value_comes_back(self, store: KeyValueStore) -> None:
        """A value of the largest size is taken, by both verbs that write."""
        value = bytes(range(256)) * (MAX_VALUE_NBYTES // 256)
        store.set("a", value)
        assert (value, value) == (store.set_if_absent("b", value), store.get("a"))

    def test_longest_key(self, store: KeyValueStore) -> None:
        """A key of nearly 200 characters is a key like any other."""
        store.set(_LONG_KEY, b"1")
        assert store.get_many((_LONG_KEY, _LONG_KEY[:-1])) == (b"1", None)

    def test_set_replaces(self, store: KeyValueStore) -> None:
        """The last value counts."""
        store.set("a", b"long value")
        store.set("a", b"short")
        assert store.get("a") == b"short"

    def test_keys_do_not_contain_each_other(self, store: KeyValueStore) -> None:
        """A key may be the beginning of another one."""
        store.set("a", b"1")
        store.set("a/b", b"2")
        store.delete("a")
        assert store.get_many(("a", "a/b")) == (None, b"2")

    @pytest.mark.parametrize("num", [1, 2, 3, 4, 200])
    def test_many_keys(self, store: KeyValueStore, num: int) -> None:
        """Many keys come in the order asked for, with None for those that are absent."""
        keys = [f"a/{number}" for number in range(num)]
        for key in keys[::3]:
            store.set(key, key.encode())
        expected = tuple(key.encode() if number % 3 == 0 else None for number, key in enumerate(keys))
        assert expected == store.get_many(keys)

    def test_many_keys_that_are_all_there(self, store: KeyValueStore) -> None:
        """The short way for keys that all have a value gives the same."""
        keys = [f"a/{number}" for number in range(150)]
        for key in keys:
            store.set(key, key.encode())
        assert tuple(key.encode() for key in reversed(keys)) == store.get_many(keys[::-1])

    def test_no_keys(self, store: KeyValueStore) -> None:
        """Asking for nothing gives nothing."""
        assert store.get_many(()) == ()

    def test_set_if_absent_keeps_the_first(self, store: KeyValueStore) -> None:
        """A second value is not taken, and its writer learns which is there."""
        assert (store.set_if_absent("a", b"first"), store.set_if_absent("a", b"second")) == (b"first", b"first")
        assert store.get("a") == b"first"

    def test_set_if_absent_respects_set(self, store: KeyValueStore) -> None:
        """A value that came by `set` counts too, and so does its deletion."""
        store.set("a", b"set")
        kept = store.set_if_absent("a", b"second")
        store.delete("a")
        assert (kept, store.set_if_absent("a", b"third")) == (b"set", b"third")

    def test_one_of_several_wins(self, store: KeyValueStore) -> None:
        """Of writers on several threads one wins, and all learn which."""
        values = [b"%d" % number for number in range(_NUM_WRITERS)]
        stored = in_threads([partial(store.clone().set_if_absent, "a", value) for value in values])
        assert {store.get("a")} == set(stored)
        assert stored[0] in values

    def test_delete(self, store: KeyValueStore) -> None:
        """A deleted key is absent, and deleting it again does nothing."""
        store.set("a", b"1")
        store.delete("a")
        store.delete("a")
        assert store.get("a") is None

    def test_clone_sees_the_same(self, store: KeyValueStore) -> None:
        """What one object wrote, another reads; each can be used while the other is."""
        clone = store.clone()
        store.set_if_absent("a", b"1")
        assert clone.get("a") == b"1"
        assert b"1" == clone.set_if_absent("a", b"2") == store.get("a")

    def test_order_of_writes(self, store: KeyValueStore) -> None:
        """Who sees the later of two writes of one object sees the earlier one too."""
        clone = store.clone()
        for number in range(50):
            store.set(f"a/{number}", b"1")
            store.set("newest", b"%d" % number)
            newest = clone.get("newest")
            assert newest is None or clone.get(f"a/{int(newest)}") == b"1"


def in_threads(tasks: Sequence[Callable[[], bytes]]) -> list[bytes]:
    """Results of all tasks, begun together."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], bytes]) -> bytes:
        barrier.wait(timeout=30)
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))

"""Torch's end of the room: groups from process groups, and the job's own store as the key-value store.

The only file that needs a private name of torch (the default store), asked for by `_find_default_store`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from anyshard.coord.bounded import MAX_ANSWER_S, Caller
from anyshard.coord.group import Group, make_lone_group
from anyshard.errors import InvalidOption, KeyValueStoreLost

# A process group, a list of ranks, or None for all ranks of the job.
GroupLike: TypeAlias = dist.ProcessGroup | Sequence[int] | None

_ABSENT = b"\0anyshard: no value"  # no value of ours begins with such a word
_BATCH = 64  # keys per request: a reply holds at most 256 MiB


class TorchKeyValueStore:
    """A `KeyValueStore` over a store of torch that can compare and delete (TCPStore, FileStore, HashStore, PrefixStore)."""

    def __init__(self, store: distributed_c10d.Store, *, origin: distributed_c10d.Store | None = None) -> None:
        self._store: Any = store  # torch's own types ask for text where every store takes bytes
        # Without a launcher the job's own store is the server too, which must outlive destroy_process_group while saves go on.
        self._origin = origin or store

    @property
    def can_hang(self) -> bool:
        """When the process that holds the store is frozen."""
        return True

    def set(self, key: str, value: bytes) -> None:
        """Torch's `set`."""
        with _answering():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Compare with a word that nothing equals: torch's own `get` would wait for an absent key."""
        with _answering():
            found: bytes = self._store.compare_set(key, _ABSENT, _ABSENT)
            return None if found == _ABSENT else found

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        """Few requests where all keys or long runs of them are there."""
        batches = [keys[first : first + _BATCH] for first in range(0, len(keys), _BATCH)]
        return tuple(value for batch in batches for value in self._get_batch(batch))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Torch's `compare_set`, to which no text is the sign of an absent key."""
        with _answering():
            stored: bytes = self._store.compare_set(key, "", value)
            return stored

    def delete(self, key: str) -> None:
        """Torch's `delete_key`."""
        with _answering():
            self._store.delete_key(key)

    def clone(self) -> TorchKeyValueStore:
        """Torch's `clone`: a connection of its own."""
        with _answering():
            return TorchKeyValueStore(self._store.clone(), origin=self._origin)

    def _get_batch(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        if len(keys) <= 3:  # as many requests as halving would need
            return [self.get(key) for key in keys]
        with _answering():
            if self._store.check(list(keys)):
                values: list[bytes] = self._store.multi_get(list(keys))
                return values
        half = len(keys) // 2
        return [*self._get_batch(keys[:half]), *self._get_batch(keys[half:])]


def make_group(group: GroupLike = None, *, timeout_s: float = MAX_ANSWER_S) -> Group:
    """The group of a process group, of a list of ranks, or (None) of all ranks; without torch.distributed, of this process alone.

    Make it once and keep it as long as torch's default process group: it counts the operations of its ranks. A list is sorted.
    Raises `KeyValueStoreLost` if the job's store does not answer, at the latest after `timeout_s`.
    """
    ranks = find_ranks(group)
    if len(ranks) == 1:
        return make_lone_group(ranks[0])
    return Group(ranks.index(dist.get_rank()), ranks, open_job_store(min(timeout_s, MAX_ANSWER_S)))


def find_ranks(group: GroupLike) -> tuple[int, ...]:
    """The ranks of a group as `make_group` takes it, by their numbers in the job and sorted; this process's is one of them."""
    if not _is_in_job():
        _check_alone(group)
        return (0,)
    ranks = _list_ranks(group)
    if dist.get_rank() not in ranks:
        raise InvalidOption(
            f"group: expected a group with this rank, found rank {dist.get_rank()} outside of {list(ranks)}; only members call"
        )
    return ranks


def job_token() -> object:
    """An object that stays the same as long as torch's default process group does, and is None without one.

    Compare it by `is` while holding it: groups that were made under another token belong to a job that has ended.
    """
    # A weak reference, for a process group that is held keeps its threads and sockets. Python has one of them per object.
    return weakref.ref(dist.group.WORLD) if _is_in_job() and dist.group.WORLD else None


def open_job_store(timeout_s: float = MAX_ANSWER_S) -> TorchKeyValueStore:
    """The store of the default process group through a connection of its own, so that no wait of the job and of ours meet."""
    store = TorchKeyValueStore(_find_default_store())
    try:
        return Caller().ask(partial(_connect, store), timeout_s)
    except (KeyValueStoreLost, NotImplementedError, AttributeError) as error:
        if isinstance(error, KeyValueStoreLost) and isinstance(error.__cause__, dist.DistError | None):
            raise  # no answer, or torch's word for a broken connection
        raise InvalidOption(
            f"torch.distributed: expected a store with clone, compare_set, check and delete_key, found that this job's "
            f"store fails ({error}); start the job with torchrun, or with init_method tcp://, file:// or env://"
        ) from error


def _connect(store: TorchKeyValueStore) -> TorchKeyValueStore:
    clone = store.clone()
    clone.get("anyshard/probe")
    return clone


def _is_in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_alone(group: GroupLike) -> None:
    if group is not None:
        raise InvalidOption(f"group: expected None outside torch.distributed, found {group!r}; call init_process_group first")
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:  # or each rank would save all by itself, to the same place
        raise InvalidOption(
            f"torch.distributed: expected it to be initialised in a job of {size} ranks (WORLD_SIZE), found that it is not; call "
            "init_process_group first. A process that is meant to save or load alone unsets WORLD_SIZE"
        )


def _list_ranks(group: GroupLike) -> tuple[int, ...]:
    if group is None:
        return tuple(range(dist.get_world_size()))
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    if not isinstance(group, Sequence):  # what torch gives to ranks that are no members
        return ()
    ranks = tuple(sorted(group))
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(dist.get_world_size())):
        raise InvalidOption(f"group: expected different ranks below {dist.get_world_size()}, found {list(group)}")
    return ranks


def _find_default_store() -> distributed_c10d.Store:
    # Public calls make new stores only, and the job's ranks have no other place in common.
    find = getattr(distributed_c10d, "_get_default_store", None)
    if find is None:
        raise InvalidOption(
            f"group: expected torch to tell its default store as up to 2.13, found that {torch.__version__} does not; "
            "use a release of anyshard that knows this torch"
        )
    store: distributed_c10d.Store = find()
    return store


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's network errors, and of verbs that a store lacks, are all of this kind
        raise KeyValueStoreLost(
            f"expected an answer of the job's key-value store, found {type(error).__name__}: {str(error).splitlines()[:1]}. The "
            "process that holds it (rank 0, or the agent of the launcher) has probably ended",
            {},
        ) from error

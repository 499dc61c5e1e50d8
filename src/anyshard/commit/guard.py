"""Guards: whether the create-if-absent of a store can be relied upon, found out by trying, once per site.

The checkpointer keeps them for all saves of the process; an offline operation makes its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Final, final

from anyshard.commit.probe import make_probe_id, survey_ground
from anyshard.commit.publish import PATIENT
from anyshard.errors import BlobExists, BlobNotFound, StorageError, StorageUnguarded
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.names import index_name
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.unguarded import KnownStore, UnguardedStore
from anyshard.threads import start_thread

logger = logging.getLogger(__name__)

# The warning for reports: what is missing at a place, what follows, and what to do.
UNGUARDED: Final = (
    "expected a store whose create-if-absent can be relied upon, found one that ignores or refuses the condition. Two saves to "
    "one place at a time are told from each other only by its listing, and nothing can be replaced. Let one job at a time save "
    "to a path, or use a store or a mount that honours it (docs/storage.md)"
)

_RACERS: Final = 4
# A key may have been deleted between two creates, by a clean of somebody else: a store is given up only after two keys.
_TRIES: Final = 2
_MEETING_S: Final = 5.0
_MAX_NBYTES: Final = 1 << 16


def as_it_is(store: Store) -> Store:
    """The same store: for who has settled it, or needs no guard."""
    return store


@final
class Guards:
    """What is known of the stores of this process, by site. Several threads may settle at once; a site is probed by one of them.

    Only the coordinator settles, before it begins an attempt.
    """

    def __init__(self) -> None:
        self.num_hits = 0
        self._found: dict[str, bool] = {}
        self._probing: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def settle(self, store: Store, *, required: bool, is_step: bool = True, events: Emitter = SILENT) -> Store:
        """The same place as a store that says whether it is `guarded`, with an honest `create` in either case.

        Where the store cannot say it, small keys are created twice at the place and removed again, unless a store on the same
        site was tried before. `is_step`: it is the place of a checkpoint, else of a run.

        Raises `StorageUnguarded` if `required` and it is not; what a save there would raise for the place
        itself (`NotACheckpoint`, ...); and the store's error if it does not answer, which is not remembered.
        """
        guarded = store.capabilities.guarded
        if guarded is None:
            guarded = self._find(store, is_step=is_step, events=events)
        if required and not guarded:
            raise StorageUnguarded(f"{store.url}: {UNGUARDED}; require_guarded=False saves all the same", file=store.url)
        if guarded:
            return store if store.capabilities.guarded else KnownStore(store, guarded=True)
        return store if isinstance(store, UnguardedStore) else UnguardedStore(store)

    def _find(self, store: Store, *, is_step: bool, events: Emitter) -> bool:
        site = store.site
        with self._lock:
            probing = self._probing.setdefault(site, threading.Lock())
        with probing:
            if (known := self._found.get(site)) is not None:
                with self._lock:
                    self.num_hits += 1
                return known
            self._found[site] = is_guarded = probe_guard(store, is_step=is_step)
        events.event("guard.probed", detail=f"{site}: {'guarded' if is_guarded else 'unguarded'}")
        return is_guarded


def probe_guard(store: Store, *, is_step: bool = True) -> bool:
    """Whether create-if-absent is heard at a place: a second create of a key, and all but one of several at once, are refused.

    "No" is sure: two creates of one key went through, or the store refuses the condition. "Yes" is sure only of creates that
    follow each other. That the store looks and writes in one step shows only by luck, when creates at the same moment meet
    between the two, so a store that does not may pass; the wider the gap, the rarer. Nor can it be seen whether other keys or
    other servers behind the same address are served alike.
    """
    generation = survey_ground(store, sections=(), is_step=is_step).generation
    store.prepare([])
    return any(_is_heard(store, generation) for _ in range(_TRIES))


def _is_heard(store: Store, generation: int) -> bool:
    try:
        with _probe_key(store, generation) as key:
            if not _is_first_kept(store, key):
                return False
        with _probe_key(store, generation) as key:
            return _wins_once(store, key)
    except StorageUnguarded:
        return False


@contextmanager
def _probe_key(store: Store, generation: int) -> Iterator[str]:
    """A new key that is known for what it is should it be left behind; it is removed at the end."""
    key = index_name(generation, make_probe_id())
    try:
        yield key
    finally:
        try:
            store.delete([key])
        except StorageError as error:
            logger.warning("%s: %s, made to try out the store, could not be removed: %s", store.url, key, error)


def _is_first_kept(store: Store, key: str) -> bool:
    first, second = _content(key, 1), _content(key, 2)
    if not _is_created(store, key, first):
        raise StorageError(f"{store.url}: {key}: expected a name that nobody has used to be free, found it taken", file=key)
    is_kept = not _is_created(store, key, second) and _read_back(store, key) == first
    if is_kept:
        _check_ranges(store, key, first)
    return is_kept


def _check_ranges(store: Store, key: str, data: bytes) -> None:
    """Some servers cannot read a part of a key as they should: better to know before there is a checkpoint to load."""
    found = bytearray(len(data) - 2)
    with store.open_blob(key) as reader:
        reader.read_into(1, memoryview(found))
    if found != data[1:-1]:
        raise StorageError(
            f"{store.url}: {key}: expected to read back a part of it, found other bytes. Use another store", file=key
        )


def _read_back(store: Store, key: str) -> bytes:
    for _ in PATIENT.looks():  # where reads lag behind writes
        with suppress(BlobNotFound):
            return store.read(key, max_nbytes=_MAX_NBYTES)
    return store.read(key, max_nbytes=_MAX_NBYTES)


def _wins_once(store: Store, key: str) -> bool:
    start, outcomes = threading.Barrier(_RACERS), SimpleQueue[bool | BaseException]()

    def race(number: int) -> None:
        with suppress(threading.BrokenBarrierError):  # not all could be started
            start.wait(_MEETING_S)
        try:
            outcomes.put(_is_created(store, key, _content(key, number)))
        except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again on the caller's
            outcomes.put(error)

    num_racing = sum(_start(race, number) for number in range(_RACERS))
    results = [outcomes.get() for _ in range(num_racing)]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results.count(True) <= 1


def _start(race: Callable[[int], None], number: int) -> bool:
    try:
        return start_thread(threading.Thread(target=race, args=(number,), name="anyshard-guard", daemon=True))
    except RuntimeError:  # the system has no thread to give: then fewer race
        return False


def _is_created(store: Store, key: str, data: bytes) -> bool:
    try:
        store.create(key, data, token=make_probe_id())
    except BlobExists:
        return False
    return True


def _content(key: str, number: int) -> bytes:
    return f"{key}: made by anyshard to try out create-if-absent, may be deleted ({number})\n".encode("ascii")

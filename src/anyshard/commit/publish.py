"""Publishing: create-if-absent of one generation's record, and finding out what became of it when the answer was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from anyshard.commit.listing import StepListing, list_step
from anyshard.commit.probe import is_probe_id
from anyshard.commit.resolve import SHOWN, Record, find_incomplete, read_record
from anyshard.errors import (
    BlobExists,
    BlobNotFound,
    CheckpointDamaged,
    CommitConflict,
    CommitOutcomeUnknown,
    LimitExceeded,
    StorageError,
    StorageUnavailable,
    UnsupportedFormat,
)
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest, encode_manifest
from anyshard.records.names import index_name, manifest_name
from anyshard.storage.protocol import Store

_MIN_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to ask for what must be there, by `clock`.

    `timeout_s`: for the record after an error of publishing, before its outcome is called unknown. `visibility_timeout_s` (or
    `timeout_s` if that is less): for what other hosts or a moment ago wrote, since mounts and listings may lag behind.
    """

    timeout_s: float = 60.0
    poll_s: float = 1.0
    visibility_timeout_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def visible_s(self) -> float:
        """How long what was made may stay unseen."""
        return min(self.visibility_timeout_s, self.timeout_s)

    def looks(self) -> Iterator[None]:
        """Yield for one look each, with growing pauses; the last one is when all has to be visible."""
        deadline, pause_s = self.clock() + self.visible_s, _MIN_PAUSE_S
        while True:
            is_last = (left_s := deadline - self.clock()) <= 0
            yield
            if is_last:
                return
            self.sleep(min(pause_s, self.poll_s, left_s))
            pause_s *= 2


PATIENT = Patience()


def go_ahead() -> None:
    """For who has nothing to decide."""


def publish(  # noqa: PLR0913 - what the caller decides, and its means
    store: Store,
    manifest: Manifest,
    *,
    decide: Callable[[], None] = go_ahead,
    hosts: Sequence[str] = (),
    patience: Patience = PATIENT,
    events: Emitter = SILENT,
) -> None:
    """Make the checkpoint of `manifest` exist; return only if it does and is the newest.

    `decide` is called once everything that can be checked is in order, right before the record is created; what it raises ends
    this with nothing published. `hosts[rank]` is the host that wrote the blobs of a rank; the coordinator, rank 0, calls this.

    Raises `BlobNotFound` (a file of it is not as it was written; nothing was published), `CommitConflict` (another writer took
    the generation), `CommitOutcomeUnknown` (may exist: delete nothing), or the store's error (does not exist).

    On a store that is not `guarded` at most one of several writers at a place creates a record: each makes its claim, the index,
    before it lists, goes on only with a listing that shows it, and gives up if the listing shows another claim. Of two claims one
    is made later, and a listing with that one shows the earlier one too. The earlier one is there as long as its writer may
    publish: only that writer removes it, when it has given up, or what follows a later generation, which is there first. What is
    assumed is that a listing with one key also shows those made before it; how far it lags does not matter. Where a store does
    not even keep that, two writers may both believe to have committed; one of their records stands, and its files are there.
    """
    listing = _list_whole(store, manifest, hosts, patience)
    refuse_rivals(store, listing, manifest.attempt, newest=listing.newest)
    decide()
    events.event("save.publish.begin", file=manifest_name(manifest.generation))
    create_record(store, manifest, patience=patience)
    _check_last(store, manifest)
    events.event("save.published", file=manifest_name(manifest.generation))


def create_record(store: Store, manifest: Manifest, *, patience: Patience = PATIENT) -> None:
    """Create the record of `manifest` if its generation is free, and be sure of the outcome whatever the store answers.

    After any error, "exists" included, the record is read back: ours is success (the answer was lost), another's is
    `CommitConflict`, none is the store's error, and one that stays unreadable is `CommitOutcomeUnknown`. After "exists" or
    `StorageUnavailable` "none" is no answer: the record is looked for during `visibility_timeout_s`, and then the outcome is
    unknown. For the request that was given up may still be on its way, and make a checkpoint of files that nobody may delete.
    """
    data = encode_manifest(manifest)
    try:
        store.create(manifest_name(manifest.generation), data, token=manifest.attempt)
    except StorageError as error:
        if not _comes_up(store, manifest.generation, data, patience=patience, error=error):
            raise
        _make_durable(store, manifest.generation)


def refuse_rivals(store: Store, listing: StepListing, attempt: str, *, newest: int) -> None:
    """On a store that is not `guarded`, raise `CommitConflict` if another attempt has its claim above generation `newest`."""
    if store.capabilities.guarded:
        return
    rivals = [owner for owner in listing.claims(newest) if owner.attempt != attempt and not is_probe_id(owner.attempt)]
    if rivals:
        raise CommitConflict(
            f"{store.url}: expected to be the only save here, found {index_name(*rivals[0])}: another save is under way or died "
            "there, and this store has no create-if-absent that would decide between them. Nothing was committed. If it is "
            "running, wait for it; else save to another path, or delete the files with that attempt in their names"
        )


def superseded(store: Store, generation: int, newest: int) -> CommitConflict:
    """The error of a save that aimed at `generation` while others came as far as `newest`."""
    return CommitConflict(
        f"{store.url}: expected to commit generation {generation}, found generation {newest} there already: another save, a "
        "delete or a clean came first while this one was writing. Its result stands; save again with overwrite=True"
    )


def _comes_up(store: Store, generation: int, data: bytes, *, patience: Patience, error: StorageError) -> bool:
    """Whether the record of `generation` is there and is `data`, after `error`; another one is a `CommitConflict`."""
    if _is_there(store, generation, data, patience):
        return True
    if not isinstance(error, (BlobExists, StorageUnavailable)):
        return False
    for _ in patience.looks():
        with suppress(StorageError):
            if (newest := list_step(store).newest) > generation:  # the record was there, and has been superseded and removed
                raise superseded(store, generation, newest)
        if _is_there(store, generation, data, patience):
            return True
    raise _unknown(store, generation, error) from error


def _is_there(store: Store, generation: int, data: bytes, patience: Patience) -> bool:
    """Whether the record of `generation` is there and is `data`; another one is a `CommitConflict`."""
    deadline = patience.clock() + patience.timeout_s
    while True:
        try:
            found = read_record(store, generation)
            if found is not None and found.data != data:
                raise _conflict(store, found)
        # A record that cannot be decoded may still be on its way (a store without atomic rename): it is no answer yet.
        except (StorageError, CheckpointDamaged, LimitExceeded) as unreadable:
            if patience.clock() >= deadline:
                raise _unknown(store, generation, unreadable) from unreadable
        else:
            return found is not None
        patience.sleep(patience.poll_s)


def _make_durable(store: Store, generation: int) -> None:
    # The error may have been one of syncing the directory: then a record that can be read need not outlive a power loss.
    try:
        store.prepare([])
    except StorageError as error:
        raise _unknown(store, generation, error) from error


def _list_whole(store: Store, manifest: Manifest, hosts: Sequence[str], patience: Patience) -> StepListing:
    """A listing with all files of `manifest`; what other hosts have just written may come up late."""
    for _ in patience.looks():
        listing = list_step(store)
        _check_first(store, manifest, listing)
        wrong = find_incomplete(manifest, listing)
        if not wrong:
            return listing
    raise _incomplete(store, manifest, wrong, hosts=hosts, waited_s=patience.visible_s)


def _check_first(store: Store, manifest: Manifest, listing: StepListing) -> None:
    # Before its files are missed: the winner's cleaning may have removed them. And a writer that slept through whole generations
    # would else take one whose record was removed meanwhile.
    if listing.newest >= manifest.generation:
        raise superseded(store, manifest.generation, listing.newest)


def _check_last(store: Store, manifest: Manifest) -> None:
    # As above, for a writer that slept between the listing and the creation. No answer changes nothing: the record is there.
    with suppress(StorageError):
        if read_record(store, manifest.generation + 1) is not None:
            raise superseded(store, manifest.generation, manifest.generation + 1)


def _incomplete(store: Store, manifest: Manifest, wrong: list[str], *, hosts: Sequence[str], waited_s: float) -> BlobNotFound:
    names = [line.split(":", 1)[0] for line in wrong]
    shown = "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    return BlobNotFound(
        f"{store.url}: nothing was committed, for {len(wrong)} file(s) just written are not there as written, "
        f"{waited_s:g} s after all ranks were done: {shown}. {_name_writers(manifest, set(names), hosts)}"
        "Another program removed them, or the directory is not the same on all hosts (it must be: a filesystem that all of them "
        "mount, or an object store); save again",
        file=names[0],
    )


def _name_writers(manifest: Manifest, names: set[str], hosts: Sequence[str]) -> str:
    """One sentence on who wrote files that are missed here, by host; nothing if the hosts are not known."""
    ranks = sorted({blob.rank for blob in manifest.blobs if blob.name in names and blob.rank < len(hosts)})
    if not ranks:
        return ""
    by_host = {hosts[rank]: [other for other in ranks if hosts[other] == hosts[rank]] for rank in ranks}
    writers = [f"{_name_ranks(of)} on {host}" for host, of in by_host.items()]
    more = f" and by ranks on {len(writers) - SHOWN} more hosts" if len(writers) > SHOWN else ""
    return f"They were written by {', '.join(writers[:SHOWN])}{more}, and are missed by the coordinator, on {hosts[0]}. "


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _conflict(store: Store, found: Record) -> CommitConflict:
    try:
        other = found.decode()
        winner = f"attempt {other.attempt} ({other.state}, written by {other.writer} on {other.time})"
    except UnsupportedFormat as newer:
        winner = f"a later release ({newer})"
    return CommitConflict(
        f"{store.url}: expected {manifest_name(found.generation)} to be free, found it taken by {winner}. That one stands and "
        "this save does not exist; save again with overwrite=True to replace it"
    )


def _unknown(store: Store, generation: int, error: Exception) -> CommitOutcomeUnknown:
    return CommitOutcomeUnknown(
        f"{store.url}: {manifest_name(generation)} could not be read back after an error of writing it, so the save may or may "
        f"not exist; nothing was deleted. Look again once the storage answers. Last error: {error}"
    )

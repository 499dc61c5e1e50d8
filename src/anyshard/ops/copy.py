"""`copy`: brings a whole committed checkpoint to another place, on any storage, byte for byte."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, final

from anyshard.checkpoint import read_records
from anyshard.commit.guard import Guards
from anyshard.commit.listing import DATA_PREFIX, StepListing, list_step
from anyshard.commit.parts import part_prefix, part_store
from anyshard.commit.publish import Patience as PublishPatience
from anyshard.commit.publish import create_record, publish
from anyshard.commit.resolve import Record, Resolved, look, named_files, not_ours, resolve
from anyshard.commit.saved_parts import find_part
from anyshard.engine.crew import Patience
from anyshard.errors import (
    CheckpointDamaged,
    CheckpointExists,
    CheckpointReplaced,
    CommitConflict,
    InvalidOption,
    StorageError,
    StorageStuck,
    UnsupportedFormat,
)
from anyshard.monitor.events import Emitter, Sink
from anyshard.ops.copy_claim import Claim, claim_prefix, remove_claims
from anyshard.ops.copying import BlobFile, BytesFile, CopiedFile, CopyJob, copy_files
from anyshard.ops.opening import TIMEOUT_S, operating
from anyshard.options import default_threads
from anyshard.records.manifest import Manifest, StepState, decode_manifest, encode_manifest
from anyshard.records.names import make_attempt, manifest_name, parse_name
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers.forward import WrapperStore
from anyshard.storage.wrappers.timed import TimedStore

_NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A checkpoint that is at `target` as it is at `source`: both are what the user called them, without credentials.

    `num_files` and `nbytes` count all its files, the manifest too. `copied_nbytes` were sent by this call; `kept` names the files
    that were there already.
    """

    source: str
    target: str
    step: int | None
    num_files: int
    nbytes: int
    copied_nbytes: int
    kept: tuple[str, ...]
    duration_s: float

    def __str__(self) -> str:
        kept = f", {len(self.kept)} were there already" if self.kept else ""
        return (
            f"{self.source} -> {self.target}: step {self.step}, {self.num_files} files of {self.nbytes / 1e6:.1f} MB{kept}; "
            f"{self.copied_nbytes / 1e6:.1f} MB copied in {self.duration_s:.3f} s"
        )


def copy(  # noqa: PLR0913 - two places, each with its options, and how to go about it
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    verify: Literal["all", "source"] = "all",
    threads: int | None = None,
    storage_options: Mapping[str, Any] = _NO_OPTIONS,
    target_options: Mapping[str, Any] = _NO_OPTIONS,
    timeout_s: float = TIMEOUT_S,
    sinks: Sequence[Sink] = (),
) -> CopyReport:
    """Copy the checkpoint that readers find at `source` to `target`, byte for byte: it is there whole, or not at all.

    Every byte is compared with its digest before it is written. The manifest comes last, by create-if-absent, once all files are
    there with their lengths. `verify="all"` also reads each file back from the target and compares it: all bytes move three times
    instead of twice (and on a local disk some may come out of its cache). `verify="source"` does not. Up to `threads` blocks of
    16 MiB are under way (default: ANYSHARD_STORAGE_THREADS, else 8). `storage_options` are for the source, `target_options` for
    the target.

    A copy that died is finished by the same call: what is there is read back in full, in either mode, and only what is missing or
    not as it should be is sent. Such a file is deleted first. No checkpoint misses it: its name holds the attempt, and the one
    record by which that attempt could count at the target is not there. A second copy to the same place takes over from the first
    one, which then ends with `CommitConflict` (or finds that all is done).

    If the same checkpoint is at the target, nothing is copied but files that it lacks; with `verify="all"` all of it is read.
    There is no overwrite: heads and tails of blobs hold the generation and the attempt that they were written for, so a copy
    cannot have other names, and beside a record of the same or a later generation it would not count. A step that was deleted at
    an earlier generation is no hindrance. Of a step in parts each part is copied in this way, then the record of the step.

    Raises `CheckpointExists`, `NotACheckpoint` (foreign files are there, as for a save), `CheckpointDamaged` (the source is: it
    names file and addresses), `CheckpointReplaced` or `CheckpointNotFound` (the source was saved over or deleted meanwhile),
    `StorageError`; then nothing was published.
    """
    _check_options(verify, threads, timeout_s)
    with operating(target, sinks, target_options, timeout_s=timeout_s) as operation:
        events = operation.events
        origin = TimedStore(open_store(source, storage_options=storage_options, events=events), timeout_s)
        means = _Means(verify == "all", threads or default_threads(), Patience(timeout_s), events)
        with events.span("copy"):
            resolved = resolve(origin)
            if resolved.manifest.parts:
                return _copy_parts(origin, operation.store, resolved, means)
            return _Copy(origin, operation.store, means, resolved).run()


def _check_options(verify: str, threads: int | None, timeout_s: float) -> None:
    if verify not in ("all", "source"):
        raise InvalidOption(f"verify: expected 'all' or 'source', found {verify!r}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidOption(f"threads: expected a whole number above 0, or None, found {threads!r}")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidOption(f"timeout_s: expected a number of seconds above 0, found {timeout_s!r}")


@dataclass(frozen=True, slots=True)
class _Means:
    reads_back: bool
    threads: int
    patience: Patience
    events: Emitter


@final
class _Copy:
    """One copy: what is at the source, and the steps by which it comes to the target."""

    def __init__(self, source: Store, target: Store, means: _Means, resolved: Resolved) -> None:
        self._started_s = time.perf_counter()
        self._source = source
        self._target = target
        self._means = means
        self._records = read_records(source, resolved)
        self._manifest = _decode_verbatim(source, self._records.manifest, file=self._records.file)

    def run(self) -> CopyReport:
        """Copy what the target lacks and publish, unless that was done before."""
        try:
            is_there, listing = self._judge()
            return self._complete(listing) if is_there else self._bring_all()
        except (CommitConflict, StorageError) as error:  # perhaps as another copy of the same checkpoint was quicker
            done = None if isinstance(error, StorageStuck) else self._find_done()
            if done is None:
                raise
            return self._complete(done)
        except CheckpointDamaged as damage:
            self._explain(damage)
            raise

    def _judge(self) -> tuple[bool, StepListing]:
        """Whether this very checkpoint is at the target; another one, or what is foreign, is an error."""
        return _judge(self._target, self._manifest, self._records.manifest)

    def _find_done(self) -> StepListing | None:
        with suppress(StorageError):
            is_there, listing = self._judge()
            return listing if is_there else None
        return None

    def _complete(self, listing: StepListing) -> CopyReport:
        """Bring the files that a committed copy lacks, as a copy by other programs may; remove none."""
        found = {entry.key: entry.nbytes for _, entry in listing.entries()}
        as_listed = tuple(file.name for file in self._files if found.get(file.name) == file.nbytes)
        if len(as_listed) < len(self._files):
            self._target.prepare(self._directories)
        trusted = () if self._means.reads_back else as_listed
        files = [file for file in self._files if file.name not in trusted]
        outcome = copy_files(self._make_job(may_remove=False), files, there=found)
        remove_claims(self._target, listing, self._manifest.generation)
        kept = {*outcome.kept, *trusted}
        names = [file.name for file in self._files if file.name in kept]
        return self._report([*names, self._records.file], outcome.copied_nbytes)

    def _bring_all(self) -> CopyReport:
        self._target = Guards().settle(self._target, required=False, events=self._means.events)
        claim = Claim(self._target, self._manifest.generation)
        self._target.prepare(sorted({claim_prefix(), *self._directories}))
        with claim.held(self._make_job(reads_back=False)):
            there = {entry.key for _, entry in list_step(self._target).entries()}
            outcome = copy_files(self._make_job(check_right=claim.check), self._files, there=there)
            self._publish(claim)
        return self._report(outcome.kept, outcome.copied_nbytes + len(self._records.manifest))

    def _publish(self, claim: Claim) -> None:
        def decide() -> None:
            claim.check()
            self._judge()

        decide()  # its errors say more than those of the checks that `publish` begins with
        events, file = self._means.events, self._records.file
        events.event("copy.publish.begin", file=file)
        patience = PublishPatience(timeout_s=min(PublishPatience().timeout_s, self._means.patience.timeout_s))
        publish(_FreshTokens(self._target, claim.id), self._manifest, decide=decide, patience=patience)
        events.event("copy.published", file=file)

    def _explain(self, damage: CheckpointDamaged) -> None:
        """Raise what explains that the source is not as its manifest says: saved over, or `CheckpointNotFound`: deleted."""
        with suppress(StorageError, CheckpointDamaged):
            if resolve(self._source).data != self._records.manifest:
                raise CheckpointReplaced(
                    f"{self._source.url}: it was saved over while it was being copied, and files of it are gone; copy it again"
                ) from damage

    @cached_property
    def _files(self) -> tuple[CopiedFile, ...]:
        index, blobs = self._manifest.index, self._manifest.blobs
        first = () if index is None else (BytesFile(index.name, self._records.index),)
        return (*first, *(BlobFile(self._source, self._manifest, blob) for blob in blobs))

    @property
    def _directories(self) -> list[str]:
        return sorted({DATA_PREFIX, *(f"{blob.name.rpartition('/')[0]}/" for blob in self._manifest.blobs)})

    def _make_job(self, **changes: Any) -> CopyJob:
        means = self._means
        job = CopyJob(self._target, means.threads, means.patience, reads_back=means.reads_back, events=means.events)
        return replace(job, **changes)

    def _report(self, kept: Sequence[str], copied_nbytes: int) -> CopyReport:
        return CopyReport(
            source=self._source.url,
            target=self._target.url,
            step=self._manifest.step,
            num_files=len(self._files) + 1,
            nbytes=sum(file.nbytes for file in self._files) + len(self._records.manifest),
            copied_nbytes=copied_nbytes,
            kept=tuple(kept),
            duration_s=time.perf_counter() - self._started_s,
        )


def _copy_parts(source: Store, target: Store, resolved: Resolved, means: _Means) -> CopyReport:
    """Copy each part that the record of a step names, then that record, so that the step exists once all of them are there."""
    started_s, data = time.perf_counter(), resolved.data
    manifest = _decode_verbatim(source, data, file=manifest_name(resolved.manifest.generation))
    _judge(target, manifest, data)
    names = [entry.name for entry in manifest.parts]
    parts = [_copy_part(find_part(source, name, published=True), part_store(target, name), means) for name in names]
    is_there, _ = _judge(target, manifest, data)
    if not is_there:
        settled = Guards().settle(target, required=False, events=means.events)
        create_record(_FreshTokens(settled, make_attempt()), manifest)
        means.events.event("copy.published", file=manifest_name(manifest.generation))
    kept = [part_prefix(name) + key for name, part in zip(names, parts, strict=True) for key in part.kept]
    return CopyReport(
        source=source.url,
        target=target.url,
        step=manifest.step,
        num_files=sum(part.num_files for part in parts) + 1,
        nbytes=sum(part.nbytes for part in parts) + len(data),
        copied_nbytes=sum(part.copied_nbytes for part in parts) + (0 if is_there else len(data)),
        kept=(*kept, *([manifest_name(manifest.generation)] if is_there else [])),
        duration_s=time.perf_counter() - started_s,
    )


def _copy_part(source: Store, target: Store, means: _Means) -> CopyReport:
    return _Copy(source, target, means, resolve(source)).run()


def _judge(target: Store, manifest: Manifest, data: bytes) -> tuple[bool, StepListing]:
    """Whether this very record is at the target; another one that stands, or what is foreign, is an error."""
    listing, newest = look(target)
    if newest is None and listing.is_foreign:
        raise not_ours(target, listing)
    if newest is not None and newest.data != data:
        _check_passable(target, newest, manifest)
    return newest is not None and newest.data == data, listing


def _decode_verbatim(source: Store, data: bytes, *, file: str) -> Manifest:
    """The manifest, of which publishing makes the same bytes again."""
    manifest = decode_manifest(data, file=file)
    if encode_manifest(manifest) != data:
        raise UnsupportedFormat(
            f"{source.url}: {file}: expected the manifest as this release would write it, found more in it, written by "
            f"{manifest.writer!r}. Copy it with that release or a later one",
        )
    return manifest


def _check_passable(target: Store, newest: Record, manifest: Manifest) -> None:
    """Raise `CheckpointExists` unless `newest` says that the step was deleted, at a generation before all of the copy's."""
    first = _first_generation(manifest)
    advice = "A copy keeps its names and replaces nothing: copy to another place"
    try:
        found = newest.decode()
    except CheckpointDamaged as damage:
        raise CheckpointExists(f"{target.url}: a damaged checkpoint is there ({damage}). {advice}") from damage
    if found.state is not StepState.DELETED:
        raise CheckpointExists(f"{target.url}: another checkpoint (step {found.step}, saved on {found.time}) is there. {advice}")
    if found.generation >= first:
        raise CheckpointExists(
            f"{target.url}: expected no record of generation {first} or later, found that generation "
            f"{found.generation} deleted a step there, on {found.time}: the copy would not count. {advice}, or wait until "
            "anyshard.ops.clean removes that record"
        )


def _first_generation(manifest: Manifest) -> int:
    """The lowest generation in the names of a checkpoint: below a later record its files would be leftovers while they come."""
    names = (parse_name(name) for name in named_files(manifest))
    return min((name.generation for name in names if name is not None), default=manifest.generation)


@final
class _FreshTokens(WrapperStore):
    """A store whose temporaries carry this copy's id, not the attempt: one that died may have left some of the latter."""

    def __init__(self, inner: Store, token: str) -> None:
        super().__init__(inner)
        self._token = token

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """As the inner store, with the other token."""
        super().create(key, data, token=self._token)

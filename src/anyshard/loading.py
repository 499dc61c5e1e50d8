"""The road of a load: commit (resolve) -> engine (records) -> adapters -> planning -> engine (fill) -> adapters (apply).

The coordinator reads the records for all ranks; each reads the values, finds out what it wants and where that lies, and opens the
blobs that hold it. Up to the fill nothing of the app state has changed on any rank, and every error says so. From there on an
error on any rank is `LoadInterrupted` on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from anyshard.adapters.module_load import PASSED_OVER
from anyshard.adapters.target import LoadTarget, plan_load
from anyshard.checkpoint import Checkpoint, ReadingMeans, hear_records, read_records, tell_records
from anyshard.coord.agreement import Agreement
from anyshard.coord.looks import Rarely
from anyshard.errors import (
    Difference,
    KeyValueStoreLost,
    LoadInterrupted,
    Mismatch,
    OperationFailed,
    StateMismatch,
    make_failure,
)
from anyshard.operation import Operation
from anyshard.options import LoadOptions
from anyshard.planning.surplus import encode_surplus, find_common, list_surplus, number_addresses
from anyshard.records.addresses import Globs, component, section_of, show
from anyshard.records.captured import StoredRun
from anyshard.records.load_plan import LoadPlan
from anyshard.records.manifest import Parent
from anyshard.records.rank_messages import Message, read_message
from anyshard.records.regions import decompose_run
from anyshard.records.thinner import explain_gone
from anyshard.reports import LoadReport

_COMPARED_ELEMENTS = 1 << 22  # of each of two tied tensors at a time
_SHOWN = 8

_Box: TypeAlias = tuple[list[int], list[int]]  # offsets and lengths


class _Ready(Message, frozen=True):
    """A rank may fill: which sections it asked for, the digest of what they hold that it does not take, and idle globs."""

    sections: tuple[str, ...]
    surplus: str
    unmatched: tuple[str, ...]
    unmatched_exclude: tuple[str, ...]


class _Fill(Message, frozen=True):
    """All ranks may fill: what none of them takes (see planning/surplus.py), and globs of `exclude` that chose nothing on any."""

    unexpected: bytes = b""
    extra_state: tuple[str, ...] = ()
    unmatched_exclude: tuple[str, ...] = ()


class LoadOperation:
    """One load of a group. `parent` is the checkpoint that was loaded, once `run` has returned."""

    def __init__(self, operation: Operation, options: LoadOptions, means: ReadingMeans) -> None:
        self._operation = operation
        self._group = operation.group
        self._options = options
        self._means = means
        self._is_begun = False  # once any rank may have begun to fill
        self._touched: tuple[str, ...] | None = None  # the live addresses, once this rank may have
        self.parent: Parent | None = None

    def run(self, app_state: Mapping[str, object]) -> LoadReport:
        """Check everything, then fill the tensors, then set the values and run the hooks."""
        subject = self._operation.describe("load of")
        try:
            with self._operation.agree(subject, timeout_s=self._options.timeout_s) as agreement:
                return self._load(agreement, app_state)
        except OperationFailed as failure:
            if not self._is_begun or isinstance(failure, LoadInterrupted):
                raise
            raise self._interrupted(failure) from failure

    def _load(self, agreement: Agreement, app_state: Mapping[str, object]) -> LoadReport:
        with self._open(agreement) as checkpoint:
            with agreement.phase("adapt"):
                target, plan = self._prepare(checkpoint, app_state)
            common = self._agree_to_fill(agreement, checkpoint, target, tuple(app_state))
            with agreement.phase("fill"), self._interrupting():
                with self._operation.events.span("load.fill", nbytes=plan.read_nbytes):
                    checkpoint.blobs.fill(plan, target.destinations)
                with self._operation.events.span("load.apply"):
                    target.apply()
            agreement.post("filled", b"")
            if self._group.is_coordinator:
                agreement.collect("filled")
            agreement.decide()
            manifest = checkpoint.manifest
            self.parent = Parent(manifest.run_id, manifest.step, manifest.attempt)
            return self._report(checkpoint, target, plan, common)

    @contextmanager
    def _open(self, agreement: Agreement) -> Iterator[Checkpoint]:
        """The checkpoint that the coordinator has found, the same on all ranks."""
        store = self._operation.store
        with agreement.phase("resolve"):
            if self._group.is_coordinator:
                records = read_records(store)
                agreement.announce("records", tell_records(records))
            else:
                records = hear_records(agreement.hear("records"), store)
            job = replace(self._means.job, check=Rarely(agreement.check))
            checkpoint = Checkpoint(store, records, means=replace(self._means, job=job))
        with checkpoint:
            yield checkpoint

    def _prepare(self, checkpoint: Checkpoint, app_state: Mapping[str, object]) -> tuple[LoadTarget, LoadPlan]:
        events = self._operation.events
        sections = [name for name in checkpoint.sections if name in app_state and self._can_want(checkpoint, component(name))]
        with events.span("load.records"):
            stored = checkpoint.stored(sections)
        with events.span("load.adapt"), _explaining(checkpoint):
            target = plan_load(
                app_state,
                stored,
                options=self._options,
                registry=self._means.registry,
                checkpoint=checkpoint.url,
                rank=self._group.rank,
                world_size=self._group.size,
            )
        with events.span("load.plan"):
            plan = checkpoint.plan(target.wanted)
        self._check_first(checkpoint, target, plan)
        return target, plan

    def _can_want(self, checkpoint: Checkpoint, address: str) -> bool:
        """Whether `only` and `exclude` may let through anything of a section; one of which they do not is not even read."""
        if self._options.only:
            return Globs(self._options.only).can_match_in(address)
        excluded = Globs(self._options.exclude)
        is_tensor = address in checkpoint.index.shards.tensors.rows
        return not (excluded.match(address) if is_tensor else excluded.match_all_below(address))

    # ---------------------------------------------------------------------------------------------------------- the checks

    def _check_first(self, checkpoint: Checkpoint, target: LoadTarget, plan: LoadPlan) -> None:
        if target.ties:
            with self._operation.events.span("load.compare_ties"):
                _compare_ties(checkpoint, target)
        if self._options.verify == "first":
            with self._operation.events.span("load.verify", nbytes=plan.read_nbytes):
                checkpoint.blobs.verify(plan)

    def _agree_to_fill(self, agreement: Agreement, checkpoint: Checkpoint, target: LoadTarget, names: tuple[str, ...]) -> _Fill:
        """Return once every rank has found that it can load, and nothing that was asked for is left without a taker."""
        asked = tuple(name for name in checkpoint.sections if name in names)
        surplus = self._share_surplus(agreement, checkpoint, target)
        agreement.post("ready", _Ready(asked, surplus, target.unmatched, target.unmatched_exclude).encode())
        with self._noticing_fill(agreement), agreement.phase("check"):
            if self._group.is_coordinator:
                posts = [read_message(post, _Ready) for post in agreement.collect("ready")]
                fill = self._judge(agreement, checkpoint, posts)
                agreement.check()
                self._is_begun = True  # others may hear it before this rank does
                agreement.announce("fill", fill.encode())
            common = read_message(agreement.hear("fill"), _Fill)
        self._is_begun, self._touched = True, tuple(dict.fromkeys(target.names))
        return common

    @contextmanager
    def _noticing_fill(self, agreement: Agreement) -> Iterator[None]:
        """Where this rank fails, or hears of a failure: others may have heard before that they may fill."""
        try:
            yield
        except KeyValueStoreLost:
            raise
        except OperationFailed:
            self._is_begun = self._is_begun or agreement.was_announced("fill")
            raise

    def _share_surplus(self, agreement: Agreement, checkpoint: Checkpoint, target: LoadTarget) -> str:
        """The digest under which others find what this rank does not take; empty for nothing."""
        if not target.surplus and not target.surplus_extra_state:
            return ""
        numbers = number_addresses(checkpoint.addresses())
        return agreement.share(encode_surplus(target.surplus, target.surplus_extra_state, numbers))

    def _judge(self, agreement: Agreement, checkpoint: Checkpoint, posts: Sequence[_Ready]) -> _Fill:
        """What no rank takes is a difference if the load is strict, as it is where there is one process."""
        unmatched, unmatched_exclude = (
            tuple(sorted(set.intersection(*map(set, globs))))
            for globs in ([post.unmatched for post in posts], [post.unmatched_exclude for post in posts])
        )
        if not any(post.surplus for post in posts):
            self._refuse(checkpoint.url, (), (), unmatched)
            return _Fill(unmatched_exclude=unmatched_exclude)
        numbers = number_addresses(checkpoint.addresses())
        told = dict.fromkeys((post.sections, post.surplus) for post in posts)
        nothing = encode_surplus((), (), numbers)
        lists = ((sections, agreement.fetch(digest) if digest else nothing) for sections, digest in told)
        unexpected, extra_state = find_common(lists, numbers)
        self._refuse(checkpoint.url, unexpected, extra_state, unmatched)
        return _Fill(encode_surplus(unexpected, (), numbers) if unexpected else b"", extra_state, unmatched_exclude)

    def _refuse(self, url: str, unexpected: Sequence[str], extra_state: Sequence[str], unmatched: Sequence[str]) -> None:
        """Raise `StateMismatch` if the options do not let pass what no rank takes."""
        options = self._options
        lists = (
            (Mismatch.UNEXPECTED, unexpected if options.strict else (), "in the app state of a rank", "only in the checkpoint"),
            (Mismatch.UNEXPECTED, extra_state if options.strict_extra_state else (), "extra state on both sides", PASSED_OVER),
            (Mismatch.MISSING, unmatched, "an address that this glob of only= matches", "none"),
        )
        differences = tuple(Difference(kind, at, *texts) for kind, addresses, *texts in lists for at in addresses)
        if differences:
            hint = "strict=False passes over unexpected addresses; only= and exclude= choose addresses."
            raise StateMismatch(url, differences, hint)

    # ------------------------------------------------------------------------------------------------------------ the fill

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._interrupted(error) from error
        except BaseException as interrupt:  # Ctrl-C stays what it is
            interrupt.add_note(self._describe_half())
            raise

    def _interrupted(self, cause: Exception) -> Exception:
        half = self._describe_half()
        if not isinstance(cause, OperationFailed):
            return LoadInterrupted(f"{half} Cause: {cause}", addresses=self._touched or ())
        error = make_failure(f"{half} Cause: {cause.headline}", cause.failures, kinds=(LoadInterrupted.__name__,))
        vars(error).update(addresses=self._touched or ())
        return error

    def _describe_half(self) -> str:
        names, url = self._touched, self._operation.store.url
        if names is None:
            return (
                f"{url}: the load failed when other ranks may have begun to fill their app states. Nothing has changed on this "
                "rank, but the ranks may not fit together now. Load a checkpoint in full on all of them before you go on."
            )
        shown = ", ".join(map(show, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return (
            f"{url}: the load failed after it had begun to fill the app state, which is undefined now "
            f"({shown}). Load a checkpoint in full before you use it."
        )

    def _report(self, checkpoint: Checkpoint, target: LoadTarget, plan: LoadPlan, common: _Fill) -> LoadReport:
        manifest = checkpoint.manifest
        idle = tuple(f"exclude={glob!r} matched no address" for glob in common.unmatched_exclude)
        passed_over = tuple(f"{show(at)}: {PASSED_OVER}" for at in common.extra_state)
        unexpected = list_surplus(common.unexpected, number_addresses(checkpoint.addresses())) if common.unexpected else ()
        return LoadReport(
            url=checkpoint.url,
            step=manifest.step,
            generation=manifest.generation,
            attempt=manifest.attempt,
            num_tensors=len(set(target.names)),
            nbytes=int((plan.items.lengths.prod(axis=1) * plan.items.itemsize).sum()),
            read_nbytes=plan.read_nbytes,
            duration_s=self._operation.duration_s,
            missing=target.missing,
            unexpected=target.unexpected + unexpected,
            not_asked_for=target.not_asked_for,
            replaced_values=target.replaced_values,
            created=target.created,
            warnings=target.warnings + passed_over + idle + _find_gone(checkpoint, target.missing),
        )


@contextmanager
def _explaining(checkpoint: Checkpoint) -> Iterator[None]:
    """Say of what is missing that it was there once, if so."""
    try:
        yield
    except StateMismatch as mismatch:
        missing = [one.address for one in mismatch.differences if one.kind is Mismatch.MISSING]
        for gone in _find_gone(checkpoint, missing):
            raise StateMismatch(checkpoint.url, mismatch.differences, f"{gone}.") from mismatch
        raise


def _find_gone(checkpoint: Checkpoint, missing: Sequence[str]) -> tuple[str, ...]:
    """What a thinned checkpoint has no more of what is missing, in one sentence; nothing if it never had it."""
    gone = explain_gone(checkpoint.manifest, {section_of(address) for address in missing})
    return (gone,) if gone else ()


def _compare_ties(checkpoint: Checkpoint, target: LoadTarget) -> None:
    unequal = tuple(
        Difference(
            Mismatch.TIE,
            one.address,
            "the same bytes under both names, since one place of the app state takes both",
            f"other bytes in {show(other.address)}",
        )
        for one, other in target.ties
        if not _are_equal(checkpoint, one, other)
    )
    if unequal:
        hint = "Load into an app state that has a place for each, or exclude one of the names."
        raise StateMismatch(checkpoint.url, unequal, hint)


def _are_equal(checkpoint: Checkpoint, one: StoredRun, other: StoredRun) -> bool:
    """Whether two runs have the same bytes. They are read in parts wherever those of both are parts of what is stored."""
    boxes, others = _find_boxes(checkpoint, one), _find_boxes(checkpoint, other)
    if one.dims == other.dims and [lengths for _, lengths in boxes] == [lengths for _, lengths in others]:
        pairs = (pair for box, its in zip(boxes, others, strict=True) for pair in zip(_cut(box), _cut(its), strict=True))
        return all(_read_box(checkpoint, one, box) == _read_box(checkpoint, other, its) for box, its in pairs)
    num = one.stop - one.start
    step = _COMPARED_ELEMENTS if one.dims == other.dims == tuple(sorted(one.dims)) else max(num, 1)
    parts = ((first, min(first + step, num)) for first in range(0, num, step))
    return all(_read_run(checkpoint, one, *part) == _read_run(checkpoint, other, *part) for part in parts)


def _find_boxes(checkpoint: Checkpoint, run: StoredRun) -> list[_Box]:
    """The regions of the stored tensor that a run consists of, in its order."""
    shape, back = checkpoint[run.address].shape, np.argsort(run.dims)
    offsets, lengths = decompose_run(tuple(shape[dim] for dim in run.dims), run.start, run.stop)
    return list(zip(offsets[:, back].tolist(), lengths[:, back].tolist(), strict=True))


def _cut(box: _Box) -> Iterator[_Box]:
    """Parts of a region, none larger than what is compared at a time, in the order in which it is stored."""
    offsets, lengths = box
    num = math.prod(lengths)
    for first in range(0, num, _COMPARED_ELEMENTS):
        within = decompose_run(tuple(lengths), first, min(first + _COMPARED_ELEMENTS, num))
        for offset, length in zip(*within, strict=True):
            yield [at + by for at, by in zip(offsets, offset.tolist(), strict=True)], length.tolist()


def _read_run(checkpoint: Checkpoint, run: StoredRun, first: int, stop: int) -> bytes:
    part = replace(run, start=run.start + first, stop=run.start + stop)
    return b"".join(_read_box(checkpoint, run, box) for box in _find_boxes(checkpoint, part))


def _read_box(checkpoint: Checkpoint, run: StoredRun, box: _Box) -> bytes:
    bits: bytes = checkpoint[run.address].bits(*box).transpose(run.dims).tobytes()
    return bits

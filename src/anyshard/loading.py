"""The road of a load: commit (resolve) -> engine (records) -> adapters -> planning -> engine (fill) -> adapters (apply).

The coordinator reads the records for all ranks; each opens the blobs, finds out what it wants and where that lies. Up to the fill
nothing of the app state has changed on any rank, and every error says so. From there on an error on any rank is `LoadInterrupted`
on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from anyshard.adapters.modules import is_extra_state
from anyshard.adapters.target import LoadTarget, plan_load
from anyshard.checkpoint import Checkpoint, ReadingMeans, Records, read_records
from anyshard.coord.agreement import Agreement
from anyshard.engine.read import OpenBlobs
from anyshard.errors import Difference, LoadInterrupted, Mismatch, OperationFailed, StateMismatch
from anyshard.operation import Operation
from anyshard.options import LoadOptions
from anyshard.records.addresses import Globs, component, section_of, show
from anyshard.records.captured import StoredRun
from anyshard.records.load_plan import LoadPlan
from anyshard.records.manifest import Parent
from anyshard.records.regions import decompose_run
from anyshard.records.save_messages import Message, read_message
from anyshard.reports import LoadReport

_COMPARED_ELEMENTS = 1 << 22  # of each of two tied tensors at a time
_SHOWN = 8


class _Ready(Message, frozen=True):
    """A rank may fill: which sections it asked for, what they hold that it does not take, and globs that chose nothing on it."""

    sections: tuple[str, ...]
    surplus: tuple[str, ...]
    unmatched: tuple[str, ...]
    unmatched_exclude: tuple[str, ...]


class _Fill(Message, frozen=True):
    """All ranks may fill: what none of them takes, and globs of `exclude` that chose nothing on any."""

    unexpected: tuple[str, ...] = ()
    unmatched_exclude: tuple[str, ...] = ()


class LoadOperation:
    """One load of a group. `parent` is the checkpoint that was loaded, once `run` has returned."""

    def __init__(self, operation: Operation, options: LoadOptions, means: ReadingMeans) -> None:
        self._operation = operation
        self._group = operation.group
        self._options = options
        self._means = means
        self._touched: tuple[str, ...] | None = None  # the live addresses, once the fill has begun
        self.parent: Parent | None = None

    def run(self, app_state: Mapping[str, object]) -> LoadReport:
        """Check everything, then fill the tensors, then set the values and run the hooks."""
        subject = self._operation.describe("load of")
        try:
            with self._operation.agree(subject, timeout_s=self._options.timeout_s) as agreement:
                return self._load(agreement, app_state)
        except OperationFailed as failure:
            if self._touched is None or isinstance(failure, LoadInterrupted):
                raise
            raise self._interrupted(failure) from failure

    def _load(self, agreement: Agreement, app_state: Mapping[str, object]) -> LoadReport:
        with self._open(agreement) as checkpoint:
            with agreement.phase("adapt"):
                target, plan, blobs = self._prepare(checkpoint, app_state)
            common = self._agree_to_fill(agreement, checkpoint, target, tuple(app_state))
            with agreement.phase("fill"), self._interrupting():
                with self._operation.events.span("load.fill", nbytes=plan.read_nbytes):
                    blobs.fill(plan, target.destinations)
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
                agreement.announce("records", records.encode())
            else:
                records = read_message(agreement.hear("records"), Records)
            checkpoint = Checkpoint(store, records, means=self._means)
        with checkpoint:
            yield checkpoint

    def _prepare(self, checkpoint: Checkpoint, app_state: Mapping[str, object]) -> tuple[LoadTarget, LoadPlan, OpenBlobs]:
        events = self._operation.events
        sections = [name for name in checkpoint.sections if name in app_state and self._can_want(checkpoint, component(name))]
        with events.span("load.records"):
            blobs = checkpoint.open_sections(sections)
            stored = checkpoint.stored(sections)
        with events.span("load.adapt"):
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
            plan = checkpoint.plan(target.wanted, blobs)
        self._check_first(checkpoint, target, plan, blobs)
        return target, plan, blobs

    def _can_want(self, checkpoint: Checkpoint, address: str) -> bool:
        """Whether `only` and `exclude` may let through anything of a section; one of which they do not is not even opened."""
        if self._options.only:
            return Globs(self._options.only).can_match_in(address)
        excluded = Globs(self._options.exclude)
        is_tensor = address in checkpoint.index.shards.tensors.rows
        return not (excluded.match(address) if is_tensor else excluded.match_all_below(address))

    # ---------------------------------------------------------------------------------------------------------- the checks

    def _check_first(self, checkpoint: Checkpoint, target: LoadTarget, plan: LoadPlan, blobs: OpenBlobs) -> None:
        if target.ties:
            with self._operation.events.span("load.compare_ties"):
                _compare_ties(checkpoint, target)
        if self._options.verify == "first":
            with self._operation.events.span("load.verify", nbytes=plan.read_nbytes):
                blobs.verify(plan)

    def _agree_to_fill(self, agreement: Agreement, checkpoint: Checkpoint, target: LoadTarget, names: tuple[str, ...]) -> _Fill:
        """Return once every rank has found that it can load, and nothing that was asked for is left without a taker."""
        asked = tuple(name for name in checkpoint.sections if name in names)
        agreement.post("ready", _Ready(asked, target.surplus, target.unmatched, target.unmatched_exclude).encode())
        with agreement.phase("check"):
            if self._group.is_coordinator:
                posts = [read_message(post, _Ready) for post in agreement.collect("ready")]
                agreement.announce("fill", self._judge(checkpoint.url, posts).encode())
            common = read_message(agreement.hear("fill"), _Fill)
        self._touched = tuple(dict.fromkeys(target.names))
        return common

    def _judge(self, url: str, posts: Sequence[_Ready]) -> _Fill:
        """What no rank takes is a difference if the load is strict, as it is where there is one process."""
        unexpected = _find_unexpected(posts)
        unmatched, unmatched_exclude = (
            _find_common([set(globs) for globs in lists])
            for lists in ([post.unmatched for post in posts], [post.unmatched_exclude for post in posts])
        )
        refused = [at for at in unexpected if self._options.strict or is_extra_state(at)]
        kept = [
            *(Difference(Mismatch.UNEXPECTED, at, "in the app state of a rank", "only in the checkpoint") for at in refused),
            *(Difference(Mismatch.MISSING, at, "an address that this glob of only= matches", "none") for at in unmatched),
        ]
        if kept:
            hint = "strict=False passes over unexpected addresses; only= and exclude= choose addresses."
            raise StateMismatch(url, tuple(kept), hint)
        return _Fill(unexpected, unmatched_exclude)

    # ------------------------------------------------------------------------------------------------------------ the fill

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._interrupted(error) from error
        except BaseException as interrupt:  # Ctrl-C stays what it is
            interrupt.add_note(self._describe_half(self._touched or ()))
            raise

    def _interrupted(self, cause: Exception) -> LoadInterrupted:
        names = self._touched or ()
        return LoadInterrupted(f"{self._describe_half(names)} Cause: {cause}", addresses=names)

    def _describe_half(self, names: tuple[str, ...]) -> str:
        shown = ", ".join(map(show, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return (
            f"{self._operation.store.url}: the load failed after it had begun to fill the app state, which is undefined now "
            f"({shown}). Load a checkpoint in full before you use it."
        )

    def _report(self, checkpoint: Checkpoint, target: LoadTarget, plan: LoadPlan, common: _Fill) -> LoadReport:
        manifest = checkpoint.manifest
        idle = tuple(f"exclude={glob!r} matched no address" for glob in common.unmatched_exclude)
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
            unexpected=target.unexpected + common.unexpected,
            not_asked_for=target.not_asked_for,
            replaced_values=target.replaced_values,
            created=target.created,
            warnings=target.warnings + idle,
        )


def _find_unexpected(posts: Sequence[_Ready]) -> tuple[str, ...]:
    """The addresses that none of the ranks takes that asked for their section. A rank without the section has no say."""
    sections = dict.fromkeys(name for post in posts for name in post.sections)
    return tuple(
        address
        for name in sections
        for address in _find_common(
            [{at for at in post.surplus if section_of(at) == name} for post in posts if name in post.sections]
        )
    )


def _find_common(sets: Sequence[set[str]]) -> tuple[str, ...]:
    return tuple(sorted(set.intersection(*sets))) if sets else ()


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
    """Whether two runs have the same bytes. Those in stored order are read in parts."""
    num = one.stop - one.start
    step = _COMPARED_ELEMENTS if one.dims == other.dims == tuple(sorted(one.dims)) else max(num, 1)
    parts = ((first, min(first + step, num)) for first in range(0, num, step))
    return all(_read_run(checkpoint, one, *part) == _read_run(checkpoint, other, *part) for part in parts)


def _read_run(checkpoint: Checkpoint, run: StoredRun, first: int, stop: int) -> bytes:
    tensor, back = checkpoint[run.address], np.argsort(run.dims)
    boxes = decompose_run(tuple(tensor.shape[dim] for dim in run.dims), run.start + first, run.start + stop)
    return b"".join(
        tensor.bits(offsets[back].tolist(), lengths[back].tolist()).transpose(run.dims).tobytes()
        for offsets, lengths in zip(*boxes, strict=True)
    )

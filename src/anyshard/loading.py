"""The road of a load: commit (resolve) -> engine (records) -> adapters -> planning -> engine (fill) -> adapters (apply).

Up to the fill nothing of the app state has changed, and every error says so. From there on an error is `LoadInterrupted`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from anyshard.adapters.target import LoadTarget, plan_load
from anyshard.checkpoint import Checkpoint
from anyshard.engine.read import OpenBlobs
from anyshard.errors import Difference, LoadInterrupted, Mismatch, StateMismatch
from anyshard.operation import Operation
from anyshard.options import LoadOptions
from anyshard.records.addresses import Globs, component, show
from anyshard.records.captured import Stored, StoredRun
from anyshard.records.load_plan import LoadPlan
from anyshard.records.regions import decompose_run
from anyshard.records.values import ValueRegistry
from anyshard.reports import LoadReport

_COMPARED_ELEMENTS = 1 << 22  # of each of two tied tensors at a time
_SHOWN = 8


class LoadOperation:
    """One load of an open checkpoint into an app state."""

    def __init__(self, operation: Operation, checkpoint: Checkpoint, options: LoadOptions, *, registry: ValueRegistry) -> None:
        self._operation = operation
        self._checkpoint = checkpoint
        self._options = options
        self._registry = registry

    def run(self, app_state: Mapping[str, object]) -> LoadReport:
        """Check everything, then fill the tensors, then set the values and run the hooks."""
        events, checkpoint = self._operation.events, self._checkpoint
        sections = [section for section in checkpoint.sections if section in app_state and self._can_want(component(section))]
        with events.span("load.records"):
            blobs = checkpoint.open_sections(sections)
            trees = {section: checkpoint.read_tree(blobs, section) for section in sections}
        with events.span("load.adapt"):
            target = self._make_target(app_state, trees)
        with events.span("load.plan"):
            plan = checkpoint.plan(target.wanted, blobs)
        self._check_first(target, plan, blobs)
        with self._interrupting(target):
            with events.span("load.fill", nbytes=plan.read_nbytes):
                blobs.fill(plan, target.destinations)
            with events.span("load.apply"):
                target.apply()
        return self._report(target, plan)

    def _can_want(self, address: str) -> bool:
        """Whether `only` and `exclude` may let through anything of a section; one of which they do not is not even opened."""
        if self._options.only:
            return Globs(self._options.only).can_match_in(address)
        excluded = Globs(self._options.exclude)
        is_tensor = address in self._checkpoint.index.shards.tensors.rows
        return not (excluded.match(address) if is_tensor else excluded.match_all_below(address))

    def _make_target(self, app_state: Mapping[str, object], trees: Mapping[str, object]) -> LoadTarget:
        stored = Stored(self._checkpoint.index.shards.tensors, trees, self._checkpoint.sections)
        return plan_load(app_state, stored, options=self._options, registry=self._registry, checkpoint=self._checkpoint.url)

    def _check_first(self, target: LoadTarget, plan: LoadPlan, blobs: OpenBlobs) -> None:
        if target.ties:
            with self._operation.events.span("load.compare_ties"):
                self._compare_ties(target)
        if self._options.verify == "first":
            with self._operation.events.span("load.verify", nbytes=plan.read_nbytes):
                blobs.verify(plan)

    def _compare_ties(self, target: LoadTarget) -> None:
        unequal = tuple(
            Difference(
                Mismatch.TIE,
                one.address,
                "the same bytes under both names, since one place of the app state takes both",
                f"other bytes in {show(other.address)}",
            )
            for one, other in target.ties
            if not self._are_equal(one, other)
        )
        if unequal:
            hint = "Load into an app state that has a place for each, or exclude one of the names."
            raise StateMismatch(self._checkpoint.url, unequal, hint)

    def _are_equal(self, one: StoredRun, other: StoredRun) -> bool:
        """Whether two runs have the same bytes. Those in stored order are read in parts."""
        num = one.stop - one.start
        step = _COMPARED_ELEMENTS if one.dims == other.dims == tuple(sorted(one.dims)) else max(num, 1)
        parts = ((first, min(first + step, num)) for first in range(0, num, step))
        return all(self._read_run(one, *part) == self._read_run(other, *part) for part in parts)

    def _read_run(self, run: StoredRun, first: int, stop: int) -> bytes:
        tensor, back = self._checkpoint[run.address], np.argsort(run.dims)
        boxes = decompose_run(tuple(tensor.shape[dim] for dim in run.dims), run.start + first, run.start + stop)
        return b"".join(
            tensor.bits(offsets[back].tolist(), lengths[back].tolist()).transpose(run.dims).tobytes()
            for offsets, lengths in zip(*boxes, strict=True)
        )

    @contextmanager
    def _interrupting(self, target: LoadTarget) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise LoadInterrupted(f"{self._describe_half(target.names)} Cause: {error}", addresses=target.names) from error
        except BaseException as interrupt:  # Ctrl-C stays what it is
            interrupt.add_note(self._describe_half(target.names))
            raise

    def _describe_half(self, names: tuple[str, ...]) -> str:
        shown = ", ".join(map(show, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return (
            f"{self._checkpoint.url}: the load failed after it had begun to fill the app state, which is undefined now "
            f"({shown}). Load a checkpoint in full before you use it."
        )

    def _report(self, target: LoadTarget, plan: LoadPlan) -> LoadReport:
        manifest = self._checkpoint.manifest
        return LoadReport(
            url=self._checkpoint.url,
            step=manifest.step,
            generation=manifest.generation,
            attempt=manifest.attempt,
            num_tensors=len(target.destinations),
            nbytes=int((plan.items.lengths.prod(axis=1) * plan.items.itemsize).sum()),
            read_nbytes=plan.read_nbytes,
            duration_s=self._operation.duration_s,
            missing=target.missing,
            unexpected=target.unexpected,
            not_asked_for=target.not_asked_for,
            replaced_values=target.replaced_values,
            created=target.created,
            warnings=target.warnings,
        )

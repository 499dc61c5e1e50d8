"""The catalog of a run: which steps are in its directory, and how each of them is, at as few requests as can be."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Final, final

from anyshard.engine.crew import Crew, Patience
from anyshard.records.names import FileKind, parse_name
from anyshard.run.examine import Examined, examine
from anyshard.run.step_info import PINS_PREFIX, StepInfo, mark_stale, parse_pin, parse_step, step_prefix
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.below import StoreBelow

_NUM_THREADS: Final = 16


def _do_nothing() -> None:
    return


@final
class Catalog:
    """The steps of the run in `store`. May be asked on several threads; it changes nothing.

    Records are immutable: that of a generation is read once. `num_hits` counts steps that were taken as they had been seen,
    `num_reads` those that were looked at in full.
    """

    def __init__(self, store: Store, *, num_threads: int = _NUM_THREADS, patience: Patience | None = None) -> None:
        self.store = store
        self.num_hits = 0
        self.num_reads = 0
        self._num_threads = num_threads
        self._patience = Patience() if patience is None else patience
        self._seen: dict[int, Examined] = {}
        self._lock = threading.Lock()

    def look(self, *, trust: bool = False) -> tuple[StepInfo, ...]:
        """All steps in rising order, deleted ones as long as their tombstone is there; directories of other names are foreign.

        What was settled before is looked at again by one listing each. With `trust` it is taken as it was, for the one writer of
        the run: then the whole costs one listing of the run, one of its pins, and what is new, unsettled, or was forgotten.

        Raises the error of a store that does not answer, or refuses, and `UnsupportedFormat` for a step of a later release.
        """
        prefixes = self.store.list("").prefixes
        numbers = sorted(step for prefix in prefixes if (step := parse_step(prefix)) is not None)
        pins = self.list_pins() if PINS_PREFIX in prefixes else frozenset[int]()
        with self._lock:
            known = {step: self._seen[step] for step in numbers if step in self._seen}
            self._seen = dict(known)
        found = {step: one for step, one in known.items() if trust and one.is_settled}
        with self._lock:
            self.num_hits += len(found)
        found |= self._look_at_all([step for step in numbers if step not in found], known)
        return mark_stale([replace(one.info, is_pinned=step in pins) for step, one in found.items()])

    def look_at(self, step: int) -> StepInfo | None:
        """One step as it is now, looked at in full; None if nothing of it is there. Whether it is stale is not said."""
        found = self._examine(step)
        return None if found is None else replace(found.info, is_pinned=step in self.list_pins())

    def list_pins(self) -> frozenset[int]:
        """The numbers of the steps that are pinned, there or not."""
        pins = (parse_pin(entry.key) for entry in self.store.list(PINS_PREFIX).entries)
        return frozenset(step for step in pins if step is not None)

    def forget(self, step: int) -> None:
        """Look at a step in full next time: for whoever has changed it."""
        with self._lock:
            self._seen.pop(step, None)

    def store_of(self, step: int) -> Store:
        """The store of one step."""
        return StoreBelow(self.store, step_prefix(step))

    def _look_at_all(self, steps: Collection[int], known: dict[int, Examined]) -> dict[int, Examined]:
        found: dict[int, Examined] = {}

        def look_at(step: int, crew: Crew) -> None:
            with crew.call("look at", file=step_prefix(step)):
                one = self._look_again(step, known.get(step))
            if one is not None:
                found[step] = one

        if steps:
            with Crew(min(self._num_threads, len(steps)), name="anyshard-catalog", patience=self._patience) as crew:
                for step in steps:
                    crew.submit(partial(look_at, step, crew))
                crew.finish(_do_nothing)
        return found

    def _look_again(self, step: int, before: Examined | None) -> Examined | None:
        if before is None or not before.is_told_by_records:
            return self._examine(step)
        entries = self.store_of(step).list("").entries
        records = frozenset(entry for entry in entries if (name := parse_name(entry.key)) and name.kind is FileKind.MANIFEST)
        if records != before.records:
            return self._examine(step)
        with self._lock:
            self.num_hits += 1
        return before

    def _examine(self, step: int) -> Examined | None:
        found = examine(self.store_of(step), step)
        with self._lock:
            self.num_reads += 1
            self._seen.pop(step, None)
            if found is not None and found.is_settled:
                self._seen[step] = replace(found, manifest=None)  # which may be large
        return found

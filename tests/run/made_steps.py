"""Runs of small steps, written by hand in the order of a save, on any store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from anyshard._api import save_step
from anyshard.commit.parts import part_store
from anyshard.commit.resolve import look
from anyshard.commit.tombstone import delete_step
from anyshard.records.manifest import Manifest, PartEntry, encode_manifest
from anyshard.records.names import make_attempt, manifest_name
from anyshard.run.busy import BusySteps
from anyshard.run.catalog import Catalog
from anyshard.run.policies import KeepPolicy
from anyshard.run.retention import PruneReport, prune
from anyshard.run.step_info import Condition, StepInfo, step_prefix
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.below import StoreBelow
from tests.commit.steps import make_manifest, write_files

RUN = "run-a"
OTHER = "run-b"
START_S = 1_000_000


def stamp(time_s: float) -> str:
    """Unix time as records have it."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_info(step: int, **facts: object) -> StepInfo:
    """A good step of the run, saved `step` seconds after its start."""
    given: dict[str, object] = {"time": stamp(START_S + step), "sections": ("model", "optimizer"), "run_id": RUN}
    info = StepInfo(step, f"memory:/step_{step}", Condition.COMMITTED, generation=1, attempt="a" * 13, written_s=START_S + step)
    return replace(info, **{**given, **facts})


def write_step(
    store: Store,
    step: int,
    *,
    run_id: str | None = RUN,
    time_s: float | None = None,
    metrics: Mapping[str, object] | None = None,
) -> Manifest:
    """A committed step, over whatever is there."""
    manifest = replace(
        write_pending(store, step),
        step=step,
        run_id=run_id,
        time=stamp(START_S + step if time_s is None else time_s),
        user={} if metrics is None else {"metrics": dict(metrics)},
    )
    publish(store, manifest)
    return manifest


def write_pending(store: Store, step: int) -> Manifest:
    """All files of a save of a step but its record, which is returned."""
    own = StoreBelow(store, step_prefix(step))
    _, newest = look(own)
    manifest = replace(make_manifest(1 if newest is None else newest.generation + 1, make_attempt()), step=step, run_id=RUN)
    own.prepare(["data/", "data/model/"])
    for _ in write_files(own, manifest):
        pass
    return manifest


def publish(store: Store, manifest: Manifest) -> None:
    """The record of a save."""
    assert manifest.step is not None
    own = StoreBelow(store, step_prefix(manifest.step))
    own.create(manifest_name(manifest.generation), encode_manifest(manifest), token=manifest.attempt)


def write_part(store: Store, step: int, role: str) -> PartEntry:
    """A committed part of a step that is not published; the entry that would name it."""
    own = part_store(StoreBelow(store, step_prefix(step)), role)
    manifest = replace(make_manifest(1, role[0] * 13), step=step, run_id=RUN)
    for _ in write_files(own, manifest):
        pass
    own.create(manifest_name(1), encode_manifest(manifest), token=manifest.attempt)
    return PartEntry(role, 1, manifest.attempt)


def publish_parts(store: Store, step: int, parts: tuple[PartEntry, ...]) -> None:
    """The record of a step in parts."""
    record = replace(
        make_manifest(1, "z" * 13, sections=()),
        step=step, run_id=RUN, index=None, blobs=(), parts=parts, requires=("parts",), num_rows=0, num_slots=0,
    )  # fmt: skip
    publish(store, record)


def write_run(store: Store, steps: Sequence[int]) -> None:
    """Committed steps, each a second later than the number before."""
    for step in steps:
        write_step(store, step)


def make_long_run(root: Path, num_steps: int) -> LocalStore:
    """A run of many steps, put there without syncs, which would take long."""
    for step in range(num_steps):
        write_step(store := MemoryStore(), step)
        for key, data in store.snapshot().items():
            path = root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return LocalStore(root)


def save_real(store: Store, step: int, *, sections: Sequence[str] = ("model", "optimizer")) -> None:
    """A step that can be loaded and thinned: an array in each section."""
    state = {section: {"weight": np.full(2000, step, dtype=np.float32)} for section in sections}
    place = StoreBelow(store, step_prefix(step))
    save_step(place, state, run_id=RUN, step=step, overwrite=False, group=None, options=None, sinks=())


def delete(store: Store, step: int) -> None:
    """Delete a step as anybody might."""
    delete_step(StoreBelow(store, step_prefix(step)))


def conditions(store: Store) -> dict[int, str]:
    """What a new catalog finds, in words."""
    return {one.step: str(one.condition) for one in Catalog(store).look()}


def committed(store: Store) -> list[int]:
    """The steps that are committed and whole."""
    return [step for step, condition in conditions(store).items() if condition == Condition.COMMITTED]


def run_pass(
    store: Store,
    policy: KeepPolicy | None,
    *,
    dry_run: bool = False,
    busy: BusySteps | None = None,
    run_id: str | None = RUN,
) -> PruneReport:
    """One pass by a process that has just begun."""
    return prune(Catalog(store), policy, run_id=run_id, dry_run=dry_run, busy=busy)

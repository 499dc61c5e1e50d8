"""Small real checkpoints to be thinned, and what a reader gets of them; steps in parts by hand."""

from __future__ import annotations

from typing import Any

import torch

import anyshard
from anyshard.commit.parts import part_store
from anyshard.commit.publish import create_record
from anyshard.commit.resolve import check_complete, resolve
from anyshard.commit.tombstone import make_tombstone
from anyshard.errors import CheckpointNotFound
from anyshard.records.manifest import Manifest, PartEntry, StepState
from anyshard.storage.protocol import Store
from tests.commit.steps import save

SECTIONS = ("model", "optimizer", "extra")
OPTIONS = anyshard.SaveOptions(threads=1, byte_budget=1 << 20, block_nbytes=1 << 17, overwrite_grace_s=0)


def make_state(number: int) -> dict[str, Any]:
    """Two tensors with ties, and plain values, all of which depend on the number."""
    weight = torch.full((3, 5), number)
    return {
        "model": {"weight": weight, "tied": weight, "empty": torch.zeros(0, 2)},
        "optimizer": {"m": torch.full((3, 5), -number), "count": number},
        "extra": {"number": number},
    }


def save_state(store: Store, number: int = 1, *, overwrite: bool = False) -> anyshard.SaveReport:
    """Save the state of this number."""
    return anyshard.save(store, make_state(number), step=100, overwrite=overwrite, options=OPTIONS)


def read(store: Store) -> dict[str, int] | None:
    """For each section that is there the number it was saved with, every file of it being whole; None without a checkpoint."""
    try:
        resolved = resolve(store)
    except CheckpointNotFound:
        return None
    check_complete(store, resolved.manifest, resolved.listing)
    state = {name: part for name, part in make_state(0).items() if name in resolved.manifest.sections}
    anyshard.load(store, state)
    numbers: dict[str, set[int]] = {
        "model": {*map(int, state["model"]["weight"].flatten())} if "model" in state else set(),
        "optimizer": {state["optimizer"]["count"], -int(state["optimizer"]["m"][0, 0])} if "optimizer" in state else set(),
        "extra": {state["extra"]["number"]} if "extra" in state else set(),
    }
    assert all(len(numbers[section]) == 1 for section in state), numbers
    return {section: numbers[section].pop() for section in state}


def make_step_record(generation: int, parts: tuple[PartEntry, ...]) -> Manifest:
    """The record of a step in these parts."""
    blank = make_tombstone(generation, None)
    attempt = "s" * 13
    return Manifest(
        generation=generation,
        attempt=attempt,
        state=StepState.COMMITTED,
        step=100,
        run_id=None,
        sections=(),
        time=blank.time,
        writer=blank.writer,
        world_size=1,
        num_rows=0,
        num_slots=0,
        index=None,
        blobs=(),
        requires=("parts",),
        parts=parts,
    )


def publish_by_hand(store: Store, *names: str, generation: int = 1) -> Manifest:
    """Publish a step with these parts, which are there."""
    found = [(name, resolve(part_store(store, name)).manifest) for name in names]
    entries = tuple(PartEntry(name, manifest.generation, manifest.data_attempt) for name, manifest in found)
    record = make_step_record(generation, entries)
    create_record(store, record)
    return record


def save_in_parts(store: Store, *names: str) -> Manifest:
    """A step in parts, each a small checkpoint written by hand."""
    for name in names:
        save(part_store(store, name))
    return publish_by_hand(store, *names)

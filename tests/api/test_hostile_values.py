"""Values slots that lack what others of their kind promise are damage, although every digest is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import anyshard
from anyshard.records.section_values import ABSENT, encode_section
from anyshard.storage.memory import MemoryStore


def forge(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> MemoryStore:
    """A checkpoint with a per-rank value, and with other members in its values slot than a save writes."""
    encode = lambda values, **how: encode_section(replace(values, **changes), **how)  # noqa: E731 - one line says it
    monkeypatch.setattr("anyshard.snapshot.encode_section", encode)
    store = MemoryStore()
    anyshard.save(store, {"s": {"own": anyshard.PerRank(1), "x": 2}})
    return store


def test_a_section_without_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator always writes one."""
    store = forge(monkeypatch, shared=ABSENT)
    with pytest.raises(anyshard.CheckpointDamaged, match="expected a value tree, found none"):
        anyshard.open(store)["s/x"]
    with pytest.raises(anyshard.CheckpointDamaged, match="expected a value tree, found none"):
        anyshard.load(store, {"s": {"x": 0}})


def test_a_rank_without_the_tree_that_a_key_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not None for who opens the checkpoint, since that is a value, and not there for who loads it."""
    store = forge(monkeypatch, per_rank={})
    with pytest.raises(anyshard.CheckpointDamaged, match="^s/own: expected a tree among the values of rank 0, found none"):
        anyshard.open(store)["s/own"]
    with pytest.raises(anyshard.CheckpointDamaged, match="^s/own: expected a tree among the values of rank 0, found none"):
        anyshard.load(store, {"s": {"own": anyshard.PerRank(0), "x": 0}})

"""A tiny checkpoint in memory, and loading it with one file replaced."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import anyshard
from anyshard.errors import AnyshardError
from anyshard.storage.memory import MemoryStore


def make_state(fill: float) -> dict[str, object]:
    """A state with a tied, an empty and a 0-d tensor and plain values, in two sections."""
    weight = torch.full((3, 5), fill)
    return {
        "model": {"weight": weight, "tied": weight, "empty": torch.zeros(0, 4), "scale": torch.tensor(fill)},
        "extra": {"tokens": int(fill), "name": "run"},
    }


def save_tiny() -> dict[str, bytes]:
    """The files of a saved tiny checkpoint."""
    store = MemoryStore()
    anyshard.save(store, make_state(7.0), step=3)
    return store.snapshot()


def load_files(files: dict[str, bytes]) -> dict[str, object]:
    """The state that a checkpoint of these files loads."""
    state = make_state(0.0)
    anyshard.load(MemoryStore(files), state)
    return state


def is_detected(files: dict[str, bytes]) -> bool:
    """Whether loading ends with one of our errors."""
    try:
        load_files(files)
    except AnyshardError:
        return True
    return False


def flipped(files: dict[str, bytes], name: str, *, step: int = 1) -> Iterator[tuple[int, dict[str, bytes]]]:
    """The files with each bit (every `step`-th) of one flipped in turn."""
    for where in range(0, 8 * len(files[name]), step):
        damaged = bytearray(files[name])
        damaged[where // 8] ^= 1 << where % 8
        yield where, {**files, name: bytes(damaged)}


def cut(files: dict[str, bytes], name: str, *, step: int = 1) -> Iterator[tuple[int, dict[str, bytes]]]:
    """The files with one cut to every shorter length (every `step`-th)."""
    for length in range(0, len(files[name]), step):
        yield length, {**files, name: files[name][:length]}

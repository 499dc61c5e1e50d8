"""Scenes of asynchronous saves in one process: states to save and to spoil, storage that waits for a word, what is stored."""

from __future__ import annotations

import atexit
import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import anyshard
from anyshard import _api
from anyshard.adapters.values import torch_types
from anyshard.async_saving import Background
from anyshard.records.values import ValueRegistry, encode_value
from anyshard.records.values_types import PerRankMark
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before
from anyshard.testing.fill import Fill, fill
from anyshard.testing.training import fill_training
from tests.golden.contents import make_tensors, make_values

SOON_S = 30.0  # for what comes at once, on two cores that others use too
LAZY = anyshard.SaveOptions(staging="lazy")
EAGER = anyshard.SaveOptions(staging="eager")

State = dict[str, Any]


@dataclass
class Gated:
    """A place whose storage stops at the first call of `verb` on `key` until the gate is opened; `arrived` says that it came."""

    place: Store
    verb: Verb = Verb.WRITE_AT
    key: str = "data/*"
    gate: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)

    @property
    def store(self) -> FaultStore:
        return FaultStore(self.place, [Rule(self.verb, self.key, do_before(self._stop))])

    def _stop(self) -> None:
        self.arrived.set()
        assert self.gate.wait(SOON_S)

    def await_arrival(self) -> None:
        assert self.arrived.wait(SOON_S)


def gated(url: str, verb: Verb = Verb.WRITE_AT, key: str = "data/*") -> Gated:
    """An empty place in memory, gated."""
    return Gated(MemoryStore(url=url), verb, key)


def background() -> Background:
    """What this process keeps for its asynchronous saves; there must have been one."""
    found = _api._checkpointer(os.getpid())._memberships.find(None, SOON_S).background
    assert found is not None
    return found


def forget_all() -> None:
    """Let the next call find a process that has never saved; frees what was kept for that."""
    checkpointer = _api._checkpointer(os.getpid())
    kept = checkpointer._memberships.find(None, SOON_S).background
    if kept is not None:
        kept.means.arenas.close()
    atexit.unregister(checkpointer._finish_at_exit)
    _api._checkpointer.cache_clear()


def make_job(width: int = 128) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with buffers and its optimizer, with state of bits that say where they belong."""
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fill_training(model, optimizer)
    return model, optimizer


def make_state() -> State:
    """A state of everything: modules, an optimizer, its scheduler, tensors of all kinds, values, generators."""
    model, optimizer = make_job()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.step()  # without gradients: only so that the scheduler may go first
    values = {**make_values(), "numbers": [1, 2, {"deep": [3]}], "array": np.arange(7.0)}
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "tensors": make_tensors(),
        "values": values,
        "step": torch.tensor(3),
        "random": anyshard.RNGState(),
    }


def make_small(seed: str, num: int = 3) -> State:
    """A few tensors with the bits of a seed, and a value."""
    tensors = {f"w{number}": torch.empty(40, 5) for number in range(num)}
    for name, tensor in tensors.items():
        fill(tensor, seed + name, kind=Fill.FINITE)
    return {"model": tensors, "seed": seed}


def spoil(state: State) -> None:
    """Change everything of a state in place, in any order: tensors by bits, containers by what is in them, generators."""
    state["optimizer"].step()
    state["scheduler"].step()
    seen: set[int] = set()
    for value in (state["model"].state_dict(), state["optimizer"].state, state["tensors"], state["values"], state["step"]):
        _spoil(value, seen)
    random.random()  # a generator moves on
    np.random.rand()  # noqa: NPY002 - the global generator is what is meant
    torch.rand(1)


def _spoil(value: object, seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        fill(value, "spoilt")
    elif isinstance(value, np.ndarray):
        value.view(np.uint8)[...] ^= 0x55
    elif isinstance(value, Mapping):
        for part in list(value.values()):
            _spoil(part, seen)
        if isinstance(value, dict):
            value["spoilt"] = "yes"
    elif isinstance(value, list):
        for part in value:
            _spoil(part, seen)
        value.append("spoilt")


def contents(place: Store | str | os.PathLike[str]) -> dict[str, bytes]:
    """All that a checkpoint holds, as bytes by address: tensors, and the values of each section."""
    registry = ValueRegistry().extended(torch_types())
    with anyshard.open(place) as checkpoint:
        found = {address: checkpoint[address][...].tobytes() for address in checkpoint}
        for section in checkpoint.sections:
            values = checkpoint.values(section)
            values = checkpoint[section] if isinstance(values, PerRankMark) else values
            found[f"values of {section}"] = encode_value(values, address=section, registry=registry)
    return found


def saved_now(state: State) -> dict[str, bytes]:
    """The contents of a blocking save of the state as it is."""
    store = MemoryStore(url="memory:now/step_0")
    anyshard.save(store, state)
    return contents(store)


def is_there(place: Store) -> bool:
    """Whether a reader finds a checkpoint."""
    try:
        with anyshard.open(place):
            return True
    except anyshard.CheckpointNotFound:
        return False


def watch_tensors(*objects: object) -> list[weakref.ref[Any]]:
    """Weak references to all tensors of modules, optimizers and mappings, and to their storages."""
    found: list[torch.Tensor] = []
    for value in objects:
        if isinstance(value, nn.Module):
            found += [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.optim.Optimizer):
            found += [tensor for state in value.state.values() for tensor in state.values()]
        elif isinstance(value, Mapping):
            found += value.values()
    return [*map(weakref.ref, found), *(weakref.ref(tensor.untyped_storage()) for tensor in found)]


def count_alive(watched: list[weakref.ref[Any]]) -> int:
    """How many are still there, once cycles are collected."""
    gc.collect()
    return sum(ref() is not None for ref in watched)


def list_threads() -> list[str]:
    """Names of the threads of this process that are of anyshard's making."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("anyshard"))


def join_threads() -> None:
    """Wait until no thread of anyshard's making is left."""
    for thread in threading.enumerate():
        if thread.name.startswith("anyshard"):
            thread.join(SOON_S)


def finish_all() -> Iterator[None]:
    """A fixture's body: begin as a process that has never saved, and leave neither saves under way nor failures untold."""
    forget_all()
    yield
    anyshard.wait_all(SOON_S)
    forget_all()

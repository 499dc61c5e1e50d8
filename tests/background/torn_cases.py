"""A job is written to while a snapshot of it is copied: how the save ends, on one rank or many.

A case saves a job, saves it again asynchronously, and holds the thread that copies the lazy rows within a piece of a row until
the job was written to, or whatever writes to it waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import anyshard
from anyshard.engine import lazy_rows
from anyshard.engine.arena import Arena
from anyshard.pending import Stall
from anyshard.testing.layouts import make_mesh
from tests.background.scenes import SOON_S, contents, is_there
from tests.background.writers import WIDTH, WRITERS, Job, Writer

EARLY = 4  # pieces: some of the first row is copied, nothing of the others
_PIECE_NBYTES = 16 << 10

IMPLEMENTATIONS: Final[Mapping[str, dict[str, bool]]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


# Jobs ------------------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    """A model with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def _shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    return model


def _flatten(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


ALL: Final = ("model", "optimizer", "average")

# How a model is wrapped, and which parts of such a job are saved.
WRAPPINGS: Final[Mapping[str, tuple[Callable[[nn.Module], nn.Module], Sequence[str]]]] = {
    "plain": (lambda model: model, ALL),
    "ddp": (DistributedDataParallel, ALL),
    "fsdp2": (_shard, ALL),
    "fsdp1": (_flatten(use_orig_params=False), ALL[:1]),
    "fsdp1, use_orig_params": (_flatten(use_orig_params=True), ALL[:1]),
    "fsdp1, unsharded": (_flatten(use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD), ALL[:2]),
    "fsdp1, unsharded, use_orig_params": (
        _flatten(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
        ALL[:2],
    ),
}


def build(wrapping: str, implementation: str) -> Job:
    """A job that has taken a step, the same one every time."""
    wrap, parts = WRAPPINGS[wrapping]
    model = wrap(make_model())
    job = Job(model, torch.optim.AdamW(model.parameters(), lr=0.01, **IMPLEMENTATIONS[implementation]), {})
    job.backward()
    job.optimizer.step()
    makers = {"model": lambda: model, "optimizer": lambda: job.optimizer, "average": lambda: _average(wrap)}
    job.state |= {part: makers[part]() for part in parts}
    return job


def _average(wrap: Callable[[nn.Module], nn.Module]) -> AveragedModel:
    average = AveragedModel(make_model())
    average.module = wrap(average.module)
    return average


# The race --------------------------------------------------------------------------------------------------------------


class Copier:
    """The thread that copies, held within the piece of this number until the gate is opened."""

    def __init__(self, number: int) -> None:
        self.arrived, self.gate = threading.Event(), threading.Event()
        self.num_waits = 0
        self._left = number
        self._write, self._hold_step = Arena.write, Stall.hold_step

    def write(self, arena: Arena, position: int, data: memoryview) -> None:
        """In place of `Arena.write`."""
        done = 0
        if self._left == 0:
            done = len(data) // 2
            self._write(arena, position, data[:done])
            self.arrived.set()
            assert self.gate.wait(SOON_S)
        self._left -= 1
        self._write(arena, position + done, data[done:])

    def hold_step(self, stall: Stall, wait: Callable[[], None]) -> None:
        """In place of `Stall.hold_step`: the job is about to be written to, so the copy has to go on first."""
        self.num_waits += 1
        self.gate.set()
        self._hold_step(stall, wait)


@contextmanager
def hold_copier(number: int) -> Iterator[Copier]:
    """Copy in small pieces, and stop within this one."""
    copier = Copier(number)
    with (
        patch.object(lazy_rows, "_PIECE_NBYTES", _PIECE_NBYTES),
        patch.object(Arena, "write", lambda *args: copier.write(*args)),
        patch.object(Stall, "hold_step", lambda *args: copier.hold_step(*args)),
    ):
        try:
            yield copier
        finally:
            copier.gate.set()


@dataclass(frozen=True)
class Race:
    """A writer, and the moment of the copy in which it comes: within the piece of this number."""

    write: Writer
    staging: str = "lazy"
    number: int = EARLY

    def run(self, place: Path, job: Job, expected: Mapping[str, bytes]) -> str:
        """How a save ends that others run against: what was lazy, whether the writer waited, and what is stored."""
        with hold_copier(self.number) as copier:
            options = anyshard.SaveOptions(staging=cast("Any", self.staging))
            pending = anyshard.async_save(place, job.state, options=options)
            is_lazy = pending.staging.lazy_nbytes > 0
            assert not is_lazy or copier.arrived.wait(SOON_S)
            self.write(job)
            copier.gate.set()
            end = _tell(pending, expected, place)
        return ", ".join(["lazy" if is_lazy else "eager", *["waited"] * (copier.num_waits > 0), end])


def save_now(place: Path, job: Job) -> dict[str, bytes]:
    """What a blocking save stores of a job as it is. It leaves the plan, without which nothing is lazy."""
    anyshard.save(place, job.state)
    return contents(place)


def _tell(pending: anyshard.PendingSave, expected: Mapping[str, bytes], place: Path) -> str:
    try:
        pending.committed(SOON_S)
    except anyshard.TornSnapshot as error:
        named = {address.split("/")[0] for address in expected if f" {address}" in str(error)}
        return f"named in {' and '.join(sorted(named))}{', AND COMMITTED' * is_there(str(place))}"
    found = contents(place)
    differing = [address for address in expected.keys() | found.keys() if expected.get(address) != found.get(address)]
    return f"TORN UNSEEN: {differing}" if differing else "exact"


def race_all(place: str, wrapping: str, implementation: str, staging: str, writers: Sequence[str]) -> dict[str, str]:
    """How the saves of a job end, by writer."""
    expected = save_now(Path(place) / "step_0", build(wrapping, implementation))
    ends = {}
    for step, writer in enumerate(writers, 1):
        job = build(wrapping, implementation)
        ends[writer] = Race(WRITERS[writer], staging).run(Path(place) / f"step_{step}", job, expected)
    return ends


def save_sharded(place: str, wrapping: str) -> str:
    """How a save of a model and its optimizer ends, with a parameter that no rank holds as a whole."""
    wrap, _ = WRAPPINGS[wrapping]
    model = wrap(nn.Sequential(make_model(), make_model()[0]))
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job(model, optimizer, {"model": model, "optimizer": optimizer})
    job.backward()
    optimizer.step()
    try:
        anyshard.async_save(place, job.state).committed(SOON_S)
    except anyshard.AnyshardError as error:
        return f"{type(error).__name__}: {error}"
    return "committed"

"""Cases of ranks that wait for each other. Each test is named after its row in cases.md."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import anyshard
from anyshard.coord.looks import Patience
from anyshard.storage.local import LocalStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before
from anyshard.testing.fill import assert_same_bytes
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import Job, error_of, filled, load_job, save_job, shard

pytestmark = pytest.mark.slow

LOADING = anyshard.LoadOptions(timeout_s=4)
SAVING = anyshard.SaveOptions(timeout_s=1)
LATE_S = 10.0  # two cores for many ranks


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load_with_a_stuck_read(place: str) -> tuple[tuple[str, str], list[str], bool]:
    """The error, the log and whether it came in time, of a load in which rank 1's reads of blobs do not come back."""
    live, answered, log = shard(torch.zeros(8, 4), make_mesh(("dp", 2)), Shard(0)), threading.Event(), Lines()
    rules = [Rule(verb, "data/*", do_before(partial(answered.wait, 30)), times=99) for verb in (Verb.READ, Verb.READ_INTO)]
    store = FaultStore(LocalStore(place), rules if dist.get_rank() == 1 else [])
    logging.getLogger("anyshard").addHandler(log)
    began_s = time.monotonic()
    try:
        with patch("anyshard.operation.Patience", partial(Patience, report_s=0.2)):
            error = error_of(lambda: anyshard.load(store, {"w": live}, options=LOADING))
    finally:
        answered.set()
        logging.getLogger("anyshard").removeHandler(log)
    return error, log.lines, time.monotonic() - began_s < LOADING.timeout_s + LATE_S


def test_b021_stuck_read_on_one_rank_ends_the_load_on_all(worlds: Worlds, tmp_path: Path) -> None:
    """The rank that waits logs for whom, again and again; then both end with one error that names the stuck rank and its file."""
    anyshard.save(tmp_path / "a", {"w": filled("w", 8, 4)})
    (one, log, one_soon), (other, _, other_soon) = worlds(2).run(load_with_a_stuck_read, str(tmp_path / "a"))
    assert (one, True, True) == (other, one_soon, other_soon)
    assert ("StorageStuck", True) == (one[0], "rank 1: " in one[1] and "data/w/0.0-1-" in one[1]), one
    assert 1 < sum("rank 0 waits" in line and "rank 1" in line for line in log)


def make_sharded() -> Job:
    model = fully_shard(nn.Linear(4, 6), mesh=make_mesh(("dp", 2)))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def save_with_an_extra_entry(place: str) -> tuple[str, str]:
    """Rank 1 alone has one more sharded entry in its optimizer."""
    model, optimizer = make_sharded()
    if dist.get_rank() == 1:
        optimizer.state[model.weight] = {"extra": torch.zeros_like(model.weight)}
    return error_of(lambda: anyshard.save(place, {"model": model, "optimizer": optimizer}))


def test_b024_differing_optimizer_entries_are_one_error(worlds: Worlds, tmp_path: Path) -> None:
    """An entry of which one rank holds its half and the other nothing is the same error on both, with its address."""
    (one, other) = worlds(2).run(save_with_an_extra_entry, str(tmp_path / "a"))
    assert one == other
    assert ("InvalidAppState", True) == (one[0], "optimizer/state/weight/extra (6, 4): " in one[1] and "hole" in one[1]), one


def make_uneven_optimizers() -> Job:
    """The whole model on both ranks, all of its optimizer on rank 0."""
    model = nn.Linear(4, 6)
    return model, torch.optim.AdamW([{"params": list(model.parameters()) if dist.get_rank() == 0 else []}], foreach=False)


def save_uneven_optimizers(place: str) -> dict[str, bytes]:
    return save_job(place, *make_uneven_optimizers(), steps=False)


def load_uneven_optimizers(place: str) -> dict[str, bytes]:
    return load_job(place, *make_uneven_optimizers(), steps=False)


def test_b024_a_rank_without_optimizer_state_takes_part(worlds: Worlds, tmp_path: Path) -> None:
    """The legal case, in which one rank's optimizer is empty, is saved and loaded."""
    expected = worlds(2).run(save_uneven_optimizers, str(tmp_path / "a"))[0]
    assert {"optimizer/state/weight/exp_avg"} < expected.keys()
    assert_same_bytes(expected, worlds(2).run(load_uneven_optimizers, str(tmp_path / "a"))[0])


def save_on_rank_0_only(place: str) -> tuple[Any, bool]:
    """How a save ends that only rank 0 calls, and whether in time; then both save."""
    state, began_s = {"w": torch.zeros(3)}, time.monotonic()
    error = None if dist.get_rank() else error_of(lambda: anyshard.save(f"{place}/one", state, options=SAVING))
    is_soon = time.monotonic() - began_s < SAVING.timeout_s + LATE_S
    dist.barrier()
    anyshard.save(f"{place}/both", state)
    return error, is_soon


def test_b025_save_on_rank_0_only_ends_with_an_error(worlds: Worlds, tmp_path: Path) -> None:
    """Rank 0 is told in time which rank never came to which save, nothing is committed, and the next save of all works."""
    ((error, is_soon), _) = worlds(2).run(save_on_rank_0_only, str(tmp_path))
    assert ("RankMissing", True) == (error[0], is_soon)
    assert [True] * 2 == [part in error[1] for part in (f"save of {tmp_path}/one", "rank 1: ")]
    assert not list(tmp_path.glob("one/manifest*"))
    assert list(tmp_path.glob("both/manifest*"))

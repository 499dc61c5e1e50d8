"""A disk that gets full while four ranks save to it (B009, B053, B055): what all of them are told, and what is left of it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import anyshard
from anyshard.storage.local import LocalStore
from anyshard.storage.posix import writer
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import error_of

pytestmark = pytest.mark.slow

MIB = 1 << 20
NUM_RANKS = 4
DISK_MIB = 100
FITS_MIB, TOO_LARGE_MIB, SMALL_MIB = 40, 150, 4
WAIT_S = 50.0
COLUMNS = 1024
# Where the lack of space is found: by the free space before anything is made, when files are reserved, or by a write.
FOUND = ("before", "reserving", "writing")


class BlindStore(LocalStore):
    """One that cannot tell how much is free."""

    def free_nbytes(self) -> None:
        """Nobody knows."""


def make_weights(num_mib: int, value: float) -> DTensor:
    """So many MiB on all ranks together, each with a value of its own."""
    local = torch.full((num_mib * MIB // NUM_RANKS // 4 // COLUMNS, COLUMNS), value + dist.get_rank())
    return DTensor.from_local(local, make_mesh(("dp", NUM_RANKS)), [Shard(0)])


def save(place: str, weights: DTensor, *, is_async: bool, found: str = FOUND[0]) -> None:
    store = LocalStore(place) if found == FOUND[0] else BlindStore(place)
    if is_async:
        anyshard.async_save(store, {"w": weights}).committed(WAIT_S)
    else:
        anyshard.save(store, {"w": weights})


def list_files(place: str) -> list[str]:
    """All files there, after every rank has done what it does."""
    dist.barrier()
    return sorted(str(path.relative_to(place)) for path in Path(place).rglob("*") if path.is_file())


def load(place: str, num_mib: int, value: float) -> bool:
    """Whether a checkpoint holds these weights, bit for bit."""
    live, expected = make_weights(num_mib, 0.0), make_weights(num_mib, value)
    anyshard.load(place, {"w": live})
    return torch.equal(live.to_local(), expected.to_local())


def fill_the_disk(disk: str, found: str, is_async: bool) -> dict[str, Any]:
    """Save what fits, then what does not, then train on and save what fits again; what a rank sees of it."""
    save(f"{disk}/step_1", make_weights(FITS_MIB, 10.0), is_async=is_async)
    before, large = list_files(disk), make_weights(TOO_LARGE_MIB, 20.0)
    with pytest.MonkeyPatch.context() as patch:
        if found == FOUND[2]:
            patch.setattr(writer, "allocate", lambda *_args, **_options: None)
        error = error_of(lambda: save(f"{disk}/step_2", large, is_async=is_async, found=found))
    after = list_files(disk)
    weights = make_weights(SMALL_MIB, 30.0)
    with torch.no_grad():
        weights.to_local().add_(1)
    save(f"{disk}/step_3", weights, is_async=is_async)
    kept = load(f"{disk}/step_1", FITS_MIB, 10.0), load(f"{disk}/step_3", SMALL_MIB, 31.0)
    return {"error": error, "left": sorted(set(after) ^ set(before)), "kept": kept}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem in memory of 100 MB."""
    (point := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "anyshard-test", str(point)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True, timeout=30).returncode != 0:
        pytest.skip("this user may not mount a filesystem in memory")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=30)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("found", FOUND)
def test_b009_b053_b055_full_disk(worlds: Worlds, disk: Path, found: str, *, is_async: bool) -> None:
    """One error on all ranks with rank, file and errno; no file stays; what was there loads; training and saving go on."""
    told = worlds(NUM_RANKS).run(fill_the_disk, str(disk), found, is_async)
    name, message = told[0]["error"]
    assert [told[0]] * NUM_RANKS == told
    assert ("StorageFull", [], (True, True)) == (name, told[0]["left"], told[0]["kept"]), message
    where = f"[Errno {errno.ENOSPC}]", "step_2/data/w/", "needed "
    assert [] == [part for part in (("step_2", "free") if found == FOUND[0] else where) if part not in message], message
    assert any(f"  rank {rank}: " in message for rank in range(NUM_RANKS)), message

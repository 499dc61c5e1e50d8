"""Cases of storage that fails on one of several ranks. Each test is named after its row in cases.md."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import anyshard
from anyshard import committing
from anyshard.commit.publish import Patience
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import Job, bits, error_of, filled, load_job, save_job, shard

pytestmark = pytest.mark.slow

SMALL = anyshard.SaveOptions(byte_budget=1 << 20, block_nbytes=1 << 18)


def save_rows(place: str, name: str) -> None:
    anyshard.save(place, {"w": shard(filled(name, 1024, 1024), make_mesh(("dp", dist.get_world_size())), Shard(0))})


def save_to_a_full_disk(place: str) -> tuple[str, str]:
    """On rank 1 there is no space left after the first block."""
    full = anyshard.StorageFull("no space left", file="data/w", errno=errno.ENOSPC)
    rules = [Rule(Verb.WRITE_AT, "data/w/1.*", fail(full), nth=2, times=99)]
    live = shard(filled("new", 1024, 1024), make_mesh(("dp", 4)), Shard(0))
    return error_of(lambda: anyshard.save(FaultStore(LocalStore(place), rules), {"w": live}, overwrite=True, options=SMALL))


def test_b009_b053_full_disk_on_one_rank(worlds: Worlds, tmp_path: Path) -> None:
    """All ranks report one failure with rank, file and errno; its files are removed, and what was there before is whole."""
    worlds(4).run(save_rows, str(tmp_path / "a"), "old")
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    errors = worlds(4).run(save_to_a_full_disk, str(tmp_path / "a"))
    assert errors == [errors[0]] * 4
    name, message = errors[0]
    assert ("StorageFull", True) == (name, f"rank 1: write: StorageFull: [Errno {errno.ENOSPC}]" in message), message
    assert before == sorted(path.name for path in (tmp_path / "a").rglob("*"))
    live = torch.zeros(1024, 1024)
    anyshard.load(tmp_path / "a", {"w": live})
    assert bits(filled("old", 1024, 1024)) == bits(live)


def save_to_private_disks() -> tuple[str, str]:
    """Every rank means storage of its own by the same name."""
    live = shard(filled("w", 1024, 1024), make_mesh(("dp", 2)), Shard(0))
    with pytest.MonkeyPatch.context() as patch:  # the coordinator shall not wait long for files that do not come up
        patch.setattr(committing, "Patience", partial(Patience, visibility_timeout_s=0.2))
        return error_of(lambda: anyshard.save(MemoryStore(url="memory:shared"), {"w": live}))


def test_b050_disks_that_are_not_shared(worlds: Worlds) -> None:
    """Where each rank writes to a disk of its own the save fails on all, names a file that is missing, and says why."""
    errors = worlds(2).run(save_to_private_disks)
    assert errors[0] == errors[1]
    name, message = errors[0]
    assert ("BlobNotFound", True) == (name, "data/w/1.0-1-" in message and "not the same on all hosts" in message), message


def make_sharded() -> Job:
    model = fully_shard(nn.Linear(3, 4), mesh=make_mesh(("dp", 2)))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def save_sharded(place: str) -> dict[str, bytes]:
    return save_job(place, *make_sharded(), steps=False)


def load_sharded(place: str) -> tuple[tuple[str, str], bool]:
    """The error, and whether this rank's weights are what they were."""
    model, optimizer = make_sharded()
    before = [bits(param.to_local()) for param in model.parameters()]
    error = error_of(lambda: load_job(place, model, optimizer))
    return error, before == [bits(param.to_local()) for param in model.parameters()]


@pytest.mark.parametrize("is_renamed", [False, True], ids=["deleted", "renamed"])
def test_b064_missing_optimizer_blob_is_an_error_on_all(worlds: Worlds, tmp_path: Path, is_renamed: bool) -> None:
    """A lost blob of rank 1's optimizer is the same error on both ranks, by its name; nothing is loaded."""
    worlds(2).run(save_sharded, str(tmp_path / "a"))
    (blob,) = (tmp_path / "a" / "data" / "optimizer").glob("1.*")
    blob.rename(blob.with_suffix(".old")) if is_renamed else blob.unlink()
    one, other = worlds(2).run(load_sharded, str(tmp_path / "a"))
    assert one == other
    assert ("CheckpointDamaged", True, True) == (one[0][0], blob.name in one[0][1], one[1]), one

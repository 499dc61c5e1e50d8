"""Hosts that do not share the directory which they call by one name (B050): saves and loads say so on all ranks."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import anyshard
from anyshard import committing
from anyshard.commit.publish import Patience
from anyshard.storage.local import LocalStore
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import bits, error_of, filled, shard

pytestmark = pytest.mark.slow

NUM_RANKS = 2
SECTIONS = ("a", "b", "c", "d", "e", "f")
SHARED = "/mnt/shared/step_1"


class OwnDiskStore(LocalStore):
    """What this rank finds at a path that all ranks know by the same name."""

    @property
    def url(self) -> str:
        """What all of them call it."""
        return SHARED


def own_disk(root: str) -> OwnDiskStore:
    return OwnDiskStore(f"{root}/host-{dist.get_rank()}")


def make_state(name: str) -> dict[str, torch.Tensor]:
    """A tensor in each section, of which each rank has a half."""
    mesh = make_mesh(("dp", NUM_RANKS))
    return {section: shard(filled(name + section, 8, 3), mesh, Shard(0)) for section in SECTIONS}


def save_to_own_disks(root: str) -> tuple[str, str]:
    """The error, soon: the coordinator does not wait long for files that do not come up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committing, "Patience", partial(Patience, visibility_timeout_s=0.2))
        return error_of(lambda: anyshard.save(own_disk(root), make_state("w")))


def save_to_one_disk(root: str) -> None:
    anyshard.save(f"{root}/all", make_state("w"))


def load_from_own_disks(root: str) -> tuple[tuple[str, str], bool]:
    """The error, and whether all is as it was before."""
    live = make_state("before")
    before = [bits(tensor.to_local()) for tensor in live.values()]
    error = error_of(lambda: anyshard.load(own_disk(root), live))
    return error, before == [bits(tensor.to_local()) for tensor in live.values()]


@pytest.mark.parametrize("is_there", [True, False])
def test_b050_save_to_private_disks(worlds: Worlds, tmp_path: Path, *, is_there: bool) -> None:
    """Nothing is committed on any of them: a file of rank 1 is named, and the directory has to be the same on all hosts.

    Where rank 1 has no such directory it does not make one. Where it has, what it wrote is missed by the coordinator.
    """
    if is_there:
        (tmp_path / "host-1").mkdir()
    errors = worlds(NUM_RANKS).run(save_to_own_disks, str(tmp_path))
    assert errors == [errors[0]] * NUM_RANKS
    name, message = errors[0]
    assert ("BlobNotFound", True, True) == (name, "data/a/1.0-1-" in message, "same on all hosts" in message), message
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("has_records", [True, False])
def test_b050_load_from_private_disks(worlds: Worlds, tmp_path: Path, *, has_records: bool) -> None:
    """Each rank's disk has what it wrote, and the first one (or both) the records: rank 1 tells what it misses, nothing changes.

    The records are read by the coordinator only, so a disk without them is no other case.
    """
    worlds(NUM_RANKS).run(save_to_one_disk, str(tmp_path))
    for path in (tmp_path / "all").rglob("*.*"):
        if path.is_file():
            hosts = {int(path.name[0])} if path.suffix == ".bin" else {0, *([1] if has_records else [])}
            for host in hosts:
                copy = tmp_path / f"host-{host}" / path.relative_to(tmp_path / "all")
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    told = worlds(NUM_RANKS).run(load_from_own_disks, str(tmp_path))
    assert told == [told[0]] * NUM_RANKS
    (name, message), is_unchanged = told[0]
    assert ("CheckpointDamaged", True) == (name, is_unchanged), message
    where = (
        f"rank 1: adapt: CheckpointDamaged: {SHARED}: expected 6 blob(s)",
        f"found 6 of them missing on host {socket.gethostname()}",
    )
    missing = *(f"data/{section}/0.0-1-" for section in SECTIONS[:5]), "and 1 more", "same on all hosts"
    assert [] == [part for part in (*where, *missing) if part not in message], message

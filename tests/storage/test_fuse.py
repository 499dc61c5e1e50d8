"""A real FUSE filesystem, the mount of a SeaweedFS: the contract of a store, and a whole checkpoint. Needs root and /dev/fuse."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import anyshard
from anyshard.errors import CheckpointDamaged, StorageUnguarded
from anyshard.storage.local import LocalStore
from anyshard.storage.posix.mounts import find_mount
from anyshard.testing.store_contract import MakeStore, StoreContract
from anyshard.testing.store_fixtures import keys_below
from anyshard.testing.training import Moment, fill_training
from tests.servers import S3Server, ServerProcess

pytestmark = pytest.mark.slow

SOON_S = 0.05
WEED = Path(sys.executable).parent / "weed"


def why_not() -> str:
    """What this machine lacks for a FUSE mount; "" if nothing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that this user may open"
    return "" if os.geteuid() == 0 else "mounting without fusermount3 needs root"


@contextlib.contextmanager
def mounted(filer: str, directory: Path) -> Iterator[Path]:
    """The files of a SeaweedFS below a directory; unmounted at the end, whatever happens."""
    (point := directory / "mount").mkdir()
    flags = {
        "filer": filer.removeprefix("http://"),
        "dir": point,
        "cacheDir": directory / "cache",
        "localSocket": directory / "mount.sock",
    }
    command = [str(WEED), "mount", *(f"-{name}={value}" for name, value in flags.items())]
    process = ServerProcess(command, directory / "log", probe=lambda: check_mounted(point))
    try:
        process.start()
        yield point
    finally:
        process.stop()
        # Lazily, since a file of it may still be open; it is no mount at all if the start failed.
        subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True, timeout=30)


def check_mounted(point: Path) -> None:
    if not find_mount(str(point)).filesystem.startswith("fuse"):
        raise FileNotFoundError(f"nothing is mounted at {point}")


@pytest.fixture(scope="module")
def mount(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if reason := why_not():
        pytest.skip(reason)
    server: S3Server = request.getfixturevalue("seaweedfs")
    with mounted(server.filer, tmp_path_factory.mktemp("fuse")) as point:
        yield point


@pytest.fixture
def place(mount: Path) -> Path:
    """A new directory's path on the mount."""
    return mount / f"anyshard-{uuid.uuid4().hex}"


class TestFuse(StoreContract):
    @pytest.fixture
    def make_store(self, place: Path) -> MakeStore:
        numbers = itertools.count()
        return lambda: LocalStore(place / f"step_{next(numbers)}", visibility_timeout_s=SOON_S)


def test_what_a_store_on_it_says(place: Path) -> None:
    """It is known not to create exclusively between hosts, and its free space is not believed."""
    store = LocalStore(place)
    assert (False, None) == (store.capabilities.guarded, store.free_nbytes())


def make_job(seed: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), nn.Linear(300, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    fill_training(model, optimizer, seed=seed)
    return model, optimizer


def save(place: Path, seed: str, *, overwrite: bool = False) -> Moment:
    model, optimizer = make_job(seed)
    anyshard.save(place, {"model": model, "optimizer": optimizer}, overwrite=overwrite)
    return Moment.of(model, optimizer)


def load(place: Path) -> Moment:
    model, optimizer = make_job("other")
    anyshard.load(place, {"model": model, "optimizer": optimizer})
    return Moment.of(model, optimizer)


def test_a_checkpoint_is_saved_and_loaded(place: Path) -> None:
    """A model and its optimizer come back bit-equal, also asynchronously, and a clean removes none of it."""
    assert [] == save(place / "step_1", "one").differences(load(place / "step_1"))
    model, optimizer = make_job("two")
    anyshard.async_save(place / "step_2", {"model": model, "optimizer": optimizer}).committed(60)
    anyshard.ops.clean(place / "step_2", older_than_s=0, grace_s=0)
    assert [] == Moment.of(model, optimizer).differences(load(place / "step_2"))


def test_saving_over_is_refused(place: Path) -> None:
    """Two hosts could both believe to have done it, so the old checkpoint stays, whole."""
    before = save(place, "one")
    with pytest.raises(StorageUnguarded):
        save(place, "two", overwrite=True)
    assert [] == before.differences(load(place))


def test_a_lost_file_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the wait for it: by its name."""
    monkeypatch.setattr("anyshard.storage.posix.mounts._REMOTE_TIMEOUT_S", SOON_S)
    save(place, "one")
    (name,) = keys_below(store := LocalStore(place), "data/optimizer/")
    store.delete([name])
    with pytest.raises(CheckpointDamaged, match=name):
        load(place)

"""Servers that few have: the contract, and one checkpoint on each, saved, loaded, replaced if that is safe, and deleted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import anyshard
from anyshard import ops
from anyshard.commit.guard import Guards
from anyshard.storage.fsspec_store import open_fsspec_store, to_s3fs_options
from anyshard.storage.protocol import Store
from anyshard.testing.store_contract import MakeStore, StoreContract
from anyshard.testing.store_fixtures import in_threads, pattern, write_blob
from tests.cases.jobs import bits, filled
from tests.long.servers import GcsServer, fake_gcs, rclone
from tests.servers import S3Server

__all__ = ["fake_gcs", "rclone"]

pytestmark = pytest.mark.long

NUM_WORDS = 3_000_000


def save(place: str, name: str, storage: Mapping[str, Any], **more: Any) -> anyshard.SaveReport:
    options = anyshard.SaveOptions(storage_options=storage, require_guarded=more.pop("require_guarded", False))
    return anyshard.save(place, {"model": {"w": filled(name, NUM_WORDS)}}, options=options, **more)


def loads(place: str, name: str, storage: Mapping[str, Any]) -> bool:
    """Whether a load gives the state of this name."""
    live = torch.zeros(NUM_WORDS)
    anyshard.load(place, {"model": {"w": live}}, options=anyshard.LoadOptions(storage_options=storage))
    return bits(filled(name, NUM_WORDS)) == bits(live)


class TestRclone(StoreContract):
    @pytest.fixture
    def make_store(self, rclone: S3Server) -> MakeStore:
        root, numbers, guards = f"s3://{rclone.make_bucket()}/run", itertools.count(), Guards()

        def make() -> Store:
            store = open_fsspec_store(f"{root}/step_{next(numbers)}", to_s3fs_options(rclone.options))
            return guards.settle(store, required=False)

        return make

    def test_blob_race_has_one_winner(self, store: Store) -> None:
        """Without conditions several may believe to be first, which is why no two saves share a key; the last one is whole."""
        contents = [pattern(10_000, seed) for seed in range(8)]
        in_threads([partial(write_blob, store, "data/a", content) for content in contents])
        assert store.read("data/a", max_nbytes=10_000) in contents


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp's, about what gcsfs hands it
class TestFakeGcs(StoreContract):
    @pytest.fixture
    def make_store(self, fake_gcs: GcsServer) -> MakeStore:
        root, numbers = f"gs://{fake_gcs.make_bucket()}/run", itertools.count()
        return lambda: open_fsspec_store(f"{root}/step_{next(numbers)}", fake_gcs.options)


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_server_that_ignores_conditions_is_found_out(rclone: S3Server, scheme: str) -> None:
    """Saves there say that they are unguarded and load; to replace one is refused, and so are saves that must be guarded."""
    bucket, s3fs_options = rclone.make_bucket(), to_s3fs_options(rclone.options)
    place, storage = f"{scheme}://{bucket}/run/step_1", rclone.options if scheme == "s3" else s3fs_options
    report = save(place, "first", storage)
    assert any("create-if-absent" in warning for warning in report.warnings)
    # Through s3fs in any case: this server answers whole objects for ranges that obstore asks for, which refuses them.
    assert loads(f"fsspec+s3://{bucket}/run/step_1", "first", s3fs_options)
    with pytest.raises(anyshard.StorageUnguarded):
        save(place, "second", storage, overwrite=True)
    with pytest.raises(anyshard.StorageUnguarded):
        save(f"{place}0", "second", storage, require_guarded=True)
    ops.delete(place, storage_options=storage)
    with pytest.raises(anyshard.CheckpointNotFound):
        loads(f"fsspec+s3://{bucket}/run/step_1", "first", s3fs_options)
    save(place, "third", storage)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_google_cloud_storage_by_gcsfs(fake_gcs: GcsServer) -> None:
    """It honours create-if-absent: a checkpoint is saved, loaded, replaced and deleted."""
    place, storage = f"fsspec+gs://{fake_gcs.make_bucket()}/run/step_1", fake_gcs.options
    save(place, "first", storage, require_guarded=True)
    assert loads(place, "first", storage)
    assert 2 == save(place, "second", storage, overwrite=True, require_guarded=True).generation
    assert loads(place, "second", storage)
    ops.delete(place, storage_options=storage)
    with pytest.raises(anyshard.CheckpointNotFound):
        loads(place, "second", storage)

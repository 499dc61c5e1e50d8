"""Cases from the field about object stores, on real servers. Each test is named after its row in cases.md."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
import torch.distributed as dist
from obstore.store import S3Store
from torch.distributed.tensor import Shard

import anyshard
from anyshard import ops
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import bits, error_of, filled, shard
from tests.proxy import Faults, Proxy, Rule, run_proxy
from tests.servers import AzureServer, S3Server
from tests.storage.fsspec_scenes import quick_s3fs_options

pytestmark = pytest.mark.slow

MIB = 1 << 20

Storage = Mapping[str, Any]


@pytest.fixture
def storage(server: S3Server, proxy: Proxy) -> Storage:
    """By way of the proxy."""
    return {**server.options, "endpoint": proxy.endpoint, "part_nbytes": 5 * MIB}


def make_state(name: str, *, num: int = 4, num_words: int = 64) -> dict[str, Any]:
    """A state whose every byte depends on its name."""
    return {"model": {f"w{i}": filled(f"{name} {i}", num_words) for i in range(num)}, "n": len(name)}


def save(place: str, state: Mapping[str, Any], storage: Storage, **more: Any) -> anyshard.SaveReport:
    """A save whose superseded files go at once."""
    options = anyshard.SaveOptions(storage_options=storage, overwrite_grace_s=0)
    return anyshard.save(place, dict(state), options=options, **more)


def loads(place: str, state: dict[str, Any], storage: Storage) -> bool:
    """Whether a load gives this very state."""
    live: dict[str, Any] = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}, "n": 0}
    anyshard.load(place, live, options=anyshard.LoadOptions(storage_options=storage))
    return all(bits(tensor) == bits(live["model"][name]) for name, tensor in state["model"].items()) and live["n"] == state["n"]


# Every place by its URL only -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["path", "file", "memory", "s3 seaweedfs", "s3 moto", "azure", "fsspec s3"])
def somewhere(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Storage]:
    """A place of each kind, and how to reach it."""
    kind: str = request.param
    if kind == "azure":
        azure: AzureServer = request.getfixturevalue("azurite")
        return f"az://{azure.make_container()}/run/step_1", azure.options
    if "s3" in kind:
        server: S3Server = request.getfixturevalue("moto_s3" if kind == "s3 moto" else "seaweedfs")
        if kind != "fsspec s3":
            return f"s3://{server.make_bucket()}/run/step_1", server.options
        return f"fsspec+s3://{server.make_bucket()}/run/step_1", quick_s3fs_options(server)
    urls = {"path": f"{tmp_path}/run/step_1", "file": f"file://{tmp_path}/run/step_1"}
    return urls.get(kind, f"memory://{uuid.uuid4().hex}/run/step_1"), {}


def test_b157_only_the_url_changes(somewhere: tuple[str, Storage]) -> None:
    """B157: save, refuse, overwrite, load, read one tensor, copy, clean and delete are the same calls everywhere."""
    place, storage = somewhere
    first, second = make_state("first"), make_state("second")
    save(place, first, storage)
    with pytest.raises(anyshard.CheckpointExists):
        save(place, second, storage)
    assert loads(place, first, storage)
    assert 2 == save(place, second, storage, overwrite=True).generation
    assert loads(place, second, storage)
    with anyshard.open(place, options=anyshard.LoadOptions(storage_options=storage)) as checkpoint:
        assert bits(second["model"]["w2"]) == checkpoint["model/w2"].bits().tobytes()
    ops.copy(place, f"{place}-copy", storage_options=storage, target_options=storage)
    ops.clean(place, older_than_s=0, grace_s=0, storage_options=storage)
    ops.delete(place, storage_options=storage)
    with pytest.raises(anyshard.CheckpointNotFound):
        loads(place, second, storage)
    assert loads(f"{place}-copy", second, storage)


# Requests ------------------------------------------------------------------------------------------------------------------


def cost(proxy: Proxy, act: Callable[[], object]) -> tuple[int, int]:
    """Requests and bytes of a call."""
    before = proxy.count()
    act()
    after = proxy.count()
    return sum(after.requests.values()) - sum(before.requests.values()), after.nbytes - before.nbytes


def test_b037_reads_are_few_and_no_longer_than_asked_for(place: str, storage: Storage, proxy: Proxy) -> None:
    """B037: of a hundred tensors of 100 KiB all come in a few ranges, and three of them without the rest."""
    state = make_state("w", num=100, num_words=25_600)
    save(place, state, storage)
    num_all, nbytes_all = cost(proxy, lambda: loads(place, state, storage))
    names = ("w0", "w50", "w99")
    few: dict[str, Any] = {"model": {name: torch.zeros(25_600) for name in names}, "n": 0}
    options = anyshard.LoadOptions(storage_options=storage, only=[f"model/{name}" for name in names])
    num_few, nbytes_few = cost(proxy, lambda: anyshard.load(place, few, options=options))
    assert [bits(state["model"][name]) for name in names] == [bits(tensor) for tensor in few["model"].values()]
    assert (num_all < 30, num_few < 30, nbytes_all < 11 * MIB, nbytes_few < 2 * MIB) == (True,) * 4


def test_b047_requests_grow_with_files_and_not_with_tensors(place: str, storage: Storage, proxy: Proxy) -> None:
    """B047: five hundred tensors are saved and loaded in as many requests as five."""
    save(f"{place}0", make_state("probe"), storage)
    few, many = make_state("few", num=5), make_state("many", num=500)
    saves = [cost(proxy, partial(save, f"{place}{state['n']}", state, storage))[0] for state in (few, many)]
    reads = [cost(proxy, partial(loads, f"{place}{state['n']}", state, storage))[0] for state in (few, many)]
    assert [saves[0]] * 2 == saves
    assert [reads[0]] * 2 == reads


def test_b047_an_async_save_does_not_wait_for_the_bucket(place: str, storage: Storage, proxy: Proxy) -> None:
    """B047: the call returns after staging though no blob can be sent yet; the save commits once they can."""
    state, impatient = make_state("w"), {**storage, "request_timeout_s": 1.0}
    proxy.set(Faults(rules=[Rule("PUT .*data/", 503, times=10_000)]))
    pending = anyshard.async_save(place, state, options=anyshard.SaveOptions(storage_options=impatient))
    state["model"]["w0"].zero_()
    assert not pending.is_done
    proxy.set(Faults())
    assert 1 == pending.result(timeout_s=60).generation
    assert loads(place, make_state("w"), storage)


# Requests without an answer ------------------------------------------------------------------------------------------------


def make_sharded(name: str, num_rows: int) -> dict[str, torch.Tensor]:
    """A tensor of which each rank has its rows."""
    return {"w": shard(filled(name, num_rows, 1024), make_mesh(("dp", dist.get_world_size())), Shard(0))}


def save_sharded(place: str, storage: Storage, num_rows: int) -> None:
    anyshard.save(place, make_sharded("w", num_rows), options=anyshard.SaveOptions(storage_options=storage))


def save_badly(place: str, storage: Storage, num_rows: int) -> tuple[str, str]:
    return error_of(lambda: save_sharded(place, storage, num_rows))


def load_badly(place: str, ways: list[Storage]) -> tuple[str, str]:
    """The error of a load in which each rank has its own way to the store."""
    options = anyshard.LoadOptions(storage_options=ways[dist.get_rank()], timeout_s=3)
    return error_of(lambda: anyshard.load(place, make_sharded("before", 64), options=options))


def test_b021_a_read_that_stalls_on_one_rank(
    worlds: Worlds, place: str, storage: Storage, moto_s3: S3Server, proxy: Proxy
) -> None:
    """B021: all ranks stop at the limit, and are told which rank waited for which file."""
    worlds(2).run(save_sharded, place, moto_s3.options, 64)
    proxy.set(Faults(rules=[Rule("GET .*data/w/", "hang", times=99)]))
    errors = worlds(2).run(load_badly, place, [moto_s3.options, storage])
    assert [errors[0]] * 2 == errors
    assert ("rank 1: " in errors[0][1], "data/w/" in errors[0][1]) == (True, True), errors[0]
    assert "rank 0: " not in errors[0][1]


def test_b046_a_part_that_is_never_answered(worlds: Worlds, place: str, storage: Storage, proxy: Proxy) -> None:
    """B046: the save fails on all ranks and names rank, object and part; nothing is published."""
    impatient = {**storage, "request_timeout_s": 0.5, "max_attempts": 2}
    proxy.set(Faults(rules=[Rule("PUT .*data/w/1[.].*partNumber=2", "hang", times=99)]))
    errors = worlds(2).run(save_badly, place, impatient, 4096)
    assert [errors[0]] * 2 == errors
    for part in ("rank 1: ", f"{place}/data/w/1.", "part 2"):
        assert part in errors[0][1]
    with pytest.raises(anyshard.CheckpointNotFound):
        loads(place, make_state("w"), storage)


# Several who do the same, and copies by others -----------------------------------------------------------------------------


def test_b135_four_delete_the_same_checkpoint(place: str, moto_s3: S3Server) -> None:
    """B135: of several that rotate the same checkpoints away at once none fails, and each is gone."""
    storage, together = moto_s3.options, threading.Barrier(4)

    def rotate(step: int) -> None:
        together.wait(60)
        ops.delete(f"{place}{step}", storage_options=storage)

    for step in range(5):
        save(f"{place}{step}", make_state("w"), storage)
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(rotate, step) for _ in range(4)]:
                future.result()
        with pytest.raises(anyshard.CheckpointNotFound):
            loads(f"{place}{step}", make_state("w"), storage)


def test_b143_a_copy_by_another_program_is_a_checkpoint(moto_s3: S3Server, tmp_path: Path) -> None:
    """B143: a directory that a program has copied to a bucket, in any order, is complete there, and a clean leaves it so."""
    state, bucket, storage = make_state("w"), moto_s3.make_bucket(), moto_s3.options
    save(str(tmp_path / "step_1"), state, {})
    copier = S3Store(bucket, **storage, client_options={"allow_http": True})
    paths = sorted((path for path in tmp_path.rglob("*") if path.is_file()), reverse=True)
    for path in paths:
        obstore.put(copier, str(path.relative_to(tmp_path)), path)
    place = f"s3://{bucket}/step_1"
    ops.clean(place, older_than_s=0, grace_s=0, storage_options=storage)
    assert len(paths) == sum(len(batch) for batch in obstore.list(copier))
    assert loads(place, state, storage)
    assert 2 == save(place, state, storage, overwrite=True).generation


# Credentials ---------------------------------------------------------------------------------------------------------------


class Lender:
    """Lends the keys of a server for a second each; after `num_good` times they are wrong."""

    def __init__(self, options: Storage, num_good: int = 1_000_000) -> None:
        self.num_lent = 0
        self._keys = {name: options[name] for name in ("access_key_id", "secret_access_key")}
        self._num_good = num_good

    def __call__(self) -> dict[str, Any]:
        self.num_lent += 1
        wrong = {"secret_access_key": "wrong"} if self.num_lent > self._num_good else {}
        return {**self._keys, **wrong, "token": None, "expires_at": datetime.now(UTC) + timedelta(seconds=1)}


def lent(server: S3Server, endpoint: str, lender: Lender) -> Storage:
    return {"endpoint": endpoint, "region": "us-east-1", "part_nbytes": 5 * MIB, "credential_provider": lender}


def test_credentials_that_expire_in_mid_save(seaweedfs: S3Server) -> None:
    """A save and a load that last longer than any credentials go through, and these are asked for again meanwhile."""
    state, lender = make_state("w", num=2, num_words=1_500_000), Lender(seaweedfs.options)
    place = f"s3://{seaweedfs.make_bucket()}/run/step_1"
    with run_proxy(seaweedfs.endpoint, Faults(latency_s=0.3)) as proxy:
        save(place, state, lent(seaweedfs, proxy.endpoint, lender))
        num_of_save = lender.num_lent
        assert loads(place, state, lent(seaweedfs, proxy.endpoint, lender))
    assert (num_of_save >= 2, lender.num_lent > num_of_save) == (True, True)


def test_credentials_that_are_not_good_any_more(seaweedfs: S3Server) -> None:
    """When fresh ones are refused in the middle of a save it ends with `StorageDenied`, which shows none; nothing is there."""
    state, lender = make_state("w"), Lender(seaweedfs.options, num_good=2)
    place = f"s3://{seaweedfs.make_bucket()}/run/step_1"
    with run_proxy(seaweedfs.endpoint, Faults(latency_s=0.3)) as proxy, pytest.raises(anyshard.StorageDenied) as caught:
        save(place, state, lent(seaweedfs, proxy.endpoint, lender))
    assert not any(word in f"{caught.value!r} {caught.value.__cause__!r}" for word in ("testsecret", "testkey"))
    with pytest.raises(anyshard.CheckpointNotFound):
        loads(place, state, seaweedfs.options)

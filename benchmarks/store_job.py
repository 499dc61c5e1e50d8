"""What each rank of the benchmark on an object store does: cases for `anyshard.testing.World`, on the job of fsdp_job.py.

Peers are DCP with the connector of AWS and with fsspec. Raw is one object per rank of as many bytes as the rank has.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import obstore
import torch
import torch.distributed as dist
from fsdp_job import count_nbytes, make_job
from obstore.store import S3Store
from torch.distributed.checkpoint import DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import anyshard

RANGE_NBYTES = anyshard.LoadOptions().block_nbytes


@dataclass(frozen=True, slots=True)
class Peer:
    """DCP with settings. `threads` of a save make as many files per rank; no part size is that of the client."""

    client: str
    threads: int
    part_nbytes: int | None = None
    reader: str = "dcp_optimized"

    def __str__(self) -> str:
        part = "default" if self.part_nbytes is None else f"{self.part_nbytes >> 20} MiB"
        return f"{self.client}, {self.threads} threads, {part} parts" + f", {self.reader}" * (self.reader != "dcp_optimized")


def save(num_blocks: int, place: str, options: dict[str, Any]) -> bool:
    """Our save; whether it found a cached plan."""
    return anyshard.save(
        place, make_job(num_blocks).app_state, options=anyshard.SaveOptions(storage_options=options)
    ).plan_was_cached


def meet(num_blocks: int, place: str, options: dict[str, Any]) -> None:
    """A first little save into a bucket, by which this process finds out what the store can do; later ones know."""
    del num_blocks
    anyshard.save(place, {"met": torch.ones(1)}, options=anyshard.SaveOptions(storage_options=options))


def load(num_blocks: int, place: str, options: dict[str, Any]) -> None:
    """Our load."""
    anyshard.load(place, make_job(num_blocks).app_state, options=anyshard.LoadOptions(storage_options=options))


def save_with_dcp(num_blocks: int, place: str, options: dict[str, Any], peer: dict[str, Any]) -> None:
    """DCP's save with its plans cached. The state dict, which costs it further time, was made before."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp_save(make_job(num_blocks).state, storage_writer=_make_writer(place, options, Peer(**peer)), planner=planner)


def load_with_dcp(num_blocks: int, place: str, options: dict[str, Any], peer: dict[str, Any]) -> None:
    """DCP's load into the live tensors, without the `set_state_dict` that its users call after it."""
    dcp_load(make_job(num_blocks).state, storage_reader=_make_reader(place, options, Peer(**peer)))


def put_raw(num_blocks: int, bucket: str, options: dict[str, Any], part_nbytes: int, num_streams: int) -> None:
    """One multipart upload of this rank's bytes, with that many parts in flight."""
    body = _raw_body(count_nbytes(num_blocks))
    store = _raw_store(bucket, tuple(options.items()))
    obstore.put(store, _raw_key(), body, use_multipart=True, chunk_size=part_nbytes, max_concurrency=num_streams)


def get_raw(num_blocks: int, bucket: str, options: dict[str, Any], num_streams: int) -> None:
    """Ranges of what this rank has put, that many at once."""
    store, nbytes = _raw_store(bucket, tuple(options.items())), count_nbytes(num_blocks)

    def get(start: int) -> None:
        stop = min(start + RANGE_NBYTES, nbytes)
        assert stop - start == len(obstore.get_range(store, _raw_key(), start=start, end=stop))

    with ThreadPoolExecutor(num_streams) as pool:
        list(pool.map(get, range(0, nbytes, RANGE_NBYTES)))


def _raw_key() -> str:
    return f"raw/{dist.get_rank()}"


@functools.cache
def _raw_body(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(dist.get_rank()).integers(0, 256, nbytes, np.uint8))


@functools.lru_cache(maxsize=1)
def _raw_store(bucket: str, options: tuple[tuple[str, Any], ...]) -> S3Store:
    return S3Store(bucket, **dict(options), client_options={"allow_http": True, "timeout": "300s"})


def _make_writer(place: str, options: dict[str, Any], peer: Peer) -> StorageWriter:
    # Neither has anything to sync: an upload that was acknowledged is stored. Where a stream has no descriptor, `sync_files`
    # would sync all disks of the machine.
    if peer.client == "fsspec":
        return FsspecWriter(place, sync_files=False, thread_count=peer.threads, **_fsspec_options(options, peer))
    from s3torchconnector.dcp import S3StorageWriter  # noqa: PLC0415 - a peer that only the benchmark needs

    _tell_connector(options)
    return S3StorageWriter(
        options["region"], place, s3client_config=_connector_config(peer), thread_count=peer.threads, overwrite=True
    )


def _make_reader(place: str, options: dict[str, Any], peer: Peer) -> StorageReader:
    if peer.client == "fsspec":
        return FsspecReader(place, **_fsspec_options(options, peer))
    from s3torchconnector import S3ReaderConstructor  # noqa: PLC0415 - as above
    from s3torchconnector.dcp import S3StorageReader  # noqa: PLC0415 - as above

    _tell_connector(options)
    reader = getattr(S3ReaderConstructor, peer.reader)()
    return S3StorageReader(options["region"], place, s3client_config=_connector_config(peer), reader_constructor=reader)


def _fsspec_options(options: dict[str, Any], peer: Peer) -> dict[str, Any]:
    part = {} if peer.part_nbytes is None else {"default_block_size": peer.part_nbytes}
    client = {"endpoint_url": options["endpoint"], "region_name": options["region"]}
    return {"key": options["access_key_id"], "secret": options["secret_access_key"], "client_kwargs": client, **part}


def _connector_config(peer: Peer) -> Any:
    from s3torchconnector import S3ClientConfig  # noqa: PLC0415 - as above

    part = {} if peer.part_nbytes is None else {"part_size": peer.part_nbytes}
    return S3ClientConfig(force_path_style=True, **part)


def _tell_connector(options: dict[str, Any]) -> None:
    """Its DCP classes take neither an endpoint nor credentials, but from the environment."""
    os.environ["AWS_ENDPOINT_URL"] = options["endpoint"]
    os.environ["AWS_ACCESS_KEY_ID"] = options["access_key_id"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret_access_key"]


def plain(peer: Peer) -> dict[str, Any]:
    """A peer as it travels to a rank."""
    return asdict(peer)

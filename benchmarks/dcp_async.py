"""The ways in which PyTorch DCP saves asynchronously, each as its users would set it up, made as durable as ours.

| mode | staging | writes |
|---|---|---|
| default, writer; default, stager | in the call, into memory that is new each time (two ways into the same) | a thread |
| cached | in the call, into memory kept between saves | a thread |
| shared; shared, process | the same in shared memory | a thread; a process of its own |
| async staging | after the call, on a thread, into memory kept between saves | a thread |
| async staging, process | the same in shared memory | a process of its own |

Kept memory is pinned and copies are non-blocking where CUDA is there. Plans are cached in all modes but the defaults. A process
takes one descriptor or two for each tensor, so it fails on tens of thousands of them: `choose_modes` leaves it out then.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from starts import Started
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save


def make_writer(path: Path, num_threads: int) -> FileSystemWriter:
    """Where DCP writes: data and metadata are synced, one file for each thread."""
    return FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=num_threads)


@functools.cache
def keep_stager(*, is_shared: bool, is_async: bool) -> DefaultStager:
    """A stager that keeps its memory between saves; one for all modes that need such a one, as only one save is under way."""
    has_cuda = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=has_cuda, use_shared_memory=is_shared, use_async_staging=is_async, use_non_blocking_copy=has_cuda
    )
    return DefaultStager(options)


def _stage(path: Path, num_threads: int, *, is_shared: bool, is_async: bool = False, in_process: bool = False) -> dict[str, Any]:
    return {
        "storage_writer": make_writer(path, num_threads),
        "planner": DefaultSavePlanner(enable_plan_caching=True),
        "async_stager": keep_stager(is_shared=is_shared, is_async=is_async),
        "async_checkpointer_type": AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD,
    }


MODES: Mapping[str, Callable[[Path, int], dict[str, Any]]] = {
    "dcp default, writer": lambda path, num_threads: {"storage_writer": make_writer(path, num_threads)},
    "dcp default, stager": lambda path, _: {"checkpoint_id": path},
    "dcp cached": functools.partial(_stage, is_shared=False),
    "dcp shared": functools.partial(_stage, is_shared=True),
    "dcp shared, process": functools.partial(_stage, is_shared=True, in_process=True),
    "dcp async staging": functools.partial(_stage, is_shared=False, is_async=True),
    "dcp async staging, process": functools.partial(_stage, is_shared=True, is_async=True, in_process=True),
}
MAX_SHARED = 5_000


def choose_modes(num_tensors: int, *prefixes: str) -> list[str]:
    """The modes whose names begin with one of `prefixes` and that can save so many tensors."""
    return [mode for mode in MODES if mode.startswith(prefixes) and ("process" not in mode or num_tensors <= MAX_SHARED)]


def start(mode: str, state: Mapping[str, Any], path: Path, *, num_threads: int = 1) -> Started:
    """Start a save by one of `MODES`."""
    response = async_save(state, **MODES[mode](path, num_threads))
    if isinstance(response, AsyncSaveResponse):
        return Started(response.staging_completion.result, lambda: _end(response.upload_completion, path))
    return Started(lambda: None, lambda: _end(response, path))


def _end(upload: Any, path: Path) -> None:
    upload.result()
    if not dist.is_initialized() or dist.get_rank() == 0:
        for directory in (path, path.parent):
            _sync_directory(directory)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def start_job() -> None:
    """Make this process a job of one rank: DCP's own process needs one. Anyshard saves through the same."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)


def close_stagers() -> None:
    """End the threads of all stagers, which else keep the process alive."""
    for is_shared in (False, True):
        for is_async in (False, True):
            keep_stager(is_shared=is_shared, is_async=is_async).close()


def ignore_warnings() -> None:
    """DCP says these at each call; we know."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)

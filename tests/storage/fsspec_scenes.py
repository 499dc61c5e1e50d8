"""Places on fsspec, and models to keep there."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

import torch
from aiobotocore.session import AioSession  # type: ignore[import-untyped]

from anyshard.storage.fsspec_store import FsspecStore, open_fsspec_store, to_s3fs_options
from anyshard.storage.fsspec_store.writer import WHOLE_NBYTES
from tests.servers import S3Server

LONG_NBYTES = WHOLE_NBYTES + 12_345

Places = Callable[[], FsspecStore]


def numbered(root: str, options: dict[str, Any] | None = None) -> Places:
    """Each call opens the store at another place below `root`."""
    numbers = itertools.count()
    return lambda: open_fsspec_store(f"{root}/step_{next(numbers)}", options or {})


def quick_s3fs_options(server: S3Server) -> dict[str, Any]:
    """Options that reach a server, with what s3fs otherwise reads from files for each new store: most of a test's time."""
    return {**to_s3fs_options(server.options), "session": AioSession()}


def in_memory() -> Places:
    return numbered(f"memory://test-{uuid.uuid4().hex}")


def model_state(seed: int) -> dict[str, Any]:
    """A small model, filled."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    return {"model": model, "extra": {"step": seed}}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two of them are bit for bit alike."""
    pairs = zip(one["model"].parameters(), other["model"].parameters(), strict=True)
    return one["extra"] == other["extra"] and all(torch.equal(left, right) for left, right in pairs)

"""Settings: frozen dataclasses, and the one table of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anyshard.errors import LimitExceeded

MIB = 1 << 20
GIB = 1 << 30

# name -> what it sets. Read where a checkpointer is made, nowhere else.
ENVIRONMENT = {
    "ANYSHARD_EVENTS": "path of a file to which every event is appended as one JSON line",
    "ANYSHARD_STORAGE_THREADS": "number of reads or writes in flight (default 4)",
}


def default_threads() -> int:
    """Reads or writes in flight: ANYSHARD_STORAGE_THREADS, else 4."""
    return int(os.environ.get("ANYSHARD_STORAGE_THREADS", "4"))


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise LimitExceeded(f"{name} must be positive, found {value}")


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save works; never what it stores.

    `byte_budget` bounds the memory for bytes in flight. `max_blob_nbytes` is where a section is cut into a further blob.
    `overwrite_grace_s` is how long files of a superseded generation stay for readers. `user` is stored in the manifest (JSON).
    """

    byte_budget: int = 128 * MIB
    block_nbytes: int = 16 * MIB
    threads: int = field(default_factory=default_threads)
    max_blob_nbytes: int = 16 * GIB
    overwrite_grace_s: float = 3600.0
    timeout_s: float = 1800.0
    user: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_positive(
            byte_budget=self.byte_budget,
            block_nbytes=self.block_nbytes,
            threads=self.threads,
            max_blob_nbytes=self.max_blob_nbytes,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a load works and what it takes.

    `strict` makes missing and unexpected addresses errors (`strict_extra_state` those of modules' extra state too). `only` and
    `exclude` are address globs (`*` stays within a component, `**` does not). `cast` allows another dtype. `verify="first"`
    checks all wanted bytes before the first tensor changes (and reads twice).
    """

    strict: bool = True
    strict_extra_state: bool = False
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    cast: bool = False
    verify: Literal["filling", "first"] = "filling"
    byte_budget: int = 64 * MIB
    block_nbytes: int = 8 * MIB
    threads: int = field(default_factory=default_threads)

    def __post_init__(self) -> None:
        _check_positive(byte_budget=self.byte_budget, block_nbytes=self.block_nbytes, threads=self.threads)

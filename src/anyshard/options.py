"""Settings: frozen dataclasses, and the one table of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anyshard.errors import InvalidOption

MIB = 1 << 20
GIB = 1 << 30

TIMEOUT_S = 1800.0  # the default

# name -> what it sets. Read where options and a checkpointer are made, the last one where ranks are found, nowhere else.
ENVIRONMENT = {
    "ANYSHARD_EVENTS": "path of a file to which every event is appended as one JSON line",
    "ANYSHARD_STORAGE_THREADS": "number of reads or writes in flight (default 8)",
    "SLURM_JOB_ID": "the job, set by Slurm: a run's lease is taken over at once by the same job, restarted",
    "TORCHELASTIC_RUN_ID": "the same, set by torchrun (--rdzv-id)",
    "WORLD_SIZE": "number of ranks, set by torchrun: if above 1, saving and loading need init_process_group",
}


def default_threads() -> int:
    """Reads or writes in flight: ANYSHARD_STORAGE_THREADS, else 8."""
    text = os.environ.get("ANYSHARD_STORAGE_THREADS", "8")
    if not text.isdecimal() or int(text) == 0:
        raise InvalidOption(f"ANYSHARD_STORAGE_THREADS: expected a whole number above 0, found {text!r}; unset or correct it")
    return int(text)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save works; never what it stores.

    `byte_budget` bounds the memory for bytes in flight. `max_blob_nbytes` is where a section is cut into a further blob.
    `overwrite_grace_s` is how long files of a superseded generation stay for readers. `timeout_s` is how long it waits for
    storage that does not answer, and for other ranks a little longer (half of it, at most 30 s), so that they can tell what they
    wait for. `user` is stored in the manifest (JSON).

    `replica_check` says how much of what several ranks hold alike is compared: in full at the first save of a structure and by
    samples at later ones ("sample"), always in full, or not at all ("off"). `on_differing_values` says what becomes of plain
    values that differ between ranks at a later save: the first rank's is stored and the report says so ("warn"), or the save
    fails ("error"), as it does at the first save of a structure in any case.

    For `async_save`: `staging` is "eager" (all bytes are copied before the call returns) or "lazy" (what only hooked optimizers
    change is copied while training goes on, and their next step waits for it). `max_in_flight` bounds the saves of one run (the
    directory above `place`) that are not committed yet, and half of those of all runs; each takes an arena of this rank's share.
    `exit_timeout_s` is how long the end of the process waits for them.

    `require_guarded` refuses to save where the store has no create-if-absent that can be relied upon; else such a save goes by
    rules that keep out a second one, as far as the listing of the store is up to date, and the report says so.
    `storage_options` say how to reach the store (endpoint, region, credentials, ...; see docs/storage.md).
    """

    byte_budget: int = 64 * MIB
    block_nbytes: int = 8 * MIB
    threads: int = field(default_factory=default_threads)
    max_blob_nbytes: int = 16 * GIB
    overwrite_grace_s: float = 3600.0
    timeout_s: float = TIMEOUT_S
    user: Mapping[str, Any] = field(default_factory=dict)
    replica_check: Literal["sample", "full", "off"] = "sample"
    on_differing_values: Literal["warn", "error"] = "warn"
    staging: Literal["eager", "lazy"] = "eager"
    max_in_flight: int = 1
    exit_timeout_s: float = 600.0
    require_guarded: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold credentials

    def __post_init__(self) -> None:
        _check_counts(self, "byte_budget", "block_nbytes", "threads", "max_blob_nbytes", "max_in_flight")
        _check_seconds(self, "timeout_s", can_be_zero=False)
        _check_seconds(self, "exit_timeout_s", can_be_zero=True)
        _check(self, "staging", self.staging in ("eager", "lazy"), "'eager' or 'lazy'")
        _check_seconds(self, "overwrite_grace_s", can_be_zero=True)
        _check(self, "user", isinstance(self.user, Mapping), "a mapping")
        _check(self, "require_guarded", isinstance(self.require_guarded, bool), "True or False")
        _check(self, "storage_options", isinstance(self.storage_options, Mapping), "a mapping")
        _check(self, "replica_check", self.replica_check in ("sample", "full", "off"), "'sample', 'full' or 'off'")
        _check(self, "on_differing_values", self.on_differing_values in ("warn", "error"), "'warn' or 'error'")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a load works and what it takes.

    `strict` makes missing and unexpected addresses errors (`strict_extra_state` those of modules' extra state too). `only` and
    `exclude` are address globs (`*` stays within a component, `**` does not). `cast` allows another dtype. `verify="first"`
    checks all wanted bytes before the first tensor changes (and reads twice). `timeout_s` is how long it waits for storage that
    does not answer, and for other ranks a little longer (half of it, at most 30 s), so that they can tell what they wait for.
    `storage_options` say how to reach the store (endpoint, region, credentials, ...; see docs/storage.md).
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
    timeout_s: float = TIMEOUT_S
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold credentials

    def __post_init__(self) -> None:
        _check(self, "storage_options", isinstance(self.storage_options, Mapping), "a mapping")
        for name in ("strict", "strict_extra_state", "cast"):
            _check(self, name, isinstance(getattr(self, name), bool), "True or False")
        for name in ("only", "exclude"):
            _check(self, name, _is_texts(getattr(self, name)), "a list of globs, like ['model/**']")
        _check(self, "verify", self.verify in ("filling", "first"), "'filling' or 'first'")
        _check_counts(self, "byte_budget", "block_nbytes", "threads")
        _check_seconds(self, "timeout_s", can_be_zero=False)


def _check(options: object, name: str, is_fine: bool, expected: str) -> None:  # noqa: FBT001 - the verdict, not a mode
    if not is_fine:
        raise InvalidOption(f"{name}: expected {expected}, found {getattr(options, name)!r}")


def _check_counts(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        _check(options, name, type(value) is int and value > 0, "a whole number above 0")


def _check_seconds(options: object, name: str, *, can_be_zero: bool) -> None:
    value = getattr(options, name)
    is_fine = isinstance(value, (int, float)) and (value > 0 or (can_be_zero and value == 0))
    _check(options, name, is_fine, "a number of seconds, 0 or more" if can_be_zero else "a number of seconds above 0")


def _is_texts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in value)

"""Anyshard saves a training job's state once and loads it under any parallelism.

The public names are looked up on first use, so that importing anyshard loads neither torch nor NumPy nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyshard import errors, ops
    from anyshard._api import load, open, register_value, save
    from anyshard.adapters.per_rank import PerRank
    from anyshard.adapters.random_state import RNGState
    from anyshard.checkpoint import Checkpoint
    from anyshard.errors import (
        AnyshardError,
        BlobExists,
        BlobNotFound,
        CheckpointDamaged,
        CheckpointExists,
        CheckpointNotFound,
        CheckpointReplaced,
        CommitConflict,
        CommitOutcomeUnknown,
        Difference,
        InvalidAppState,
        InvalidOption,
        InvalidPath,
        InvalidRegistration,
        KeyValueStoreLost,
        LimitExceeded,
        LoadInterrupted,
        Mismatch,
        NotACheckpoint,
        OperationFailed,
        RankMissing,
        StateMismatch,
        StorageDenied,
        StorageError,
        StorageFull,
        StorageStuck,
        StructureChanged,
        UnsupportedFormat,
        UnsupportedValue,
    )
    from anyshard.monitor.events import Event, Sink
    from anyshard.monitor.sinks import JsonLinesSink, LoggingSink
    from anyshard.options import LoadOptions, SaveOptions
    from anyshard.records.addresses import escape
    from anyshard.reports import LoadReport, SaveReport

__version__ = "0.1.0"

__all__ = [
    "AnyshardError",
    "BlobExists",
    "BlobNotFound",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointExists",
    "CheckpointNotFound",
    "CheckpointReplaced",
    "CommitConflict",
    "CommitOutcomeUnknown",
    "Difference",
    "Event",
    "InvalidAppState",
    "InvalidOption",
    "InvalidPath",
    "InvalidRegistration",
    "JsonLinesSink",
    "KeyValueStoreLost",
    "LimitExceeded",
    "LoadInterrupted",
    "LoadOptions",
    "LoadReport",
    "LoggingSink",
    "Mismatch",
    "NotACheckpoint",
    "OperationFailed",
    "PerRank",
    "RNGState",
    "RankMissing",
    "SaveOptions",
    "SaveReport",
    "Sink",
    "StateMismatch",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageStuck",
    "StructureChanged",
    "UnsupportedFormat",
    "UnsupportedValue",
    "__version__",
    "errors",
    "escape",
    "load",
    "open",
    "ops",
    "register_value",
    "save",
]

_SUBMODULES = ("errors", "ops")

# Where each public name is defined; a name that is not here is an error class.
_HOMES = {
    "_api": ("load", "open", "register_value", "save"),
    "adapters.per_rank": ("PerRank",),
    "adapters.random_state": ("RNGState",),
    "checkpoint": ("Checkpoint",),
    "monitor.events": ("Event", "Sink"),
    "monitor.sinks": ("JsonLinesSink", "LoggingSink"),
    "options": ("LoadOptions", "SaveOptions"),
    "records.addresses": ("escape",),
    "reports": ("LoadReport", "SaveReport"),
}


if not TYPE_CHECKING:  # a type checker that sees __getattr__ believes in every name, misspelt ones too

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'anyshard' has no attribute {name!r}; anyshard.__all__ lists its public names")
        if name in _SUBMODULES:
            return import_module(f"anyshard.{name}")
        home = next((home for home, names in _HOMES.items() if name in names), "errors")
        return getattr(import_module(f"anyshard.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

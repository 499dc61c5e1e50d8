"""Anyshard saves a training job's state once and loads it under any parallelism.

The public names are looked up on first use, so that importing anyshard loads neither torch nor NumPy nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyshard import errors, ops
    from anyshard._api import async_save, load, open, prepare, register_value, save, wait_all
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
        EarlierSaveFailed,
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
        RunInUse,
        StateMismatch,
        StillPending,
        StorageDenied,
        StorageError,
        StorageFull,
        StorageStuck,
        StorageUnavailable,
        StorageUnguarded,
        StructureChanged,
        TornSnapshot,
        UnsupportedFormat,
        UnsupportedValue,
    )
    from anyshard.interval import IntervalAdvice, advise_interval, job_mtbf_s
    from anyshard.monitor.events import Event, Sink
    from anyshard.monitor.sinks import JsonLinesSink, LoggingSink
    from anyshard.options import LoadOptions, SaveOptions
    from anyshard.pending import PendingSave
    from anyshard.planning.layouts import Layout
    from anyshard.progress import RankStatus
    from anyshard.records.addresses import escape
    from anyshard.reports import LoadForecast, LoadReport, PrepareReport, SaveReport, StagingReport
    from anyshard.run.data_workers import shield_worker
    from anyshard.run.parts import SplitStep
    from anyshard.run.policies import KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy, Protect, WeightsOnly
    from anyshard.run.preemption import Preemption
    from anyshard.run.retention import PruneReport
    from anyshard.run.run import Run
    from anyshard.run.step_info import StepInfo
    from anyshard.run.when import Continuously, EveryMinutes, EverySteps, SavePolicy

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
    "Continuously",
    "Difference",
    "EarlierSaveFailed",
    "Event",
    "EveryMinutes",
    "EverySteps",
    "IntervalAdvice",
    "InvalidAppState",
    "InvalidOption",
    "InvalidPath",
    "InvalidRegistration",
    "JsonLinesSink",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepPolicy",
    "KeyValueStoreLost",
    "Layout",
    "LimitExceeded",
    "LoadForecast",
    "LoadInterrupted",
    "LoadOptions",
    "LoadReport",
    "LoggingSink",
    "Mismatch",
    "NotACheckpoint",
    "OperationFailed",
    "PendingSave",
    "PerRank",
    "Preemption",
    "PrepareReport",
    "Protect",
    "PruneReport",
    "RNGState",
    "RankMissing",
    "RankStatus",
    "Run",
    "RunInUse",
    "SaveOptions",
    "SavePolicy",
    "SaveReport",
    "Sink",
    "SplitStep",
    "StagingReport",
    "StateMismatch",
    "StepInfo",
    "StillPending",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageStuck",
    "StorageUnavailable",
    "StorageUnguarded",
    "StructureChanged",
    "TornSnapshot",
    "UnsupportedFormat",
    "UnsupportedValue",
    "WeightsOnly",
    "__version__",
    "advise_interval",
    "async_save",
    "errors",
    "escape",
    "job_mtbf_s",
    "load",
    "open",
    "ops",
    "prepare",
    "register_value",
    "save",
    "shield_worker",
    "wait_all",
]

_SUBMODULES = ("errors", "ops")

# Where each public name is defined; a name that is not here is an error class.
_HOMES = {
    "_api": ("async_save", "load", "open", "prepare", "register_value", "save", "wait_all"),
    "adapters.per_rank": ("PerRank",),
    "adapters.random_state": ("RNGState",),
    "checkpoint": ("Checkpoint",),
    "interval": ("IntervalAdvice", "advise_interval", "job_mtbf_s"),
    "monitor.events": ("Event", "Sink"),
    "monitor.sinks": ("JsonLinesSink", "LoggingSink"),
    "options": ("LoadOptions", "SaveOptions"),
    "pending": ("PendingSave",),
    "planning.layouts": ("Layout",),
    "progress": ("RankStatus",),
    "records.addresses": ("escape",),
    "reports": ("LoadForecast", "LoadReport", "PrepareReport", "SaveReport", "StagingReport"),
    "run.data_workers": ("shield_worker",),
    "run.parts": ("SplitStep",),
    "run.policies": ("KeepBest", "KeepEvery", "KeepFor", "KeepLast", "KeepPolicy", "Protect", "WeightsOnly"),
    "run.preemption": ("Preemption",),
    "run.retention": ("PruneReport",),
    "run.run": ("Run",),
    "run.step_info": ("StepInfo",),
    "run.when": ("Continuously", "EveryMinutes", "EverySteps", "SavePolicy"),
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

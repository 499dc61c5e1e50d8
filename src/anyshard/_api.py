"""The user's verbs: save, load, open."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from anyshard.checkpoint import Checkpoint
from anyshard.checkpointer import Checkpointer
from anyshard.options import LoadOptions, SaveOptions
from anyshard.records.values import ValueRegistry

if TYPE_CHECKING:
    from anyshard.coord.torch_dist import GroupLike
    from anyshard.monitor.events import Sink
    from anyshard.reports import LoadReport, SaveReport
    from anyshard.storage.protocol import Store

__all__ = ["Checkpoint", "load", "open", "register_value", "save"]

T = TypeVar("T")


def save(  # noqa: PLR0913 - the public verb; all but two are keywords
    place: str | os.PathLike[str] | Store,
    app_state: Mapping[str, object],
    *,
    step: int | None = None,
    overwrite: bool = False,
    group: GroupLike = None,
    options: SaveOptions | None = None,
    sinks: Sequence[Sink] = (),
) -> SaveReport:
    """Save `app_state` to `place` and return when it is committed: durable, whole, and visible to `load`.

    If it raises, `place` holds what it held before (`CommitOutcomeUnknown` excepted) and nothing in memory has changed. In a job
    of several ranks all of them (or all of `group`) call it, and a failure on one rank is raised on all: as `OperationFailed`,
    which is also an error of the kinds below if all that failed did so alike.

    Args:
        place: directory of this checkpoint (`runs/a/step_100`), a `file://` URL, or a `Store`.
        app_state: top-level names to modules, optimizers, objects with `state_dict` and `load_state_dict`, tensors, plain values,
            and dicts and lists of these.
        step: training step; else the number at the end of the last path component, if there is one.
        overwrite: replace a committed checkpoint. Readers see the old one until the new one is whole.
        group: the ranks that save together, a process group or a list of ranks: only they call. None: all of the job.
        options: how to save; see `SaveOptions`.
        sinks: further places for the events of this save.

    Raises:
        UnsupportedValue, InvalidAppState: something in `app_state` cannot be saved; the error names it.
        CheckpointExists, NotACheckpoint, InvalidPath: `place` is taken, or no place for a checkpoint.
        StorageError: the storage failed (`StorageFull`, `StorageDenied`, ...).
        CommitConflict: another writer was first. CommitOutcomeUnknown: the storage did not say whether the save exists.
        RankMissing: a rank did not come in time, or died. StructureChanged: some ranks hold another structure than at the last
            save, others do not; the next save plans afresh.
    """
    return _checkpointer(os.getpid()).save(
        place, app_state, step=step, overwrite=overwrite, group=group, options=options, sinks=sinks
    )


def load(  # noqa: PLR0913 - the public verb; all but two are keywords
    place: str | os.PathLike[str] | Store,
    app_state: Mapping[str, object],
    *,
    strict: bool | None = None,
    only: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    cast: bool | None = None,
    verify: Literal["filling", "first"] | None = None,
    group: GroupLike = None,
    options: LoadOptions | None = None,
    sinks: Sequence[Sink] = (),
) -> LoadReport:
    """Load the checkpoint at `place` into `app_state`, in place: tensors keep their identity, every byte was verified.

    Everything that records can show (structure, shapes, dtypes, lengths, values) is checked before the first tensor changes;
    a failure after that is `LoadInterrupted`. Names of the checkpoint that `app_state` does not have are only listed. In a job of
    several ranks all of them (or all of `group`) call it, whatever the layout or the number of ranks was at the save; a failure
    on one rank is raised on all, as for `save`.

    Args:
        place: where `save` put it.
        app_state: objects of the same structure, built but with any content.
        strict: missing and unexpected addresses below a name are errors (the default); else they are listed in the report.
        only, exclude: globs of addresses to load or to leave alone (`*` stays within a component, `**` does not).
        cast: let tensors of another dtype be converted.
        verify: "first" checks all wanted bytes before the first tensor changes, at the price of reading twice.
        group: the ranks that load together, as for `save`.
        options: further settings, and defaults for those above (see `LoadOptions`).
        sinks: further places for the events of this load.

    Raises:
        CheckpointNotFound, NotACheckpoint, UnsupportedFormat: there is nothing that this release can load.
        CheckpointDamaged: a record or blob is not what was saved; nothing has changed.
        CheckpointReplaced: it was saved over again and again while its files were being opened; nothing has changed.
        StateMismatch: checkpoint and app state differ; lists every difference; nothing has changed.
        InvalidOption: an argument or option has a value that it cannot have. InvalidRegistration: a registered decoder failed.
        LoadInterrupted: failed half-way; `app_state` must be loaded again before use.
    """
    given = {"strict": strict, "only": only, "exclude": exclude, "cast": cast, "verify": verify}
    return _checkpointer(os.getpid()).load(place, app_state, group=group, options=options, sinks=sinks, **given)


def open(  # noqa: A001 - anyshard.open, as in io.open
    place: str | os.PathLike[str] | Store, *, options: LoadOptions | None = None, sinks: Sequence[Sink] = ()
) -> Checkpoint:
    """Open the checkpoint at `place` for reading, without torch and without a job.

    `open(place)["model/layers.0.weight"][0:16]` reads just those rows, verified, as a NumPy array.

    Args:
        place: where `save` put it.
        options: memory, threads and patience of all reads (`byte_budget`, `block_nbytes`, `threads`, `timeout_s`); the settings
            that are about an app state have no meaning here.
        sinks: further places for the events of this open and of what is read later.

    Raises:
        CheckpointNotFound, NotACheckpoint, UnsupportedFormat: there is nothing that this release can read.
        CheckpointDamaged: a record is not what was saved; reading what lies in a damaged blob raises it later.
        CheckpointReplaced: it was saved over again and again meanwhile. What is first read when its files are gone raises it too:
            open the checkpoint again.
    """
    return _checkpointer(os.getpid()).open(place, options=options, sinks=sinks)


def register_value(name: str, type_: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]) -> None:
    """Let values of exactly `type_` be saved as `encode(value)`, a plain value, under `name`, and loaded by `decode` of it.

    A checkpoint holds the name, never code: loading calls `decode` only in a process that registered the same name.
    """
    _registry().register(name, type_, encode, decode)


@functools.cache
def _registry() -> ValueRegistry:
    return ValueRegistry()


@functools.lru_cache(maxsize=1)
def _checkpointer(pid: int) -> Checkpointer:  # noqa: ARG001 - a forked child must not share locks and blocks with its parent
    return Checkpointer(registry=_registry())

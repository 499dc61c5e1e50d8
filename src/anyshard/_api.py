"""The user's verbs: prepare, save, async_save, wait_all, load, open."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from anyshard.checkpoint import Checkpoint
from anyshard.checkpointer import Checkpointer
from anyshard.options import LoadOptions, SaveOptions
from anyshard.records.values import ValueRegistry
from anyshard.save_intent import Lineage

if TYPE_CHECKING:
    from anyshard.coord.group import Group
    from anyshard.coord.torch_dist import GroupLike
    from anyshard.monitor.events import Sink
    from anyshard.pending import PendingSave
    from anyshard.planning.layouts import Layout
    from anyshard.records.manifest import Resumed
    from anyshard.reports import LoadReport, PrepareReport, SaveReport
    from anyshard.storage.protocol import Store

__all__ = ["Checkpoint", "async_save", "load", "open", "prepare", "register_value", "save", "wait_all"]

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


def async_save(  # noqa: PLR0913 - the public verb; all but two are keywords
    place: str | os.PathLike[str] | Store,
    app_state: Mapping[str, object],
    *,
    step: int | None = None,
    overwrite: bool = False,
    group: GroupLike = None,
    options: SaveOptions | None = None,
    sinks: Sequence[Sink] = (),
) -> PendingSave:
    """Begin to save `app_state` as it is now to `place`, and return as soon as training may go on.

    What is committed is the state of the call, whatever training does after it, or nothing. With `staging="eager"` (the default)
    everything is copied before the call returns. With `staging="lazy"` that is left to a thread for parameters and state of torch
    optimizers in `app_state`, whose next `step` waits for what is not copied yet; the handle's `staging` says what was copied at
    the call and why. Until `staged()` such tensors must not be changed by anything but these steps, nor moved or freed: samples
    find that, and the save fails with `TornSnapshot`.

    All ranks call, as for `save`; the call waits for no other rank, but at the first save of a structure for a common plan (which
    `prepare` can make before). Saves are committed in the order of the calls. At most `max_in_flight` saves of a run (the
    directory above `place`) are under way, and twice as many of all runs; a further call waits for the first of them to end. The
    end of the process waits for all, up to `exit_timeout_s`; `wait_all` does it explicitly.

    Args:
        place, app_state, step, overwrite, group, options, sinks: as for `save`.

    Raises:
        What `save` raises, if it is known by the end of the call. What fails later is raised by a wait on the handle, or by the
        next `async_save` or `save` of these ranks, which then saves nothing; training may go on.
        StillPending: earlier saves of the run did not end within `timeout_s`.
    """
    return _checkpointer(os.getpid()).async_save(
        place, app_state, step=step, overwrite=overwrite, group=group, options=options, sinks=sinks
    )


def prepare(  # noqa: PLR0913 - the public verb; all but two are keywords
    place: str | os.PathLike[str] | Store,
    app_state: Mapping[str, object],
    *,
    also: Sequence[Layout] = (),
    num_steps: int = 1,
    step_s: float | None = None,
    group: GroupLike = None,
    options: SaveOptions | None = None,
    sinks: Sequence[Sink] = (),
) -> PrepareReport:
    """Rehearse saves of `app_state`: do all that a save does but the bytes, so that its errors come at minute 0.

    After a rehearsal without an error the first save of this structure finds no new kind of fault: it has its plan and, if it is
    asynchronous, its memory. Nothing stays at `place` but the directory itself, nothing in memory changes, and if it raises no
    plan is kept either. All ranks call, as for `save`. The report, printed, is a page: bytes and files, stall and duration to
    expect, what is lazy and what is not and why, what loads will read under today's and other layouts.

    Args:
        place: the directory of the run (`runs/a`) or of one checkpoint.
        app_state: as for `save`; what lies on several ranks is compared in full.
        also: layouts under which loads are forecast as well.
        num_steps: for how many checkpoints there has to be room.
        step_s: seconds of a training step, to have the duration of a save in steps.
        group, options, sinks: as for `save`.

    Raises:
        What a first save would raise; errors of the storage in its trial (`StorageError` if it ignores conditions or loses
        writes, `InvalidPath` if it is not shared by all ranks); `StorageFull` if `num_steps` checkpoints have no room;
        `InvalidOption` for a layout under which a tensor cannot lie.
    """
    return _checkpointer(os.getpid()).prepare(
        place, app_state, also=also, num_steps=num_steps, step_s=step_s, group=group, options=options, sinks=sinks
    )


def wait_all(timeout_s: float | None = None) -> None:
    """Return once no asynchronous save of this process is under way.

    Raises the first failure that was not raised before (further ones are notes of it), or `StillPending` after `timeout_s`.
    """
    _checkpointer(os.getpid()).wait_all(timeout_s)


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


def save_step(
    place: Store,
    app_state: Mapping[str, object],
    *,
    run_id: str | None,
    after: str = "",
    resumed: Resumed | None = None,
    **given: Any,
) -> SaveReport:
    """As `save`, for a step of a run, stamped later than `after`; what counts of the three is what the coordinator gives."""
    lineage = Lineage(run_id, after, resumed)
    return _checkpointer(os.getpid()).save(place, app_state, lineage=lineage, **given)


def async_save_step(
    place: Store,
    app_state: Mapping[str, object],
    *,
    run_id: str | None,
    after: str = "",
    resumed: Resumed | None = None,
    **given: Any,
) -> PendingSave:
    """As `async_save`, for a step of a run, stamped later than `after`; what counts is what the coordinator gives."""
    lineage = Lineage(run_id, after, resumed)
    return _checkpointer(os.getpid()).async_save(place, app_state, lineage=lineage, **given)


def group_of(group: GroupLike, timeout_s: float) -> Group:
    """The ranks that take part in the operations of `group`."""
    return _checkpointer(os.getpid()).find_group(group, timeout_s)


def hear_from_coordinator(what: str, find: Callable[[], bytes], *, group: GroupLike, timeout_s: float) -> bytes:
    """What `find` returns on the coordinator of `group`, on all its ranks, which all call; so too what it raises."""
    return _checkpointer(os.getpid()).hear_from_coordinator(what, find, group=group, timeout_s=timeout_s)


@functools.cache
def _registry() -> ValueRegistry:
    return ValueRegistry()


@functools.lru_cache(maxsize=1)
def _checkpointer(pid: int) -> Checkpointer:  # noqa: ARG001 - a forked child must not share locks and blocks with its parent
    return Checkpointer(registry=_registry())

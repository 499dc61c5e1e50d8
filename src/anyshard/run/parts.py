"""A step in parts: several worlds (actor, critic) save their own states, and whoever drives them publishes the step, once."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, final

from anyshard import _api
from anyshard.commit.guard import UNGUARDED, Guards
from anyshard.commit.part_saving import PartSaving
from anyshard.commit.publish import Patience, go_ahead
from anyshard.commit.publish_parts import Publication, publish_parts, tidy_parts
from anyshard.commit.saved_parts import Incarnation, check_role, find_part, find_saved, list_saved
from anyshard.errors import InvalidOption
from anyshard.monitor.events import Emitter, Sink
from anyshard.options import SaveOptions
from anyshard.records.manifest import Manifest, PartEntry
from anyshard.run.metrics import with_metrics
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.timed import TimedStore

if TYPE_CHECKING:
    from anyshard.coord.torch_dist import GroupLike
    from anyshard.pending import PendingSave
    from anyshard.reports import SaveReport

__all__ = ["Incarnation", "Published", "SplitStep", "find_part", "open_parts"]

_UNKNOWN: Final = Incarnation()
_NO_METRICS: Final = MappingProxyType[str, float]({})


@dataclass(frozen=True, slots=True)
class Published:
    """A step that exists in parts: its record, what it names, and whether this call has made it. `warnings` are worth a look.

    `nbytes` are those of the blobs of all parts.
    """

    url: str
    step: int
    generation: int
    attempt: str
    run_id: str
    parts: tuple[PartEntry, ...]
    is_new: bool
    nbytes: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        warnings = "".join(f"\n  {warning}" for warning in self.warnings)
        names = ", ".join(part.name for part in self.parts)
        return f"{self.url}: published with {names}, {self.nbytes / 1e6:.1f} MB{warnings}"


def _note(published: Published) -> None:
    pass


def open_parts(  # noqa: PLR0913 - what the run lends to a step
    store: Store,
    step: int,
    *,
    incarnation: Incarnation = _UNKNOWN,
    group: GroupLike = None,
    options: SaveOptions | None = None,
    sinks: Sequence[Sink] = (),
    guards: Guards | None = None,
    before_commit: Callable[[], None] = go_ahead,
    tell: Callable[[Published], None] = _note,
) -> SplitStep:
    """The step in `store` (that of the step, not of the run), to save parts of it or to publish it; asks nothing of it yet.

    `group`, `options` and `sinks` are those of the run. `before_commit` is called right before the record of the step is created,
    and what it raises ends that; `tell` hears of the step once it exists.
    """
    means = _Means(
        group=group,
        options=SaveOptions() if options is None else options,
        sinks=tuple(sinks),
        guards=Guards() if guards is None else guards,
        before_commit=before_commit,
        tell=tell,
    )
    return SplitStep(store, step, incarnation, means)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """What the run lends to a step, and what this process has done to it."""

    group: GroupLike
    options: SaveOptions
    sinks: tuple[Sink, ...]
    guards: Guards
    before_commit: Callable[[], None]
    tell: Callable[[Published], None]
    saved: set[str] = field(default_factory=set)  # roles that this process has begun to save


@final
class SplitStep:
    """One step of a run that is saved in parts. `Run.begin` makes it, in every world; nothing is shared but the storage.

        part = run.begin(100)
        part.save("actor", actor_state)         # all ranks of the world of the actor; elsewhere the critic does the same
        part.commit(["actor", "critic"])        # one process, once: from then on the step exists

    Until it is published the step does not count: no load finds it, but `Run.load(state, step=100, role="actor")`.
    """

    def __init__(self, store: Store, step: int, incarnation: Incarnation, means: _Means) -> None:
        self.step = step
        self._store = store
        self._incarnation = incarnation
        self._means = means

    @property
    def url(self) -> str:
        """Where the step is."""
        return self._store.url

    def save(
        self, role: str, app_state: Mapping[str, object], *, overwrite: bool = False, options: SaveOptions | None = None
    ) -> SaveReport:
        """Save the part of a role as `anyshard.save` saves a checkpoint; all ranks of its world call it.

        A part that an earlier job left in a step that was never published is replaced, as is one of a published step that lies
        behind the step from which this job resumed. Any other is `CheckpointExists`; `overwrite` allows it until the step is
        published. Each role may have a number of ranks of its own. `options` are those of the run unless given.
        """
        store, is_over = self._aim(role, overwrite=overwrite)
        return _api.save_step(store, app_state, overwrite=is_over, **self._arguments(options))

    def async_save(
        self, role: str, app_state: Mapping[str, object], *, overwrite: bool = False, options: SaveOptions | None = None
    ) -> PendingSave:
        """As `save`, in the background; see `anyshard.async_save`. It is a part of the step once it is committed."""
        store, is_over = self._aim(role, overwrite=overwrite)
        return _api.async_save_step(store, app_state, overwrite=is_over, **self._arguments(options))

    def commit(
        self,
        roles: AbstractSet[str] | Sequence[str] | Mapping[str, str],
        *,
        timeout_s: float = 0.0,
        metrics: Mapping[str, float] = _NO_METRICS,
        options: SaveOptions | None = None,
    ) -> Published:
        """Publish the step with the parts of these roles, once all of them are saved, for which it waits up to `timeout_s`.

        One process calls it, with or without ranks; whoever calls it again for the same roles gets the same answer. A mapping
        gives for each role the attempt of its part (`SaveReport.attempt`), and no other is taken: that is for who cannot know
        that what is there is not of an earlier job. A job that has resumed takes no parts from before that without it.

        Raises:
            CheckpointNotFound: parts are missing; the message says which, and what is there instead. Nothing was published.
            CommitConflict: the step is published with other parts, or the parts are of several runs. CheckpointExists: a whole
                checkpoint is there. RunInUse: another job drives this run. CommitOutcomeUnknown: the storage did not say whether
                the step exists; call it again.
        """
        chosen = with_metrics(self._means.options if options is None else options, metrics)
        publication = Publication(self.step, _check_roles(roles), self._incarnation, chosen.user)
        events = Emitter(self._means.sinks, operation=secrets.token_hex(8), rank=0)
        store = TimedStore(self._store, chosen.timeout_s)
        settle = partial(self._means.guards.settle, required=chosen.require_guarded, events=events)
        outcome = publish_parts(
            store,
            publication,
            timeout_s=timeout_s,
            settle=settle,
            decide=self._means.before_commit,
            patience=Patience(chosen.timeout_s),
            events=events,
        )
        warnings = tidy_parts(store, outcome.manifest, chosen.overwrite_grace_s, events=events) if outcome.is_new else ()
        published = self._describe(store, outcome.manifest, is_new=outcome.is_new, warnings=warnings)
        self._means.tell(published)
        return published

    def roles(self) -> tuple[str, ...]:
        """The roles whose parts are saved and whole, published or not."""
        return tuple(part.name for part in list_saved(self._store))

    def _aim(self, role: str, *, overwrite: bool) -> tuple[Store, bool]:
        """Where the part of a role is saved, and whether over what is there; the coordinator's answer counts."""
        store = PartSaving(self._store, check_role(role), step=self.step, incarnation=self._incarnation)
        resumed, saved = self._incarnation.resumed, self._means.saved
        is_after = resumed is None or self.step > resumed
        is_first = role not in saved
        saved.add(role)
        return store, overwrite or (is_first and is_after)

    def _arguments(self, options: SaveOptions | None) -> dict[str, Any]:
        """What all saves of parts are given, whatever they save."""
        # What the record of the step names must outlast a save that takes its place: `commit` removes it then.
        chosen = replace(self._means.options if options is None else options, overwrite_grace_s=math.inf)
        own = self._incarnation
        given = {"step": self.step, "run_id": own.run_id, "after": own.after, "resumed": own.mark, "options": chosen}
        return {**given, "group": self._means.group, "sinks": self._means.sinks}

    def _describe(self, store: Store, manifest: Manifest, *, is_new: bool, warnings: tuple[str, ...]) -> Published:
        found = [find_saved(store, entry.name) for entry in manifest.parts]
        nbytes = sum(blob.nbytes for part in found if not isinstance(part, str) for blob in part.manifest.blobs)
        unguarded = () if manifest.commit == "guarded" else (UNGUARDED,)
        return Published(
            url=self.url,
            step=self.step,
            generation=manifest.generation,
            attempt=manifest.attempt,
            run_id=manifest.run_id or "",
            parts=manifest.parts,
            is_new=is_new,
            nbytes=nbytes,
            warnings=(*unguarded, *warnings),
        )


def _check_roles(roles: Collection[str]) -> dict[str, str | None]:
    if isinstance(roles, str) or not isinstance(roles, (Sequence, AbstractSet, Mapping)) or not roles:
        raise InvalidOption(
            f"roles: expected names like ['actor', 'critic'], or a mapping of names to attempts (SaveReport.attempt), "
            f"found {roles!r}"
        )
    return {check_role(role): roles[role] if isinstance(roles, Mapping) else None for role in roles}

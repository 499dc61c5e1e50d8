"""What the verbs of a Run share: its settings, its storage, its custody, and the way in which all ranks hear one of them."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

from anyshard import _api
from anyshard.commit.parts import part_store
from anyshard.commit.saved_parts import PastStore
from anyshard.errors import InvalidOption
from anyshard.monitor.events import Emitter, Sink
from anyshard.monitor.sinks import sinks_from_environment
from anyshard.options import LoadOptions, SaveOptions
from anyshard.run.aim import Aim
from anyshard.run.custody import Custody
from anyshard.run.lease import check_ttl
from anyshard.run.parts import find_part
from anyshard.run.policies import KeepPolicy
from anyshard.run.step_info import step_prefix
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers.below import StoreBelow

if TYPE_CHECKING:
    from anyshard.coord.group import Group
    from anyshard.coord.torch_dist import GroupLike


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the user has said of a run, but when it saves."""

    place: str | os.PathLike[str] | Store
    keep: KeepPolicy | None
    group: GroupLike
    options: SaveOptions
    load_options: LoadOptions
    sinks: Sequence[Sink]
    lease_ttl_s: float

    def __post_init__(self) -> None:
        check_kind("keep", self.keep, KeepPolicy)
        check_kind("options", self.options, SaveOptions)
        check_kind("load_options", self.load_options, LoadOptions)
        check_ttl(self.lease_ttl_s)


@final
class RunMeans:
    """The means of one Run in one process. Nothing is opened before it is used."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.is_closed = False
        self._pid = os.getpid()
        self._has_custody = False

    @cached_property
    def store(self) -> Store:
        """The run's directory."""
        settings = self.settings
        options = {**settings.load_options.storage_options, **settings.options.storage_options}
        return open_store(settings.place, storage_options=options, events=self._make_events())

    @cached_property
    def custody(self) -> Custody:
        """What this process keeps of the run, coordinator or not."""
        settings = self.settings
        self._has_custody = True
        ttl_s, events = settings.lease_ttl_s, self._make_events()
        custody = Custody(self.store, settings.keep, settings.options, lease_ttl_s=ttl_s, events=events)
        weakref.finalize(self, custody.abandon).atexit = False  # or a thread would hold the lease for a Run that is gone
        return custody

    @property
    def is_usable(self) -> bool:
        """Whether the Run is not closed, and not that of a parent of this process."""
        return not self.is_closed and self._pid == os.getpid()

    def lead(self) -> Custody | None:
        """What the coordinator keeps, on the coordinator; None on the other ranks."""
        return self.custody if self.find_group().is_coordinator else None

    def find_group(self) -> Group:
        """The ranks that train together."""
        return _api.group_of(self.settings.group, self.settings.options.timeout_s)

    def aim(self, custody: Custody | None, step: int, *, overwrite: bool, metrics: Mapping[str, float] | None) -> Aim:
        """How to save a step. The settings and the metrics that count are the coordinator's."""
        if custody is None:
            return Aim(self.store_of(step))
        return custody.aim(step, overwrite=overwrite, metrics={} if metrics is None else metrics)

    def hear(self, what: str, find: Callable[[], bytes], *, takes_lease: bool = False) -> bytes:
        """What the coordinator finds, on all ranks, which all call with the same `what` (a verb); so too what it raises."""
        self.check_usable()
        settings = self.settings
        timeout_s = settings.options.timeout_s + (2 * settings.lease_ttl_s if takes_lease else 0.0)
        return _api.hear_from_coordinator(f"{what} {self.store.url}", find, group=settings.group, timeout_s=timeout_s)

    def store_of(self, step: int) -> Store:
        """The place of a step."""
        return StoreBelow(self.store, step_prefix(step))

    def place_of(self, step: int, role: str, *, is_named: bool) -> Store:
        """Where to load a step from, or the part of a role; one that is not published only if it `is_named` by its number."""
        store = self.store_of(step)
        return find_part(store, role, published=not is_named) if role else store

    def hear_place_of(self, step: int, role: str, *, is_named: bool) -> Store:
        """As `place_of`, but the coordinator alone looks: all ranks get the same place, or the same error."""
        if not role:
            return self.store_of(step)

        def find() -> bytes:
            place = self.place_of(step, role, is_named=is_named)
            return b"%d" % place.generation if isinstance(place, PastStore) else b""

        generation = self.hear(f"find the part of {role} of step {step} of", find)
        part = part_store(self.store_of(step), role)
        return PastStore(part, int(generation)) if generation else part

    def check_usable(self) -> None:
        """Raise `InvalidOption` if the Run must not be used any more, or not here."""
        if self.is_closed:
            raise InvalidOption(f"{self.store.url}: expected a Run that is open, found one that was closed; make another")
        if self._pid != os.getpid():
            raise InvalidOption(
                f"{self.store.url}: expected the Run to be used in process {self._pid}, which made it, found process "
                f"{os.getpid()}, a fork of it; only the first one saves and loads"
            )

    def close(self, timeout_s: float) -> None:
        """End what goes on in the background, and give the lease back."""
        if self._has_custody:
            self.custody.close(timeout_s)

    def _make_events(self) -> Emitter:
        return Emitter((*sinks_from_environment(), *self.settings.sinks), operation=secrets.token_hex(8), rank=0)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise `InvalidOption` for a setting that is neither None nor of this kind."""
    if value is not None and (not isinstance(value, kind) or isinstance(value, type)):
        raise InvalidOption(
            f"{name}: expected {kind.__name__}, found {value if isinstance(value, type) else type(value).__name__}"
        )

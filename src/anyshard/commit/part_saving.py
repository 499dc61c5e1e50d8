"""What keeps the save of a part and the publishing of its step from taking each other's files (see commit/publish_parts.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, final

from anyshard.commit.parts import part_store
from anyshard.commit.publish_parts import hold_all, show_roles
from anyshard.commit.saved_parts import Incarnation, StepRecord, read_step_record
from anyshard.errors import AnyshardError, CheckpointExists
from anyshard.records.names import MANIFEST
from anyshard.storage.protocol import BlobWriter, Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

logger = logging.getLogger(__name__)

T = TypeVar("T")


@final
class PartSaving(WrapperStore):
    """The store of a part for the save of it: it refuses at once, and at the commit, what a published step does not let happen.

    Only the coordinator of a save lists and creates records; that ends the save on all ranks.
    """

    def __init__(self, step_store: Store, role: str, *, step: int, incarnation: Incarnation) -> None:
        super().__init__(part_store(step_store, role))
        self._step_store, self._role = step_store, role
        self._step, self._incarnation = step, incarnation
        self._seen: StepRecord | None = None

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call, and look at the record of the step before the first listing, and on either side of the commit."""
        if call.verb is Verb.LIST and self._seen is None:
            self._seen = self._look_first()
        if call.verb not in (Verb.CREATE, Verb.PUT) or MANIFEST.fullmatch(call.key) is None:
            return run()
        self._look_again()
        try:
            return run()
        finally:
            self._look_again()  # whatever the answer was: the record may be there all the same

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        """The writer of the inner store itself."""
        return self.inner.create_blob(key, nbytes=nbytes)

    def delete(self, keys: Sequence[str]) -> None:
        """Forward all keys at once, as many stores delete them."""
        self.around(Call(Verb.DELETE, keys[0] if keys else ""), partial(self.inner.delete, keys))

    def _look_first(self) -> StepRecord:
        record = read_step_record(self._step_store)
        published = record.published
        if published is not None and not (published.parts and self._incarnation.may_replace(self._step, record)):
            what = (
                f"published with {show_roles([entry.name for entry in published.parts])}"
                if published.parts
                else "a whole checkpoint"
            )
            raise CheckpointExists(
                f"{self._step_store.url}: expected a step that is not published, to save part {self._role!r}, found {what} "
                f"({published.time}); a published step is not changed. Save another step, or delete this one"
            )
        if published is not None:
            logger.warning("%s: part %s of a step that was published before is replaced", self._step_store.url, self._role)
        return record

    def _look_again(self) -> None:
        """Refuse if the step was published since the first look, and make sure that what it was published with stays."""
        try:
            record = read_step_record(self._step_store)
        except AnyshardError as error:  # whoever publishes looks as well
            logger.warning("%s: could not see whether the step was published meanwhile: %s", self._step_store.url, error)
            return
        seen = 0 if self._seen is None else self._seen.generation
        if record.published is None or record.generation <= seen:
            return
        hold_all(self._step_store, record.published)
        raise CheckpointExists(
            f"{self._step_store.url}: the step was published while part {self._role!r} was being saved, without what was saved "
            "here: the parts that its record names stand. Publish a step once all of its parts are saved"
        )

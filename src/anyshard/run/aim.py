"""How a step is to be saved as its coordinator knows it: over what is there or not, and what stands against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

from anyshard.errors import AnyshardError, CheckpointExists
from anyshard.records.manifest import Resumed
from anyshard.records.names import MANIFEST
from anyshard.run.step_info import BEING_WRITTEN, Condition, StepInfo
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, Verb, WrapperStore

T = TypeVar("T")

THERE: Final = (Condition.COMMITTED, Condition.DAMAGED, Condition.INCOMPLETE)


@dataclass(frozen=True, slots=True)
class Aim:
    """How a step is to be saved: where, whether over what is there, as a step of which run; what there is to warn of.

    `after` is the latest time that a step here is known to be stamped with, and `resumed` where the job has gone on from.
    """

    store: Store
    overwrite: bool = False
    run_id: str | None = None
    warnings: tuple[str, ...] = ()
    after: str = ""
    resumed: Resumed | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@final
class HeldStore(WrapperStore):
    """The store of a step, which a save gets only as long as `check` raises nothing: asked as it begins and as it commits."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check = check

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Check before directories are made and before a record is."""
        if call.verb is Verb.PREPARE or (call.verb in (Verb.CREATE, Verb.PUT) and MANIFEST.fullmatch(call.key)):
            self._check()
        return run()

    def delete(self, keys: Sequence[str]) -> None:
        """Forward all keys at once, as many stores delete them."""
        self.inner.delete(keys)


@final
class RefusedStore(WrapperStore):
    """The store of a step that cannot be saved now: every call says why."""

    def __init__(self, inner: Store, error: AnyshardError) -> None:
        super().__init__(inner)
        self._error = error

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Refuse."""
        raise self._error


def find_replaceable(found: StepInfo, *, run_ids: Collection[str | None], resumed: int | None) -> StepInfo | None:
    """The step itself, if one of the run that was resumed from step `resumed` has to replace it; None if nothing is in the way.

    Raises `CheckpointExists` for one of another run than `run_ids`, and for one that is pinned.
    """
    if _is_cut(found):
        return found
    if found.condition not in THERE:
        return None
    if found.generation and found.run_id not in run_ids:
        raise CheckpointExists(
            f"{found.url}: expected a step that is free or of this run, found one of another run "
            f"({found.run_id or 'saved without a run'}, on {found.time}), which is not replaced. Use a directory for each "
            "run, or pass overwrite=True"
        )
    if found.is_pinned:
        raise CheckpointExists(
            f"{found.url}: expected a step that may be replaced, found one that is pinned (saved on {found.time}, before "
            f"the run was resumed from step {resumed}). Unpin it, pass overwrite=True, or save another step"
        )
    return found


def describe_replaced(found: StepInfo, resumed: int | None) -> str:
    """What there is to warn of when it is replaced."""
    if _is_cut(found):
        return f"a save of step {found.step} was there that was cut off as its record was written; it is replaced"
    when = f"saved on {found.time}" if found.time else found.note
    return f"step {found.step} ({when}) was there, of before the run was resumed from step {resumed}; it is replaced"


def _is_cut(one: StepInfo) -> bool:
    """Whether its newest record is torn; a save that does not overwrite takes that for a damaged checkpoint."""
    return one.note == BEING_WRITTEN or (one.condition is Condition.DELETED and bool(one.note))

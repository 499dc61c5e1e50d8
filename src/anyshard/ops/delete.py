"""`delete`: ends a checkpoint, so that no reader finds it any more, and removes its files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from anyshard.commit.guard import Guards
from anyshard.commit.tombstone import delete_step
from anyshard.monitor.events import Sink
from anyshard.ops.opening import operating
from anyshard.storage.protocol import Store


def delete(
    target: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    sinks: Sequence[Sink] = (),
) -> tuple[str, ...]:
    """Delete a checkpoint and return the keys of the deleted files; a small tombstone stays, which `clean` removes after 7 days.

    Of a step in parts the step goes first, then each of its parts; a tombstone of each stays. Raises `CheckpointNotFound` if none
    was ever there. If it dies half-way the checkpoint is gone; call it again for the rest. `storage_options` are those of
    `SaveOptions`.
    """
    with operating(target, sinks, storage_options) as operation:
        settle = partial(Guards().settle, required=False, events=operation.events)
        return delete_step(operation.store, settle=settle, events=operation.events)

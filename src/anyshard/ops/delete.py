"""`delete`: ends a checkpoint, so that no reader finds it any more, and removes its files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from anyshard.commit.tombstone import delete_step
from anyshard.monitor.events import Sink
from anyshard.ops.opening import operating
from anyshard.storage.protocol import Store


def delete(target: str | os.PathLike[str] | Store, *, sinks: Sequence[Sink] = ()) -> tuple[str, ...]:
    """Delete a checkpoint and return the keys of the deleted files; a small tombstone stays, which `clean` removes after 7 days.

    Raises `CheckpointNotFound` if none was ever there. If it dies half-way the checkpoint is gone; call it again for the rest.
    """
    with operating(target, sinks) as operation:
        return delete_step(operation.store, events=operation.events)

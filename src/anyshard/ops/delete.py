"""`delete`: ends a checkpoint, so that no reader finds it any more, and removes its files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from anyshard.commit.tombstone import delete_step
from anyshard.monitor.events import Emitter, Sink
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store


def delete(target: str | os.PathLike[str] | Store, *, sinks: Sequence[Sink] = ()) -> tuple[str, ...]:
    """Delete a checkpoint and return the keys of the deleted files; a small tombstone stays, which `clean` removes after 7 days.

    Raises `CheckpointNotFound` if none was ever there. If it dies half-way the checkpoint is gone; call it again for the rest.
    """
    events = Emitter(sinks, operation=secrets.token_hex(8), rank=0)
    return delete_step(open_store(target, events=events), events=events)

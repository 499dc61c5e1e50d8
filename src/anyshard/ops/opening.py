"""How offline operations open what they work on: with events, and with a deadline for storage that does not answer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from anyshard.coord.group import make_lone_group
from anyshard.monitor.events import Emitter, Sink
from anyshard.monitor.sinks import sinks_from_environment
from anyshard.operation import Operation
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers.timed import TimedStore

TIMEOUT_S = 1800.0


@contextmanager
def operating(
    target: str | os.PathLike[str] | Store,
    sinks: Sequence[Sink],
    storage_options: Mapping[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Operation]:
    """The store at `target`, every verb of it bounded in time, and who hears what is done to it."""
    with ExitStack() as own:
        lasting = [own.enter_context(sink) for sink in sinks_from_environment()]
        events = Emitter((*lasting, *sinks), operation=secrets.token_hex(8), rank=0)
        store = open_store(target, storage_options=storage_options, events=events)
        yield Operation(TimedStore(store, timeout_s), make_lone_group(), events)

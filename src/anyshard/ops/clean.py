"""`clean`: removes what no reader needs any more, and takes the right to publish from saves that died before it does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from anyshard.commit.cleaning import DAY_S, CleanRules, clean_step
from anyshard.commit.guard import Guards
from anyshard.monitor.events import Sink
from anyshard.ops.opening import operating
from anyshard.storage.protocol import Store


@dataclass(frozen=True, slots=True)
class CleanReport:
    """What `clean` removed (with `dry_run`: would remove), and what it left and why.

    `fenced` is the generation taken from unfinished saves, if any. `in_progress` are attempts that may still be running (or aim
    beyond the next generation). `warnings` say why others could not be ended. `unpublished` are parts of a step that no record of
    it names, and that were left. `foreign` are names that anyshard never makes; they are never touched.
    """

    url: str
    removed: tuple[str, ...]
    nbytes: int
    fenced: int | None
    in_progress: tuple[str, ...]
    foreign: tuple[str, ...]
    dry_run: bool
    warnings: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()


def clean(  # noqa: PLR0913 - what the user may choose
    target: str | os.PathLike[str] | Store,
    *,
    older_than_s: float = DAY_S,
    grace_s: float = 3600.0,
    unpublished: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    sinks: Sequence[Sink] = (),
) -> CleanReport:
    """Remove leftovers of saves that died and superseded files; what a checkpoint or a running save needs is never removed.

    A save counts as dead if nothing of it was written for `older_than_s`. Superseded files stay `grace_s` for their readers.
    Directories of sections that are empty then go too. Parts of a step are cleaned like it; with `unpublished` those go that were
    never published, if for `older_than_s` nothing was written to any part. On a store without create-if-absent nobody can take
    the right to publish from a save: then the files of dead ones stay. `storage_options` are those of `SaveOptions`. Raises
    `CheckpointDamaged`, having changed nothing there, if the newest manifest is damaged.
    """
    rules = CleanRules(older_than_s, grace_s, unpublished=unpublished, dry_run=dry_run)
    with operating(target, sinks, storage_options) as operation:
        settle = partial(Guards().settle, required=False, events=operation.events)
        cleaned = clean_step(operation.store, rules, settle=settle, events=operation.events)
    return CleanReport(
        url=operation.store.url,
        removed=cleaned.removed,
        nbytes=cleaned.nbytes,
        fenced=cleaned.fenced,
        in_progress=cleaned.in_progress,
        foreign=cleaned.foreign,
        dry_run=dry_run,
        warnings=cleaned.warnings,
        unpublished=cleaned.unpublished,
    )

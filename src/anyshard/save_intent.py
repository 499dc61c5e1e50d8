"""What a save is asked for: its step, its options, the checkpoint it descends from; and whether there is room for it."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from anyshard.agreed_plan import GlobalPlan
from anyshard.errors import InvalidOption, StorageFull
from anyshard.options import SaveOptions
from anyshard.records.manifest import Parent, Resumed
from anyshard.records.strict_json import MAX_INT, check_value, encode_object
from anyshard.storage.protocol import Store

_RECORDS_NBYTES = 1 << 20  # what directories and records may take besides the blobs
_BLOB_NBYTES, _ROW_NBYTES = 3 * 4096, 64  # of a blob the head, the tail and a block of the file system; of a row padding and slot
# The last word of a name, if it is a number or letters and a number: step_100, run2-step100, epoch=3, but not v1.5 or 1e5.
_TRAILING_NUMBER = re.compile(r"(?:^|[_=-])[A-Za-z]*0*([0-9]{1,18})$")


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which run a step belongs to, the time of the newest step of it that is known, and where the job has gone on from.

    Nothing of these for a checkpoint that is of no run.
    """

    run_id: str | None = None
    after: str = ""
    resumed: Resumed | None = None


@dataclass(frozen=True, slots=True)
class SaveIntent:
    """What the caller asked for, the checkpoint that the job had loaded before, and the lineage of the step in its run."""

    step: int | None
    overwrite: bool
    options: SaveOptions
    parent: Parent | None
    lineage: Lineage = Lineage()

    def check_user(self) -> None:
        """Refuse user metadata that a manifest cannot hold."""
        user = dict(self.options.user)
        check_value(user, address="user", depth=2)  # it lies within the manifest's object
        encode_object(user)


def find_step(store: Store, step: int | None) -> int | None:
    """The step as given, else the number at the end of the last path component, else none."""
    if step is None:
        found = _TRAILING_NUMBER.search(store.url.rstrip("/").rsplit("/", 1)[-1])
        return int(found[1]) if found else None
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < MAX_INT:
        raise InvalidOption(f"step: expected a whole number, 0 or more and below 2^62, found {step!r}")
    return step.__index__()


def estimate_nbytes(common: GlobalPlan) -> int:
    """Roughly what all ranks write without this one's values: tensors, per-rank values, what each blob and each row add."""
    return common.nbytes + _BLOB_NBYTES * len(common.blobs) + _ROW_NBYTES * common.num_rows


def check_space(store: Store, nbytes: int) -> None:
    """Raise `StorageFull` if the store is known to have no room for so many bytes of data."""
    free = store.free_nbytes()
    if free is not None and free < (expected := nbytes + _RECORDS_NBYTES):
        raise StorageFull(
            f"{store.url}: expected room for {expected} bytes ({nbytes} of data, the rest for records), found {free} free; "
            "nothing was written. Free some space, delete old steps, or save elsewhere",
            file=store.url,
            errno=errno.ENOSPC,
        )

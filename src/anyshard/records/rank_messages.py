"""What the ranks of a group say to each other during a save or a load, as MessagePack. Never stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from anyshard.records.addresses import section_directory
from anyshard.records.manifest import BlobEntry
from anyshard.records.names import blob_name
from anyshard.records.packed import T, read_record


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One message; all ranks run the same release, so its form may change with it."""

    def encode(self) -> bytes:
        """As bytes that `read_message` takes."""
        return msgspec.msgpack.encode(self)


def read_message(data: bytes, kind: type[T]) -> T:
    """The message of this kind in `data`; raises `UnsupportedFormat` for anything else."""
    return read_record(data, kind, what="message of a rank")


class StructurePost(Message, frozen=True):
    """The structure of a rank: the id of the plan that it has for it, or why it has none and where the parts are shared.

    `vocabulary`, `rows` (see records/table_codec.py) and `parts` (the part list of its value trees) are digests of shared
    messages; `keys` are those of its per-rank values by address, which take `values_nbytes` in a file.
    """

    plan: str
    why: str = ""
    vocabulary: str = ""
    rows: str = ""
    parts: str = ""
    keys: Mapping[str, bytes] = {}
    values_nbytes: int = 0


class LocalPlan(Message, frozen=True):
    """A rank's part of a new plan: what it writes (see planning/rank_plan.py), which parts of value trees it owns, their sets."""

    plan: str
    rows: bytes
    owned: bytes
    part_set: bytes


class Begin(Message, frozen=True):
    """The coordinator has begun: under which plan, as which attempt at which generation of a step of which run.

    And how all ranks compare replicas.
    """

    plan: str
    is_new: bool
    generation: int
    attempt: str
    replica_check: Literal["sample", "full", "off"]
    run_id: str | None = None

    def name_blob(self, section: str, rank: int, k: int) -> str:
        """The name of blob `k` of a rank in a section of this attempt."""
        return blob_name(section_directory(section), rank, k=k, generation=self.generation, attempt=self.attempt)


_Entry: TypeAlias = tuple[str, str, int, int, int, str]


class Durable(Message, frozen=True):
    """A rank's blobs are durable. `replicas` and `parts` have one digest per set of what others hold too, tensors and values.

    `host` is the name of the machine that wrote them.
    """

    entries: tuple[_Entry, ...]
    nbytes: int
    replicas: bytes
    parts: bytes
    host: str = ""

    def list_blobs(self) -> tuple[BlobEntry, ...]:
        """The manifest's entries of the rank's blobs, in the order of its plan."""
        return tuple(BlobEntry(*entry) for entry in self.entries)


def list_entries(blobs: tuple[BlobEntry, ...]) -> tuple[_Entry, ...]:
    """Entries of the manifest as they travel."""
    return tuple((blob.name, blob.section, blob.rank, blob.nbytes, blob.tail_position, blob.tail_digest) for blob in blobs)


class Question(Message, frozen=True):
    """What the coordinator has to know of all ranks before it can judge a difference; nothing if there is none."""

    sets: tuple[int, ...] = ()
    values: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether anything differs."""
        return bool(self.sets) or self.values


class Answer(Message, frozen=True):
    """Digests of the replicas that were asked for, by address, and of shared messages with the parts of the value trees.

    `leaves` is a part list too, in which everything is taken apart.
    """

    rows: bytes
    parts: str = ""
    leaves: str = ""


class Published(Message, frozen=True):
    """The checkpoint exists: how much all ranks wrote, and what they did not have alike."""

    num_tensors: int
    nbytes: int
    differing_values: tuple[str, ...] = ()
    num_differing_buffers: int = 0
    warnings: tuple[str, ...] = ()

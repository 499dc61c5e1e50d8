"""The manifest: one JSON object and one digest line, the commit record of a checkpoint."""
# long because every member is here four times (record, writing, reading, rules), and these belong side by side

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedFormat
from anyshard.records.digests import check_digest, digest_bytes, is_digest
from anyshard.records.names import ATTEMPT, BLOB, INDEX, MAX_GENERATION, SECTION_DIRECTORY, FileKind, parse_name
from anyshard.records.strict_json import (
    MAX_INT,
    MAX_NBYTES,
    MAX_TEXT_LENGTH,
    Json,
    Members,
    check_value,
    decode_object,
    encode_object,
)

FORMAT = "anyshard"
VERSION = 1
REQUIRES_PARTS = "parts"
SUPPORTED_REQUIREMENTS: frozenset[str] = frozenset({REQUIRES_PARTS})
MAX_WORLD_SIZE = 1 << 24
MAX_ROWS = 1 << 31

_DIGEST_LINE_NBYTES = len("xxh3-128:") + 32 + 1
_MAX_ID_LENGTH = 1024  # keeps the first members within 4 KiB, which listing reads
_SMALL_USER_NBYTES = 2048
_MIN_TAIL_NBYTES = 128
_BLOB_ALIGNMENT = 4096
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)")


class StepState(enum.StrEnum):
    """What the newest manifest says about its step."""

    COMMITTED = "committed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that the job had loaded before it made this one."""

    run_id: str | None
    step: int | None
    attempt: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The step of its run that a job had gone on from when it made this one, and when it had: not before any step it knew of.

    Steps of the run with a higher number and no later time are of before that, whatever came of them.
    """

    step: int
    time: str


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Name, length and digest of the index."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """One blob as the manifest lists it. Readers take rank and section from here, never from the name."""

    name: str
    section: str
    rank: int
    nbytes: int
    tail_position: int
    tail_digest: str


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One part of a step: the checkpoint in `parts/<name>/`. `attempt` saved its data, `generation` is that of its record then.

    A later record there is the same part as long as it has the same `data_attempt`.
    """

    name: str
    generation: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Thinned:
    """What became of a checkpoint after its save: the attempt that saved it, the sections that are gone, and since when."""

    attempt: str
    dropped: tuple[str, ...]
    time: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A step's commit record of one generation. A tombstone (`DELETED`) has no index and no blobs.

    A committed one has an index, or `parts` and nothing else. `time` is that of the save, also of one that was `thinned` later.
    Blobs are ordered by (position of the section in `sections`, rank, k); the first of each (section, rank) is k = 0.
    `num_rows` is the number of rows of the index, `num_slots` at least the number of slots of any blob.
    """

    generation: int
    attempt: str
    state: StepState
    step: int | None
    run_id: str | None
    sections: tuple[str, ...]
    time: str
    writer: str
    world_size: int
    num_rows: int
    num_slots: int
    index: IndexEntry | None
    blobs: tuple[BlobEntry, ...]
    parent: Parent | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    commit: str = "guarded"
    requires: tuple[str, ...] = ()
    user: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[PartEntry, ...] = ()
    thinned: Thinned | None = None
    resumed: Resumed | None = None

    @property
    def data_attempt(self) -> str:
        """The attempt that saved the data; thinning makes records of other attempts, and leaves this one as it is."""
        return self.attempt if self.thinned is None else self.thinned.attempt


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest: JSON, members in fixed order, then `xxh3-128:<hex>` of all bytes before that line."""
    user = dict(manifest.user)
    check_value(user, address="user", depth=2)  # the manifest is around it
    dropped = () if manifest.thinned is None else manifest.thinned.dropped
    texts = [manifest.run_id, manifest.writer, *manifest.sections, *dropped, *manifest.mesh]
    check_value(texts, address="run_id, writer, sections, mesh")
    if fault := _find_fault(manifest):
        raise LimitExceeded(f"the manifest cannot be written: {fault}")
    body = encode_object(_to_json(manifest, user)) + b"\n"
    return body + f"{digest_bytes(body)}\n".encode("ascii")


def _to_json(manifest: Manifest, user: Json) -> Json:
    """All members, the short ones first: listings read only the first 4 KiB."""
    parent, index = manifest.parent, manifest.index
    short: Json = {
        "format": FORMAT,
        "version": VERSION,
        "requires": list(manifest.requires),
        "state": str(manifest.state),
        "generation": manifest.generation,
        "attempt": manifest.attempt,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "time": manifest.time,
        "writer": manifest.writer,
        "world_size": manifest.world_size,
        "commit": manifest.commit,
        "limits": {"rows": manifest.num_rows, "slots": manifest.num_slots},
        "parent": parent and {"run_id": parent.run_id, "step": parent.step, "attempt": parent.attempt},
        "mesh": dict(manifest.mesh),
        "index": index and {"name": index.name, "nbytes": index.nbytes, "digest": index.digest},
        "bases": [],
        "sections": list(manifest.sections),
        **_rare_to_json(manifest),
    }
    blobs: Json = {"blobs": [_blob_to_json(blob) for blob in manifest.blobs]}
    if len(json.dumps(user)) <= _SMALL_USER_NBYTES:
        return short | {"user": user} | blobs
    return short | blobs | {"user": user}


def _rare_to_json(manifest: Manifest) -> Json:
    """Members that are left out where they would be empty."""
    thinned, resumed, rare = manifest.thinned, manifest.resumed, Json()
    if manifest.parts:
        rare["parts"] = [{"name": part.name, "generation": part.generation, "attempt": part.attempt} for part in manifest.parts]
    if thinned is not None:
        rare["thinned"] = {"attempt": thinned.attempt, "dropped": list(thinned.dropped), "time": thinned.time}
    if resumed is not None:
        rare["resumed"] = {"step": resumed.step, "time": resumed.time}
    return rare


def _blob_to_json(blob: BlobEntry) -> Json:
    return {
        "name": blob.name,
        "section": blob.section,
        "rank": blob.rank,
        "nbytes": blob.nbytes,
        "tail_position": blob.tail_position,
        "tail_digest": blob.tail_digest,
    }


def decode_manifest(data: bytes, *, file: str) -> Manifest:
    """Check the digest line, then the JSON, then every member; damage names `file`.

    A record of a later version, or one that requires what this release lacks, is `UnsupportedFormat`.
    """
    if len(data) > MAX_NBYTES + _DIGEST_LINE_NBYTES + 1:
        raise CheckpointDamaged(f"{file}: expected at most {MAX_NBYTES} bytes, found {len(data)}", file=file)
    members = decode_object(_signed_body(data, file), file=file)
    _check_version(members)
    manifest = _from_members(members)
    name = parse_name(file.rsplit("/", 1)[-1])
    fault = _find_fault(manifest)
    if fault is None and name is not None and name.kind is FileKind.MANIFEST and name.generation != manifest.generation:
        fault = f"expected generation {name.generation} as in its name, found {manifest.generation}"
    if fault:
        raise CheckpointDamaged(f"{file}: {fault}", file=file)
    return manifest


def _signed_body(data: bytes, file: str) -> bytes:
    """The JSON before the digest line, after comparing that with it."""
    body, line = data[:-_DIGEST_LINE_NBYTES], data[-_DIGEST_LINE_NBYTES:]
    text = line[:-1].decode("ascii", "replace")
    if not body.endswith(b"\n") or not line.endswith(b"\n") or not is_digest(text):
        raise CheckpointDamaged(
            f"{file}: expected a last line `xxh3-128:<32 hex digits>`; the manifest is cut or was never whole", file=file
        )
    check_digest(body, text, file=file)
    return body[:-1]


def _check_version(members: Members) -> None:
    file = members.file
    if members.text("format") != FORMAT:
        members.fail("format", repr(FORMAT))
    writer = members.values.get("writer")
    if (version := members.integer("version", minimum=1)) > VERSION:
        raise UnsupportedFormat(
            f"{file}: format version {version}, written by {writer!r}; this release reads up to version {VERSION}: "
            f"read it with that release or a later one"
        )
    if unknown := [name for name in members.texts("requires") if name not in SUPPORTED_REQUIREMENTS]:
        raise UnsupportedFormat(
            f"{file}: needs {', '.join(map(ascii, unknown))}, which this release lacks; read it with the release that "
            f"wrote it ({writer!r}) or a later one"
        )
    if members.objects("bases"):
        raise UnsupportedFormat(f"{file}: holds blobs of other checkpoints, which this release cannot read; use a later release")


def _from_members(members: Members) -> Manifest:
    limits = members.object("limits")
    return Manifest(
        generation=members.integer("generation", minimum=1, maximum=MAX_GENERATION),
        attempt=members.text("attempt"),
        state=_read_state(members),
        step=members.optional_integer("step"),
        run_id=members.optional_text("run_id"),
        sections=members.texts("sections"),
        time=members.text("time"),
        writer=members.text("writer"),
        world_size=members.integer("world_size", minimum=1, maximum=MAX_WORLD_SIZE),
        num_rows=limits.integer("rows", maximum=MAX_ROWS),
        num_slots=limits.integer("slots", maximum=MAX_ROWS),
        index=_read_index(members),
        blobs=tuple(_read_blob(blob) for blob in members.objects("blobs")),
        parent=_read_parent(members),
        mesh=_read_mesh(members),
        commit=members.text("commit"),
        requires=members.texts("requires"),
        user=members.object("user").values,
        parts=_read_parts(members),
        thinned=_read_thinned(members),
        resumed=_read_resumed(members),
    )


def _read_state(members: Members) -> StepState:
    try:
        return StepState(members.text("state"))
    except ValueError:
        members.fail("state", " or ".join(StepState))


def _read_index(members: Members) -> IndexEntry | None:
    index = members.optional_object("index")
    if index is None:
        return None
    return IndexEntry(index.text("name"), index.integer("nbytes", minimum=1), index.text("digest"))


def _read_parent(members: Members) -> Parent | None:
    parent = members.optional_object("parent")
    if parent is None:
        return None
    return Parent(parent.optional_text("run_id"), parent.optional_integer("step"), parent.text("attempt"))


def _read_parts(members: Members) -> tuple[PartEntry, ...]:
    parts = members.objects("parts") if "parts" in members.values else ()
    return tuple(
        PartEntry(part.text("name"), part.integer("generation", minimum=1, maximum=MAX_GENERATION), part.text("attempt"))
        for part in parts
    )


def _read_thinned(members: Members) -> Thinned | None:
    if "thinned" not in members.values:
        return None
    thinned = members.object("thinned")
    return Thinned(thinned.text("attempt"), thinned.texts("dropped"), thinned.text("time"))


def _read_resumed(members: Members) -> Resumed | None:
    if "resumed" not in members.values:
        return None
    resumed = members.object("resumed")
    return Resumed(resumed.integer("step"), resumed.text("time"))


def _read_mesh(members: Members) -> dict[str, int]:
    mesh = members.object("mesh")
    return {axis: mesh.integer(axis, minimum=1, maximum=MAX_WORLD_SIZE) for axis in mesh.values}


def _read_blob(blob: Members) -> BlobEntry:
    return BlobEntry(
        name=blob.text("name"),
        section=blob.text("section"),
        rank=blob.integer("rank"),
        nbytes=blob.integer("nbytes"),
        tail_position=blob.integer("tail_position"),
        tail_digest=blob.text("tail_digest"),
    )


def _find_fault(manifest: Manifest) -> str | None:
    """What is wrong first with the values of a manifest whose types are right, or None."""
    faults = (_own_faults, _sections_faults, _index_faults, _parts_faults, _thinned_faults, _blobs_faults)
    return next(chain.from_iterable(find(manifest) for find in faults), None)


def _own_faults(manifest: Manifest) -> Iterator[str]:
    if not ATTEMPT.fullmatch(manifest.attempt) or not 1 <= manifest.generation <= MAX_GENERATION:
        yield f"expected a generation and an attempt, found {manifest.generation} and {manifest.attempt!r}"
    if manifest.parent and not ATTEMPT.fullmatch(manifest.parent.attempt):
        yield f"parent: expected an attempt, found {manifest.parent.attempt!r}"
    if not _TIME.fullmatch(manifest.time):
        yield f"time: expected RFC 3339 in UTC, found {manifest.time!r}"
    if manifest.commit not in ("guarded", "unguarded"):
        yield f"commit: expected guarded or unguarded, found {manifest.commit!r}"
    if any(len(json.dumps(text)) > _MAX_ID_LENGTH for text in (manifest.run_id, manifest.writer)):
        yield f"run_id, writer: expected at most {_MAX_ID_LENGTH} characters of JSON each"
    if manifest.step is not None and not 0 <= manifest.step < MAX_INT:
        yield f"step: expected an integer from 0 to {MAX_INT - 1}, found {manifest.step}"
    if (resumed := manifest.resumed) and not (0 <= resumed.step < MAX_INT and _TIME.fullmatch(resumed.time)):
        yield f"resumed: expected a step and a time (RFC 3339 in UTC), found {resumed.step} and {resumed.time!r}"


def _sections_faults(manifest: Manifest) -> Iterator[str]:
    if len(set(manifest.sections)) != len(manifest.sections):
        yield "sections: expected each name once"
    if not all(0 < len(section) <= MAX_TEXT_LENGTH for section in manifest.sections):
        yield f"sections: expected names of 1 to {MAX_TEXT_LENGTH} characters"


def _index_faults(manifest: Manifest) -> Iterator[str]:
    index = manifest.index
    if (manifest.state is StepState.COMMITTED and not manifest.parts) != (index is not None):
        yield f"index: expected one exactly if the step is committed and not in parts, found state {manifest.state} and {index}"
    if index and not INDEX.fullmatch(index.name):
        yield f"index.name: expected index-<generation>-<attempt>.parquet, found {index.name!r}"
    if index and not is_digest(index.digest):
        yield f"index.digest: expected xxh3-128:<32 hex digits>, found {index.digest!r}"


def _parts_faults(manifest: Manifest) -> Iterator[str]:
    parts = manifest.parts
    if bool(parts) != (REQUIRES_PARTS in manifest.requires):
        yield f"requires: expected {REQUIRES_PARTS!r} exactly in the record of a step in parts, found {list(manifest.requires)}"
    if parts and (manifest.state is StepState.DELETED or manifest.sections or manifest.blobs):
        yield "parts: expected none in the record of a deleted step, nor beside sections or blobs"
    if len({part.name for part in parts}) != len(parts):
        yield "parts: expected each name once"
    for i, part in enumerate(parts):
        if not SECTION_DIRECTORY.fullmatch(part.name) or not ATTEMPT.fullmatch(part.attempt):
            yield f"parts[{i}]: expected the name of a directory and an attempt, found {part.name!r} and {part.attempt!r}"
        if not 1 <= part.generation <= MAX_GENERATION:
            yield f"parts[{i}]: expected a generation, found {part.generation}"


def _thinned_faults(manifest: Manifest) -> Iterator[str]:
    thinned = manifest.thinned
    if thinned is None:
        return
    if manifest.index is None:
        yield "thinned: expected in the record of a committed step that is not in parts, found in another one"
    if not ATTEMPT.fullmatch(thinned.attempt) or not _TIME.fullmatch(thinned.time):
        yield f"thinned: expected an attempt and a time (RFC 3339 in UTC), found {thinned.attempt!r} and {thinned.time!r}"
    names = (*manifest.sections, *thinned.dropped)
    if not thinned.dropped or len(set(names)) != len(names):
        yield "thinned.dropped: expected names of sections that are gone, each once and none that is there"
    if not all(0 < len(section) <= MAX_TEXT_LENGTH for section in thinned.dropped):
        yield f"thinned.dropped: expected names of 1 to {MAX_TEXT_LENGTH} characters"


def _blobs_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.state is StepState.DELETED and manifest.blobs:
        yield "blobs: expected none in the record of a deleted step"
    positions = {section: position for position, section in enumerate(manifest.sections)}
    for i, blob in enumerate(manifest.blobs):
        yield from (f"blobs[{i}].{fault}" for fault in _blob_faults(blob, positions, manifest.world_size))
    if len({blob.name for blob in manifest.blobs}) != len(manifest.blobs):
        yield "blobs: expected each name once"
    order = [(positions[blob.section], blob.rank) for blob in manifest.blobs]
    if order != sorted(order):
        yield "blobs: expected them in the order of sections, then ranks"
    # The values that all ranks share are in the first blob of rank 0.
    missing = set(positions) - {blob.section for blob in manifest.blobs if blob.rank == 0}
    if manifest.state is StepState.COMMITTED and missing:
        yield f"blobs: expected at least one of rank 0 for section {min(missing)!r}, found none"


def _blob_faults(blob: BlobEntry, sections: Mapping[str, int], world_size: int) -> Iterator[str]:
    if not BLOB.fullmatch(blob.name):
        yield f"name: expected data/<section>/<rank>.<k>-<generation>-<attempt>.bin, found {blob.name!r}"
    if blob.section not in sections:
        yield f"section: expected one of sections, found {blob.section!r}"
    if not 0 <= blob.rank < world_size:
        yield f"rank: expected less than world_size {world_size}, found {blob.rank}"
    if blob.nbytes % _BLOB_ALIGNMENT or not 64 <= blob.tail_position <= blob.nbytes - _MIN_TAIL_NBYTES:
        yield f"nbytes: expected a multiple of 4096 behind the tail at {blob.tail_position}, found {blob.nbytes}"
    if not is_digest(blob.tail_digest):
        yield f"tail_digest: expected xxh3-128:<32 hex digits>, found {blob.tail_digest!r}"

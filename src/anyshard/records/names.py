"""Names of the files of a checkpoint: fixed patterns, their makers, and one parser.

Readers take names from the manifest and infer nothing from them; only the commit rules (which file belongs to which
generation and attempt) look inside. A name that matches no pattern is foreign and is never touched.
"""

from __future__ import annotations

import enum
import re
import secrets
from dataclasses import dataclass

ATTEMPT_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
ATTEMPT_LENGTH = 13
MAX_GENERATION = 999_999_999

_G = r"(?P<generation>[1-9][0-9]{0,8})"
_A = r"(?P<attempt>[a-z2-7]{13})"
_NUMBER = r"0|[1-9][0-9]{0,8}"
_INDEX_STEM = rf"index-{_G}-{_A}\.parquet"

ATTEMPT = re.compile(r"[a-z2-7]{13}")
SECTION_DIRECTORY = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,63}")
MANIFEST = re.compile(rf"manifest-{_G}\.json")
INDEX = re.compile(_INDEX_STEM)
BLOB = re.compile(rf"data/(?P<section>[a-z0-9_][a-z0-9_.-]{{0,63}})/(?P<rank>{_NUMBER})\.(?P<k>{_NUMBER})-{_G}-{_A}\.bin")
TEMPORARY_MANIFEST = re.compile(rf"manifest-{_G}\.json\.{_A}\.tmp")
TEMPORARY_INDEX = re.compile(rf"{_INDEX_STEM}\.(?P=attempt)\.tmp")


class FileKind(enum.StrEnum):
    """What a file of a checkpoint is."""

    MANIFEST = "manifest"
    INDEX = "index"
    BLOB = "blob"
    TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True)
class FileName:
    """One name taken apart. `attempt` is None for manifests; the last three are set for blobs only."""

    kind: FileKind
    generation: int
    attempt: str | None
    section: str | None = None
    rank: int | None = None
    k: int | None = None


_KINDS = (
    (MANIFEST, FileKind.MANIFEST),
    (INDEX, FileKind.INDEX),
    (BLOB, FileKind.BLOB),
    (TEMPORARY_MANIFEST, FileKind.TEMPORARY),
    (TEMPORARY_INDEX, FileKind.TEMPORARY),
)


def parse_name(name: str) -> FileName | None:
    """The parts of a name relative to the checkpoint's root, or None if no anyshard file has such a name."""
    for pattern, kind in _KINDS:
        if match := pattern.fullmatch(name):
            return _file_name(kind, match.groupdict())
    return None


def _file_name(kind: FileKind, parts: dict[str, str]) -> FileName:
    generation, attempt = int(parts["generation"]), parts.get("attempt")
    if kind is not FileKind.BLOB:
        return FileName(kind, generation, attempt)
    return FileName(kind, generation, attempt, parts["section"], int(parts["rank"]), int(parts["k"]))


def make_attempt() -> str:
    """A new random attempt id: 13 characters of lower-case base32 (65 bits)."""
    return "".join(secrets.choice(ATTEMPT_ALPHABET) for _ in range(ATTEMPT_LENGTH))


def manifest_name(generation: int) -> str:
    """Name of the commit record of one generation."""
    return _checked(f"manifest-{generation}.json", MANIFEST)


def index_name(generation: int, attempt: str) -> str:
    """Name of the index of one attempt."""
    return _checked(f"index-{generation}-{attempt}.parquet", INDEX)


def blob_name(section_directory: str, rank: int, *, k: int, generation: int, attempt: str) -> str:
    """Name of blob `k` of a rank in a section; `section_directory` is the section made path-safe."""
    return _checked(f"data/{section_directory}/{rank}.{k}-{generation}-{attempt}.bin", BLOB)


def _checked(name: str, pattern: re.Pattern[str]) -> str:
    if pattern.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no valid name: expected it to match {pattern.pattern}")
    return name

"""The error tree: every error that anyshard raises on purpose derives from `AnyshardError`.

Leaves are named after the caller's problem and are the fitting built-in as well. A message says what was expected, what
was found, where, and what to do next; the attributes carry the same facts for programs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


class AnyshardError(Exception):
    """Base of all errors raised by anyshard."""


class InvalidPath(AnyshardError, ValueError):
    """A path or URL that cannot name a checkpoint (a file, an unknown scheme, an unsafe name)."""


class CheckpointNotFound(AnyshardError, FileNotFoundError):
    """No committed checkpoint is at this place."""


class NotACheckpoint(AnyshardError, ValueError):
    """The place holds something, but nothing that anyshard wrote."""


class CheckpointExists(AnyshardError, FileExistsError):
    """A committed checkpoint is already there and overwriting was not asked for."""


class CheckpointDamaged(AnyshardError, ValueError):
    """Bytes of a checkpoint are not the bytes that were saved: damaged, cut, missing, or never well formed."""

    def __init__(self, message: str, *, file: str | None = None) -> None:
        super().__init__(message)
        self.file = file


class CheckpointReplaced(AnyshardError, RuntimeError):
    """The checkpoint was replaced or removed while it was being read."""


class UnsupportedFormat(AnyshardError, ValueError):
    """The checkpoint is whole but needs a newer release, or a feature that this release lacks."""


class LimitExceeded(AnyshardError, ValueError):
    """A size is beyond a limit of the format or of an option."""


class UnsupportedValue(AnyshardError, TypeError):
    """A value (or tensor kind) that cannot be saved; `address` says where it is."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


class InvalidOption(AnyshardError, ValueError):
    """A setting (an option, an argument, an environment variable) has a value that it cannot have."""


class InvalidRegistration(AnyshardError, ValueError):
    """A type or name that cannot be registered (reserved, built in, taken), or whose registered decoder failed."""


class InvalidAppState(AnyshardError, ValueError):
    """The app state cannot be taken apart: clashing addresses, parameters without a name, meta tensors."""


class Mismatch(enum.StrEnum):
    """How a checkpoint and an app state can differ at one address."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    SHAPE = "shape"
    DTYPE = "dtype"
    KIND = "kind"
    GROUP = "group"
    TIE = "tie"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a checkpoint and an app state."""

    kind: Mismatch
    address: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.address}: {self.kind} (expected {self.expected}, found {self.found})"


class StateMismatch(AnyshardError, ValueError):
    """The checkpoint and the app state differ; nothing was changed. `differences` lists all of them."""

    SHOWN = 20

    def __init__(self, checkpoint: str, differences: tuple[Difference, ...], hint: str) -> None:
        lines = [f"  {difference}" for difference in differences[: self.SHOWN]]
        if len(differences) > self.SHOWN:
            lines.append(f"  ... and {len(differences) - self.SHOWN} more")
        super().__init__(
            f"{checkpoint} does not fit the app state (differences: {len(differences)}); nothing was changed.\n"
            + "\n".join(lines)
            + f"\n{hint}"
        )
        self.checkpoint = checkpoint
        self.differences = differences


class LoadInterrupted(AnyshardError, RuntimeError):
    """A load failed after it had begun to change the app state, which must be loaded again before use."""

    def __init__(self, message: str, *, addresses: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.addresses = addresses


class CommitConflict(AnyshardError, RuntimeError):
    """Another writer took this generation first; its checkpoint stands, ours does not exist."""


class CommitOutcomeUnknown(AnyshardError, RuntimeError):
    """The commit record could not be read back in time: the save may or may not exist. Nothing was deleted."""


class StorageError(AnyshardError, OSError):
    """A store failed; the foreign error is the cause, `file` names the key."""

    def __init__(self, message: str, *, file: str, errno: int | None = None) -> None:
        super().__init__(*((message,) if errno is None else (errno, message)))
        self.file = file


class StorageFull(StorageError):
    """No space (or no quota) left where the checkpoint goes."""


class StorageDenied(StorageError, PermissionError):
    """The store refuses access."""


class StorageStuck(StorageError, TimeoutError):
    """A store did not answer in time; the message names every call that is still out."""


class BlobNotFound(StorageError, FileNotFoundError):
    """A store has no blob under this key."""


class BlobExists(StorageError, FileExistsError):
    """A store already has a blob under this key (the answer of create-if-absent)."""


class OperationFailed(AnyshardError, RuntimeError):
    """An operation of several ranks failed; it is raised on all of them alike.

    `failures` maps the ranks that failed (numbers in the job) to "phase: Type: message". On such a rank the error itself is the
    cause.
    """

    SHOWN = 20

    def __init__(self, headline: str, failures: Mapping[int, str]) -> None:
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(failures.items())]
        if len(lines) > self.SHOWN:
            lines[self.SHOWN :] = [f"  ... and {len(lines) - self.SHOWN} more"]
        super().__init__("\n".join([headline, *lines]))
        self.headline = headline
        self.failures = dict(failures)

    def __reduce__(self) -> tuple[type[Self], tuple[str, dict[int, str]]]:
        return type(self), (self.headline, self.failures)


class RankMissing(OperationFailed, TimeoutError):
    """Ranks were not heard of in time: `failures` names each of them and the phase in which it was waited for."""


class StructureChanged(OperationFailed):
    """Some ranks hold another structure than the cached plan, others do not. The next save plans afresh."""


class KeyValueStoreLost(OperationFailed, ConnectionError):
    """The key-value store through which ranks agree does not answer any more; `failures` is empty, for nobody can tell."""

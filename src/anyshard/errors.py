"""The error tree: every error that anyshard raises on purpose derives from `AnyshardError`.

Leaves are named after the caller's problem and are the fitting built-in as well. A message says what was expected, what
was found, where, and what to do next; the attributes carry the same facts for programs.

An error of one of several ranks is raised on all of them: as an `OperationFailed` that is of the same class as well, made by
`make_failure`, so that `except CheckpointNotFound` works on many ranks as on one. Only the rank that had the error itself has its
attributes, in the cause; elsewhere they are empty.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


class AnyshardError(Exception):
    """Base of all errors raised by anyshard; each can be sent to another process, as pools and launchers do."""

    def __reduce__(self) -> tuple[Callable[..., AnyshardError], tuple[object, ...]]:
        # Python's own way calls the class with `args`, which is the message only.
        return _remake, (type(self), self.args, vars(self))


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

    file: str | None = None

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

    address: str = ""

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
    RANK = "rank"


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
    checkpoint: str = ""
    differences: tuple[Difference, ...] = ()

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

    addresses: tuple[str, ...] = ()

    def __init__(self, message: str, *, addresses: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.addresses = addresses


class CommitConflict(AnyshardError, RuntimeError):
    """Another writer took this generation first; its checkpoint stands, ours does not exist."""


class CommitOutcomeUnknown(AnyshardError, RuntimeError):
    """The commit record could not be read back in time: the save may or may not exist. Nothing was deleted."""


class RunInUse(AnyshardError, RuntimeError):
    """Another writer is at work on this run: `host` and `pid` say which, as its lease says; nothing was written or deleted."""

    host: str = ""
    pid: int = 0

    def __init__(self, message: str, *, host: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid


class TornSnapshot(AnyshardError, RuntimeError):
    """Tensors of a lazy snapshot were changed or freed before they were copied; nothing is committed. Names their addresses."""

    addresses: tuple[str, ...] = ()  # on the other ranks, which hear the message only

    def __init__(self, message: str, *, addresses: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.addresses = tuple(addresses)


class StillPending(AnyshardError, TimeoutError):
    """A wait for an asynchronous save has ended before the save has; the save goes on."""


class StorageError(AnyshardError, OSError):
    """A store failed; the foreign error is the cause, `file` names the key."""

    file: str = ""

    def __init__(self, message: str, *, file: str, errno: int | None = None) -> None:
        super().__init__(*((message,) if errno is None else (errno, message)))
        self.file = file


class StorageFull(StorageError):
    """No space (or no quota) left where the checkpoint goes."""


class StorageDenied(StorageError, PermissionError):
    """The store refuses access."""


class StorageStuck(StorageError, TimeoutError):
    """A store did not answer in time; the message names every call that is still out."""


class StorageUnavailable(StorageError, ConnectionError):
    """A store did not do what it was asked for, though it was asked `attempts` times; it may do so later."""

    attempts: int = 1

    def __init__(self, message: str, *, file: str, attempts: int = 1) -> None:
        super().__init__(message, file=file)
        self.attempts = attempts


class StorageUnguarded(StorageError):
    """A store has no create-if-absent that can be relied upon, and what was asked for is not safe without."""


class BlobNotFound(StorageError, FileNotFoundError):
    """A store has no blob under this key."""


class BlobExists(StorageError, FileExistsError):
    """A store already has a blob under this key (the answer of create-if-absent)."""


class OperationFailed(AnyshardError, RuntimeError):
    """An operation of several ranks failed; it is raised on all of them alike.

    `failures` maps the ranks that failed (numbers in the job) to "phase: Type: message". On such a rank the error itself is the
    cause. If the errors of all ranks that failed are of one class of this module, the error is of that class too, on every rank:
    `except CheckpointNotFound` catches it, and so does `except OperationFailed`. The other class's attributes are empty.
    """

    SHOWN = 20

    def __init__(self, headline: str, failures: Mapping[int, str]) -> None:
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(failures.items())]
        if len(lines) > self.SHOWN:
            lines[self.SHOWN :] = [f"  ... and {len(lines) - self.SHOWN} more"]
        Exception.__init__(self, "\n".join([headline, *lines]))  # not that of the other class, which asks for its own arguments
        self.headline = headline
        self.failures = dict(failures)

    def __reduce__(self) -> tuple[Callable[..., AnyshardError], tuple[object, ...]]:
        return type(self), (self.headline, self.failures)


class RankMissing(OperationFailed, TimeoutError):
    """Ranks were not heard of in time: `failures` names each of them and the phase in which it was waited for."""


class StructureChanged(OperationFailed):
    """Some ranks hold another structure than the cached plan, others do not. The next save plans afresh."""


class EarlierSaveFailed(OperationFailed):
    """A rank saved nothing, for its call was the one that raised the failure of an earlier asynchronous save."""


class KeyValueStoreLost(OperationFailed, ConnectionError):
    """The key-value store through which ranks agree does not answer any more; `failures` is empty, for nobody can tell."""


def _remake(kind: type[AnyshardError], args: tuple[object, ...], state: Mapping[str, object]) -> AnyshardError:
    error = kind.__new__(kind, *args)
    super(AnyshardError, error).__init__(*args)  # the built-in's, which takes what it has given
    vars(error).update(state)
    return error


def show_error(error: BaseException) -> str:
    """Class and text of an error; of one whose text cannot be had, since that raises too, the class."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:  # noqa: BLE001 - whatever a class of the user's raises
        return f"{type(error).__name__} (its text cannot be had: {type(other).__name__})"


def name_kind(error: BaseException) -> str:
    """The name of the class of this module that `error` is of, as `make_failure` takes it on another rank."""
    plain = (AnyshardError, OperationFailed, KeyValueStoreLost)  # what is lost on one rank is not on those that hear of it
    names = (kind.__name__ for kind in type(error).__mro__ if globals().get(kind.__name__) is kind and kind not in plain)
    return next(names, OperationFailed.__name__)


def make_failure(headline: str, failures: Mapping[int, str], *, kinds: Iterable[str]) -> OperationFailed:
    """The error that all ranks raise, of the class that the `kinds` (see `name_kind`) of all failed ranks name, if it is one."""
    names = set(kinds)
    kind = globals()[names.pop()] if len(names) == 1 else OperationFailed
    return _join_classes(kind)(headline, failures)


@functools.cache  # or `type(error) is type(other)` would fail
def _join_classes(kind: type[AnyshardError]) -> type[OperationFailed]:
    """The class of errors that are an `OperationFailed` and of `kind`; in a traceback it has the name of `kind`."""
    if issubclass(kind, OperationFailed):
        return kind

    def reduce(error: OperationFailed) -> tuple[Callable[..., AnyshardError], tuple[object, ...]]:
        return functools.partial(make_failure, kinds=(kind.__name__,)), (error.headline, error.failures)

    members = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce__": reduce}
    return type(kind.__name__, (OperationFailed, kind), members)

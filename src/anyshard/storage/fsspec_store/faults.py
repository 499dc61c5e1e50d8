"""The one border at which errors of fsspec's backends become ours. Each backend raises what its own client does."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar, final

from anyshard.errors import (
    AnyshardError,
    BlobExists,
    BlobNotFound,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StorageUnguarded,
)
from anyshard.monitor.events import Emitter
from anyshard.storage.retry import Judge, Request, Retrier, Verdict

T = TypeVar("T")

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = frozenset(
    {errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EBUSY, errno.EREMOTEIO}
)
# Errors of clients that are no OSError; their packages may not be installed, so they are known by name.
_PASSING_NAMES = re.compile(r"Timeout|Connect|Disconnected|IncompleteRead|ClientPayload|gaierror|SSHException|HTTPClientError")
_DENIED_NAMES = re.compile(r"Credential|Authentication|Unauthorized|Forbidden")
_TAKEN_CODES = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "409", "412"})
_REFUSED_CODES = frozenset({"NotImplemented", "501"})
# How Python, fsspec and botocore call what a class cannot do that takes no condition: any other wrong argument is a fault.
_REFUSED_ARGUMENT = re.compile(r"\bmode\b|\bxb\b|if_?none_?match|exclusive", re.IGNORECASE)
_ARGUMENT_NAMES = re.compile(r"^(TypeError|ValueError|ParamValidationError)$")
_NO_BUCKET = "NoSuchBucket"

_ADVICE: Mapping[type[StorageError], str] = MappingProxyType(
    {
        BlobNotFound: "Check the path, and that nobody removed it meanwhile",
        BlobExists: "Nothing was overwritten",
        StorageDenied: "Check the credentials (storage_options, or where the backend looks for them) and what they allow here",
        StorageFull: "Free space or choose another place, then save again",
        StorageUnavailable: "Check endpoint and network, then try again",
        StorageUnguarded: "This store has no create-if-absent",
        StorageError: "Look up this error of the backend, then try again",
    }
)


@final
class UnavailableJudge(Judge):
    """Asks again after what a `Border` has translated to `StorageUnavailable`."""

    def judge(self, error: Exception) -> Verdict:
        """Anything else would fail again."""
        return Verdict.AGAIN if isinstance(error, StorageUnavailable) else Verdict.FINAL

    def describe(self, error: Exception) -> str:
        """The message, which is clean."""
        return str(error)


@dataclass(frozen=True, slots=True)
class Border:
    """What errors and events of one store name, and the `secrets` that they never show.

    The errors of a backend stay on its side: ours are raised unchained, since a traceback shows the whole chain, and texts of
    clients hold URLs with credentials.
    """

    url: str
    events: Emitter
    retrier: Retrier
    secrets: tuple[str, ...] = ()

    def path(self, key: str) -> str:
        """The full name of `key`, for messages only."""
        return f"{self.url}/{key}" if key else self.url

    def announce(self, point: str, key: str, *, nbytes: int | None = None) -> None:
        """Emit `storage.<point>`."""
        self.events.event(f"storage.{point}", nbytes=nbytes, file=key)

    def ask(self, doing: str, key: str, send: Callable[[], T]) -> T:
        """What `send` returns, asked again while the store is unavailable; only for what may be done twice."""
        return self.retrier.run(partial(self.call, doing, key, send), Request(doing, self.path(key), key))

    def call(self, doing: str, key: str, send: Callable[[], T]) -> T:
        """What `send` returns; every error from inside becomes the `StorageError` that fits; ours pass."""
        return self._call(doing, key, send, creating=False)

    def create(self, key: str, send: Callable[[], T]) -> T:
        """The same for create-if-absent: a taken key is `BlobExists`; a backend that cannot refuse one, `StorageUnguarded`."""
        return self._call("create", key, send, creating=True)

    def _call(self, doing: str, key: str, send: Callable[[], T], *, creating: bool) -> T:
        try:
            return send()
        except AnyshardError:
            raise
        except Exception as found:  # noqa: BLE001 - the border: what it says is raised below, outside of this block
            error = self._error(doing, key, found, _find_kind(found, creating=creating))
        raise error

    def _error(self, doing: str, key: str, error: Exception, kind: type[StorageError]) -> StorageError:
        missing = response_code(error) == _NO_BUCKET
        advice = "The bucket does not exist: make it first, or check its name" if missing else _ADVICE[kind]
        message = f"could not {doing} {self.path(key)}: {type(error).__name__}: {self._cleaned(str(error))}. {advice}"
        if kind is StorageUnavailable:
            return StorageUnavailable(message, file=key)
        return kind(message, file=key, errno=getattr(error, "errno", None))

    def _cleaned(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return " ".join(re.sub(r"://[^/@\s]*@", "://***@", re.sub(r"\?\S+", "?***", text)).split()).rstrip(".")


def response_code(error: BaseException) -> str:
    """The code of a server's answer (its own, or that of HTTP) that `error` or what caused it carries, or nothing."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        for name in ("status", "code", "status_code"):
            if isinstance(code := getattr(cause, name, None), int | str):
                return str(code)
        cause = cause.__cause__
    return ""


def _find_kind(error: Exception, *, creating: bool) -> type[StorageError]:
    code = response_code(error)
    if creating and (isinstance(error, FileExistsError) or code in _TAKEN_CODES):
        return BlobExists
    if creating and (isinstance(error, NotImplementedError) or code in _REFUSED_CODES or _refuses_condition(error)):
        return StorageUnguarded
    if code == _NO_BUCKET:
        return StorageError
    for classes, kind in (
        ((FileNotFoundError, NotADirectoryError), BlobNotFound),
        ((FileExistsError,), BlobExists),
        ((PermissionError,), StorageDenied),
        ((TimeoutError, ConnectionError), StorageUnavailable),
    ):
        if isinstance(error, classes):
            return kind
    return _find_kind_by_number(error) or _find_kind_by_name(error)


def _refuses_condition(error: Exception) -> bool:
    is_argument = any(_ARGUMENT_NAMES.search(kind.__name__) for kind in type(error).__mro__)
    return is_argument and _REFUSED_ARGUMENT.search(str(error)) is not None


def _find_kind_by_number(error: Exception) -> type[StorageError] | None:
    number = getattr(error, "errno", None)
    kinds = ((_DENIED, StorageDenied), (_FULL, StorageFull), (_PASSING, StorageUnavailable))
    return next((kind for numbers, kind in kinds if number in numbers), None)


def _find_kind_by_name(error: Exception) -> type[StorageError]:
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    if _DENIED_NAMES.search(names):
        return StorageDenied
    return StorageUnavailable if _PASSING_NAMES.search(names) else StorageError

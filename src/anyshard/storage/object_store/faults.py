"""What obstore's errors mean, and the one border at which they become ours.

obstore has few classes and puts the rest into texts: the request's URL, the server's answer, and below "Debug source" its own
structures. What is shown here is put together anew from status, code and message, so that no URL and no header gets through.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from obstore.exceptions import (
    AlreadyExistsError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from anyshard.errors import (
    AnyshardError,
    BlobExists,
    BlobNotFound,
    InvalidPath,
    StorageDenied,
    StorageError,
    StorageUnguarded,
)
from anyshard.storage.retry import Judge, Request, Verdict

_DEBUG: Final = "Debug source"
_STATUS: Final = re.compile(r"status code: (\d{3})([^:\n]*)")
_CODE: Final = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_MESSAGE: Final = re.compile(r"<Message>\s*([^<]{1,300}?)\s*</Message>", re.DOTALL)
_PART: Final = re.compile(r"[?&]partNumber=(\d+)")
_KIND: Final = re.compile(r"HttpError \{\s*kind: (\w+)")
_SYSTEM: Final = re.compile(r"kind: \w+,\s*message: \"([^\"]+)\"")
_BULK: Final = re.compile(r"Bulk delete request failed for key .*: (.*) \(code: (\w+)\)", re.DOTALL)

_EXPIRED: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed", "RequestExpired"}
)
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_UNSUPPORTED: Final = frozenset({"NotImplemented", "NotSupported", "UnsupportedOperation"})
_BUSY: Final = frozenset(
    {
        "ConditionalRequestConflict",  # somebody else is writing this key right now: who has won shows at the next attempt
        "OperationAborted",
        "RequestTimeout",
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "ServerBusy",
        "OperationTimedOut",
    }
)
_BUSY_STATUS: Final = frozenset({408, 425, 429})
_BROKEN: Final = re.compile(
    r"HTTP error|error sending request|response body error|error decoding response|Connection|[Tt]imed? ?out|IncompleteMessage"
)


class Kind(enum.Enum):
    """What a failed request of an object store means."""

    BUSY = "busy"
    EXPIRED = "expired"
    MISSING = "missing"
    NO_BUCKET = "no bucket"
    EXISTS = "exists"
    CHANGED = "changed"
    DENIED = "denied"
    UNSUPPORTED = "unsupported"
    ODD_NAME = "odd name"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Fault:
    """One error of obstore: its kind, and what it says in one line without URL and credentials."""

    kind: Kind
    text: str


def read_fault(error: Exception) -> Fault:
    """What an error of obstore means."""
    whole = str(error)
    text = whole.partition(_DEBUG)[0]
    bulk = _BULK.search(text)
    status = _STATUS.search(text)
    code = bulk[2] if bulk else _first(_CODE, text)
    number = int(status[1]) if status else int(code) if bulk and code.isdecimal() else 0
    if bulk and "container does not exist" in bulk[1]:
        code = "ContainerNotFound"
    return Fault(_find_kind(error, number, code, text), _describe(error, whole, status, bulk))


def _find_kind(error: Exception, status: int, code: str, text: str) -> Kind:
    by_code = _find_kind_by_code(code)
    if by_code is not None:
        return by_code
    if status == 400 and "Error performing HEAD" in text:
        return Kind.EXPIRED  # the answer to HEAD has no code, and this is how S3 says it; if it is not, the next one fails too
    return _find_kind_by_class(error) or _find_kind_by_status(status, text)


def _find_kind_by_code(code: str) -> Kind | None:
    for kind, codes in (
        (Kind.EXPIRED, _EXPIRED),
        (Kind.NO_BUCKET, _NO_BUCKET),
        (Kind.UNSUPPORTED, _UNSUPPORTED),
        (Kind.BUSY, _BUSY),
    ):
        if code in codes:
            return kind
    return None


def _find_kind_by_class(error: Exception) -> Kind | None:
    kinds: tuple[tuple[type[Exception], Kind], ...] = (
        (FileNotFoundError, Kind.MISSING),
        (AlreadyExistsError, Kind.EXISTS),
        (PreconditionError, Kind.CHANGED),
        (PermissionDeniedError, Kind.DENIED),
        (UnauthenticatedError, Kind.DENIED),
        (NotSupportedError, Kind.UNSUPPORTED),
        (InvalidPathError, Kind.ODD_NAME),
    )
    return next((kind for cls, kind in kinds if isinstance(error, cls)), None)


def _find_kind_by_status(status: int, text: str) -> Kind:
    if status == 501:
        return Kind.UNSUPPORTED
    if status >= 500 or status in _BUSY_STATUS:
        return Kind.BUSY
    if status in (401, 403):
        return Kind.DENIED
    if status == 404:
        return Kind.MISSING
    return Kind.BUSY if not status and _BROKEN.search(text) else Kind.OTHER


def _describe(error: Exception, whole: str, status: re.Match[str] | None, bulk: re.Match[str] | None) -> str:
    part = _first(_PART, whole)
    where = f"part {part}: " if part else ""
    if bulk:
        return _one_line(f"{bulk[2]} {bulk[1]}")
    if status:
        code, message = _first(_CODE, whole), _first(_MESSAGE, whole)
        said = f" ({': '.join(filter(None, (code, message)))})" if code or message else ""
        return _one_line(f"{where}{status[1]}{status[2]}{said}")
    system = _SYSTEM.findall(whole)
    kind = _first(_KIND, whole)
    details = ", ".join(filter(None, ("no answer in time" if kind == "Timeout" else "", *system[-1:])))
    text = re.sub(r"https?://\S+", "...", whole.partition(_DEBUG)[0]).rpartition(" - ")[2]
    return _one_line(f"{where}{type(error).__name__ if not text.strip() else text}" + (f" ({details})" if details else ""))


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500].rstrip(". ")


_ADVICE: Final = {
    Kind.DENIED: "Check the credentials and what they allow on this prefix: read, write, list and delete are needed",
    Kind.EXPIRED: "The credentials have expired, or this host's clock is wrong, and making them anew did not help: renew them",
    Kind.NO_BUCKET: "The bucket (or container) does not exist: make it first, or check its name, region and endpoint",
    Kind.MISSING: "Check the path, and that nobody removed it meanwhile",
    Kind.EXISTS: "Nothing was overwritten",
    Kind.CHANGED: "Another writer replaced it meanwhile",
    Kind.UNSUPPORTED: "This store does not do what was asked for: see docs/storage.md for the options that do without it",
    Kind.ODD_NAME: "An object with a name that no tool for files can have stands there; anyshard makes no such: remove it",
    Kind.BUSY: "Try again later",
    Kind.OTHER: "Check endpoint, region and options, then look up this answer in the manual of the store",
}


def to_error(fault: Fault, request: Request) -> AnyshardError:
    """The error of ours for a fault that trying again does not mend."""
    message = f"could not {request.verb} {request.name}: {fault.text}. {_ADVICE[fault.kind]}"
    kinds: dict[Kind, type[StorageError]] = {
        Kind.DENIED: StorageDenied,
        Kind.EXPIRED: StorageDenied,
        Kind.MISSING: BlobNotFound,
        Kind.EXISTS: BlobExists,
    }
    if fault.kind is Kind.UNSUPPORTED and request.verb == "create":
        return StorageUnguarded(
            f"could not create {request.name}: {fault.text}. The store has no create-if-absent", file=request.file
        )
    return kinds.get(fault.kind, StorageError)(message, file=request.file)


class ObjectJudge(Judge):
    """Reads errors of obstore for a `Retrier`. `renew` makes the client anew, with fresh credentials."""

    def judge(self, error: Exception) -> Verdict:
        """Broken connections, timeouts, 408, 429 and 5xx but 501 may do better; expired credentials, when renewed."""
        if isinstance(error, AnyshardError):
            return Verdict.FINAL
        if super().judge(error) is Verdict.AGAIN:
            return Verdict.AGAIN
        kind = read_fault(error).kind
        return {Kind.BUSY: Verdict.AGAIN, Kind.EXPIRED: Verdict.RENEW}.get(kind, Verdict.FINAL)

    def describe(self, error: Exception) -> str:
        """Status, code and message, or which connection broke how."""
        return read_fault(error).text

    def explain(self, error: Exception, request: Request) -> Exception:
        """The error of ours."""
        if isinstance(error, AnyshardError):
            return error
        if isinstance(error, ValueError) and not isinstance(error, OSError) and "parse path" in str(error):
            return InvalidPath(f"{request.name} is no name that an object can have here: expected no control characters")
        return to_error(read_fault(error), request)

"""Who wrote a record and when, in the manifest's forms."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from anyshard import __version__


def writer_name() -> str:
    """Name and version of this package, as records name their writer."""
    return f"anyshard {__version__}"


def utc_now() -> str:
    """The time as RFC 3339 in UTC, with milliseconds: for people, and to tell which of two steps of a run was saved later."""
    return _show(datetime.now(UTC))


def stamp_after(time: str, earlier: Iterable[str]) -> str:
    """This time, or one just after the latest of the earlier ones, if another host, whose clock is ahead, has given that."""
    latest = max((datetime.fromisoformat(text) for text in earlier if text), default=None)
    return time if latest is None or datetime.fromisoformat(time) > latest else _show(latest + timedelta(milliseconds=1))


def _show(time: datetime) -> str:
    return f"{time.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"

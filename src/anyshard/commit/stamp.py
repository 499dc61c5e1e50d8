"""Who wrote a record and when, in the manifest's forms."""

from __future__ import annotations

from datetime import UTC, datetime

from anyshard import __version__


def writer_name() -> str:
    """Name and version of this package, as records name their writer."""
    return f"anyshard {__version__}"


def utc_now() -> str:
    """The time as RFC 3339 in UTC, with milliseconds: for people, and to tell which of two steps of a run was saved later."""
    return f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"

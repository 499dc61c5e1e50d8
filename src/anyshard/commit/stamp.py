"""Who wrote a record and when, in the manifest's forms."""

from __future__ import annotations

from datetime import UTC, datetime

from anyshard import __version__


def writer_name() -> str:
    """Name and version of this package, as records name their writer."""
    return f"anyshard {__version__}"


def utc_now() -> str:
    """The time as RFC 3339 in UTC, to the second; for people, never compared."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

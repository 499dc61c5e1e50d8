"""The names that s3fs has for what `storage_options` of an s3:// URL say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from anyshard.errors import InvalidOption

_NAMES = MappingProxyType(
    {
        "endpoint": "endpoint_url",
        "endpoint_url": "endpoint_url",
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "token": "token",
        "profile": "profile",
    }
)
_FLAG_NAMES = MappingProxyType({"anonymous": "anon", "skip_signature": "anon"})
_REGION_NAMES = frozenset({"region", "default_region"})
_CONFIG_NAMES = MappingProxyType({"request_timeout_s": "read_timeout", "connect_timeout_s": "connect_timeout"})
_FLAGS = MappingProxyType({"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False})
_MAX_SECONDS = 1e9
# How the store for s3:// does its work; s3fs has its own ways.
_PASSED_OVER = frozenset(
    {
        "allow_http",
        "unsigned_payload",
        "max_attempts",
        "retry_budget_s",
        "max_requests",
        "part_nbytes",
        "streams_per_blob",
        "bucket",
    }
)


def to_s3fs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of s3:// (see docs/storage.md) for `open_fsspec_store`, to reach the same place with the same credentials.

    Flags and numbers may be text, as they are in the query of a URL, and names may begin with `aws_`. A `credential_provider`
    is asked once, now. Tuning is passed over; a name that means something to s3:// but cannot be said to s3fs is
    `InvalidOption`, and so is a value that is none, or the same thing said twice in different words.
    """
    given = dict(options)
    provider: Callable[[], Any] | None = given.pop("credential_provider", None)
    found = _translate(given)
    return found if provider is None else {**found, **_translate(_ask(provider))}


def _ask(provider: Callable[[], Any]) -> Mapping[str, Any]:
    credentials = provider()
    if not isinstance(credentials, Mapping):
        raise InvalidOption(f"credential_provider: expected it to return a mapping, found {type(credentials).__name__}")
    return {name: value for name, value in credentials.items() if name != "expires_at"}


def _translate(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    said: dict[tuple[str, ...], str] = {}
    for name, value in given.items():
        for path, meant in _say(name, value):
            if path in said:
                raise InvalidOption(f"expected each storage option once, found {said[path]} and {name}, which mean the same")
            said[path] = name
            inner = found
            for step in path[:-1]:
                inner = inner.setdefault(step, {})
            inner[path[-1]] = meant
    return found


def _say(name: str, value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Where s3fs takes what this option says, and how; nothing if it need not know."""
    known = name.removeprefix("aws_")
    if value is None or known in _PASSED_OVER:
        return
    if known in _NAMES:
        yield (_NAMES[known],), value
    elif known in _REGION_NAMES:
        yield ("client_kwargs", "region_name"), value
    elif known in _FLAG_NAMES:
        yield (_FLAG_NAMES[known],), _to_flag(name, value)
    elif known in _CONFIG_NAMES:
        yield ("config_kwargs", _CONFIG_NAMES[known]), _to_seconds(name, value)
    elif known == "virtual_hosted_style_request":
        yield ("config_kwargs", "s3", "addressing_style"), "virtual" if _to_flag(name, value) else "path"
    else:
        raise InvalidOption(
            f"expected a storage option that s3fs has a name for, found {name!r}: in a forked process S3 is reached "
            "through s3fs. Start the process by spawn, or leave the option out"
        )


def _to_flag(name: str, value: object) -> bool:
    flag = value if isinstance(value, bool) else _FLAGS.get(str(value).lower())
    if flag is None:
        raise InvalidOption(f"{name}: expected true or false, found {value!r}")
    return flag


def _to_seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0.0 < seconds < _MAX_SECONDS:
        raise InvalidOption(f"{name}: expected a number of seconds above 0, found {value!r}")
    return seconds

"""The names that s3fs has for what `storage_options` of an s3:// URL say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from anyshard.errors import InvalidOption

_NAMES = MappingProxyType(
    {
        "endpoint": "endpoint_url",
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "token": "token",
        "anonymous": "anon",
        "skip_signature": "anon",
        "profile": "profile",
    }
)
_CONFIG_NAMES = MappingProxyType({"request_timeout_s": "read_timeout", "connect_timeout_s": "connect_timeout"})
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

    A `credential_provider` is asked once, now. Tuning is passed over; a name that means something to s3:// but cannot be said to
    s3fs is `InvalidOption`.
    """
    given = {name.removeprefix("aws_"): value for name, value in options.items()}
    provider: Callable[[], Mapping[str, Any]] | None = given.pop("credential_provider", None)
    if provider is not None:
        given.update({name: value for name, value in provider().items() if name != "expires_at"})
    found: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for name, value in given.items():
        if name in _NAMES:
            found[_NAMES[name]] = value
        elif name in _CONFIG_NAMES:
            config[_CONFIG_NAMES[name]] = value
        elif name == "region":
            found["client_kwargs"] = {"region_name": value}
        elif name == "virtual_hosted_style_request":
            config["s3"] = {"addressing_style": "virtual" if value else "path"}
        elif name not in _PASSED_OVER:
            raise InvalidOption(
                f"expected a storage option that s3fs has a name for, found {name!r}: in a forked process S3 is reached "
                "through s3fs. Start the process by spawn, or leave the option out"
            )
    return {**found, "config_kwargs": config} if config else found

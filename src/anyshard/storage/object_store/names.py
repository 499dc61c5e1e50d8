"""What options are called: of the many names that people and obstore know for one thing each has one form from here on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from anyshard.errors import InvalidOption
from anyshard.storage.object_store.places import Service

CLIENT_NAMES: Final = frozenset(
    {
        "allow_invalid_certificates",
        "default_headers",
        "http1_only",
        "http2_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "user_agent",
    }
)
_FLAG_NAMES: Final = frozenset(
    {
        "disable_bulk_delete",
        "disable_tagging",
        "imdsv1_fallback",
        "s3_express",
        "skip_signature",
        "sse_bucket_key_enabled",
        "unsigned_payload",
        "use_azure_cli",
        "use_emulator",
        "use_fabric_endpoint",
        "virtual_hosted_style_request",
    }
)
_FLAGS: Final = MappingProxyType(
    {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
)
_OWN_NAMES: Final = (
    "allow_http",
    "connect_timeout_s",
    "credential_provider",
    "max_attempts",
    "max_requests",
    "part_nbytes",
    "profile",
    "request_timeout_s",
    "retry_budget_s",
    "streams_per_blob",
)
# Those that docs/storage.md has.
_SHOWN_NAMES: Final = MappingProxyType[Service, tuple[str, ...]](
    {
        "s3": (
            "access_key_id",
            "anonymous",
            "endpoint",
            "region",
            "secret_access_key",
            "session_token",
            "unsigned_payload",
        ),
        "gcs": ("anonymous", "endpoint", "service_account"),
        "azure": ("account_key", "account_name", "anonymous", "endpoint", "sas"),
    }
)
# The longest first.
_PREFIXES: Final = MappingProxyType[Service, tuple[str, ...]](
    {"s3": ("aws_",), "gcs": ("google_",), "azure": ("azure_storage_", "azure_")}
)
# Without the prefix -> the one name of obstore's that is used from here on.
_ALIASES: Final = MappingProxyType[Service, Mapping[str, str]](
    {
        "s3": {
            "anonymous": "skip_signature",
            "bucket_name": "bucket",
            "endpoint_url": "endpoint",
            "endpoint_url_s3": "endpoint",
            "token": "session_token",
        },
        "gcs": {
            "anonymous": "skip_signature",
            "bucket_name": "bucket",
            "endpoint": "base_url",
            "service_account_path": "service_account",
        },
        "azure": {
            "access_key": "account_key",
            "anonymous": "skip_signature",
            "authority_id": "tenant_id",
            "bearer_token": "token",
            "identity_endpoint": "msi_endpoint",
            "master_key": "account_key",
            "sas": "sas_key",
            "sas_token": "sas_key",
        },
    }
)


def name_options(service: Service, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` under one name each, flags as bool; None says that it is not given.

    What is given under two names is `InvalidOption`, and so is a flag that is neither true nor false.
    """
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise InvalidOption(f"storage_options: expected names as text, found {type(name).__name__}")
        to = _find_name(service, name)
        if value is None:
            found.setdefault(to, None)
            continue
        if found.get(to) is not None:
            raise InvalidOption(
                f"expected each storage option once, found {given[to]!r} and {name!r}, which are the same: drop one"
            )
        found[to], given[to] = read_flag(name, value) if to in _FLAG_NAMES else value, name
    return found


def read_flag(name: str, value: object) -> bool:
    """True or False, for which there are words."""
    flag = value if isinstance(value, bool) else _FLAGS.get(str(value).strip().lower())
    if flag is None:  # the value is not shown: it may be a credential that stands under a wrong name
        raise InvalidOption(f"{name}: expected true or false, found a {type(value).__name__} that is neither")
    return flag


def endpoint_name(service: Service) -> str:
    """What the endpoint is called."""
    return "base_url" if service == "gcs" else "endpoint"


def unknown_option(service: Service, name: str) -> InvalidOption:
    """The error for a name that neither anyshard nor obstore knows; it lists those that are known."""
    own = {*_OWN_NAMES} - ({"profile"} if service != "s3" else set())
    known = ", ".join(sorted({*own, *_SHOWN_NAMES[service], *CLIENT_NAMES}))
    kind = {"s3": "S3Config", "gcs": "GCSConfig", "azure": "AzureConfig"}[service]
    return InvalidOption(f"expected one of these storage options: {known}, or a name of obstore's {kind}; found {name!r}")


def _find_name(service: Service, name: str) -> str:
    bare = name.lower()
    for prefix in _PREFIXES[service]:
        if bare.startswith(prefix):
            bare = bare.removeprefix(prefix)
            break
    return _ALIASES[service].get(bare, bare)

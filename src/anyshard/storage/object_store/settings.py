"""What `storage_options` and the query of a URL say of how to reach a store, checked and sorted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from anyshard.errors import InvalidOption
from anyshard.options import MIB
from anyshard.storage.object_store.places import Place, Service
from anyshard.storage.retry import RetryPolicy

MIN_PART_NBYTES: Final = 5 * MIB  # S3 takes no smaller ones
MAX_PART_NBYTES: Final = 5 * 1024 * MIB

# Our names -> those of obstore, per service; a name that is not here is obstore's own.
_NAMES: Final = MappingProxyType[Service, Mapping[str, str]](
    {
        "s3": {
            "endpoint": "endpoint",
            "region": "region",
            "access_key_id": "access_key_id",
            "secret_access_key": "secret_access_key",
            "session_token": "session_token",
            "anonymous": "skip_signature",
            "unsigned_payload": "unsigned_payload",
        },
        "gcs": {"endpoint": "base_url", "service_account": "service_account", "anonymous": "skip_signature"},
        "azure": {
            "endpoint": "endpoint",
            "account_name": "account_name",
            "account_key": "account_key",
            "sas": "sas_key",
            "anonymous": "skip_signature",
        },
    }
)
_CLIENT_NAMES: Final = frozenset(
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
_FLAGS: Final = MappingProxyType({"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False})


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach one place. `config` and `client` are for obstore and may hold credentials: never show them."""

    config: Mapping[str, Any]
    client: Mapping[str, Any]
    credential_provider: Callable[[], Any] | None
    profile: str | None
    policy: RetryPolicy
    request_timeout_s: float = 60.0
    part_nbytes: int | None = None
    streams_per_blob: int = 4
    max_requests: int = 16

    def __repr__(self) -> str:
        return "Settings(...)"

    @property
    def is_anonymous(self) -> bool:
        """Whether requests are not signed."""
        return bool(self.config.get("skip_signature"))

    @property
    def has_keys(self) -> bool:
        """Whether the options themselves say who asks."""
        return self.credential_provider is not None or any(name.removeprefix("aws_") == "access_key_id" for name in self.config)


def read_settings(place: Place, options: Mapping[str, Any]) -> Settings:
    """The settings for `place`, of which `options` win over what its URL says. What cannot be is `InvalidOption`."""
    given = _Given({**place.options, **options})
    endpoint = given.text("endpoint")
    # Without an endpoint here the environment may name one, of either kind.
    allow_http = given.flag("allow_http", default=endpoint is None or endpoint.lower().startswith("http://"))
    request_timeout_s = given.seconds("request_timeout_s", 60.0)
    connect_timeout_s = given.seconds("connect_timeout_s", 5.0)
    policy = RetryPolicy(given.count("max_attempts", 8), given.seconds("retry_budget_s", 300.0))
    part_nbytes = given.count("part_nbytes", 0) if "part_nbytes" in given.values else None
    if part_nbytes is not None and not MIN_PART_NBYTES <= part_nbytes <= MAX_PART_NBYTES:
        raise InvalidOption(f"part_nbytes: expected {MIN_PART_NBYTES} to {MAX_PART_NBYTES} bytes, found {part_nbytes}")
    streams, max_requests = given.count("streams_per_blob", 4), given.count("max_requests", 16)
    provider = given.values.pop("credential_provider", None)
    if provider is not None and not callable(provider):
        raise InvalidOption("credential_provider: expected something to call, which returns credentials as obstore takes them")
    if place.service != "s3" and "profile" in given.values:
        raise _unknown(place.service, "profile")
    return Settings(
        client={
            "allow_http": allow_http,
            "timeout": timedelta(seconds=request_timeout_s),
            "connect_timeout": timedelta(seconds=connect_timeout_s),
            **{name: _to_text(given.values.pop(name)) for name in sorted(_CLIENT_NAMES & given.values.keys())},
        },
        credential_provider=provider,
        profile=given.text("profile", pop=True),
        policy=policy,
        request_timeout_s=request_timeout_s,
        part_nbytes=part_nbytes,
        streams_per_blob=streams,
        max_requests=max_requests,
        config=given.config(place.service),  # last: all that is left
    )


def unknown_option(service: Service, name: str) -> InvalidOption:
    """The error for a name that neither anyshard nor obstore knows; it lists those that are known."""
    return _unknown(service, name)


@dataclass(frozen=True, slots=True)
class _Given:
    """Options not looked at yet; each is taken out as it is read. A value may be a text, as it stands in a query."""

    values: dict[str, Any]

    def text(self, name: str, *, pop: bool = False) -> str | None:
        value = self.values.pop(name, None) if pop else self.values.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidOption(f"{name}: expected a text, found {type(value).__name__}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.pop(name, default)
        return value if isinstance(value, bool) else _to_flag(name, value)

    def seconds(self, name: str, default: float) -> float:
        value = self.values.pop(name, default)
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = -1.0
        if isinstance(value, bool) or not 0.0 < seconds < 1e9:
            raise InvalidOption(f"{name}: expected a number of seconds above 0, found {value!r}")
        return seconds

    def count(self, name: str, default: int) -> int:
        value = self.values.pop(name, default)
        if isinstance(value, str) and value.isascii() and value.isdecimal():
            value = int(value)
        if type(value) is not int or (value <= 0 and value is not default):
            raise InvalidOption(f"{name}: expected a whole number above 0, found {value!r}")
        return value

    def config(self, service: Service) -> dict[str, Any]:
        """What is left, under obstore's names. What has no name there is found when the client is made."""
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            if not isinstance(name, str):
                raise InvalidOption(f"storage_options: expected names as text, found {type(name).__name__}")
            if value is None:
                continue
            value = _to_text(value)  # noqa: PLW2901 - as obstore takes it
            if not isinstance(value, (str, bool)):
                raise InvalidOption(f"{name}: expected a text, a number or True or False, found {type(value).__name__}")
            is_flag = name in ("anonymous", "unsigned_payload") and not isinstance(value, bool)
            found[_NAMES[service].get(name, name)] = _to_flag(name, value) if is_flag else value
        return found


def _to_text(value: Any) -> Any:
    """Numbers as text, since obstore takes no others."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _to_flag(name: str, value: object) -> bool:
    flag = _FLAGS.get(str(value).lower()) if isinstance(value, str) else None
    if flag is None:
        raise InvalidOption(f"{name}: expected true or false, found {value!r}")
    return flag


def _unknown(service: Service, name: str) -> InvalidOption:
    own = {*_OWN_NAMES} - ({"profile"} if service != "s3" else set())
    known = ", ".join(sorted({*own, *_NAMES[service], *_CLIENT_NAMES}))
    kind = {"s3": "S3Config", "gcs": "GCSConfig", "azure": "AzureConfig"}[service]
    return InvalidOption(f"expected one of these storage options: {known}, or a name of obstore's {kind}; found {name!r}")

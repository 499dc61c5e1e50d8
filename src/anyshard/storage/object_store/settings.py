"""What `storage_options` and the query of a URL say of how to reach a store, checked and sorted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from anyshard.errors import InvalidOption
from anyshard.options import MIB
from anyshard.storage.object_store.names import CLIENT_NAMES, endpoint_name, name_options, read_flag, unknown_option
from anyshard.storage.object_store.places import Place
from anyshard.storage.retry import RetryPolicy

MIN_PART_NBYTES: Final = 5 * MIB  # S3 takes no smaller ones
MAX_PART_NBYTES: Final = 5 * 1024 * MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach one place. `config` and `client` are for obstore and may hold credentials: never show them.

    Their names are those of `names.py`, one for each thing, and flags in `config` are bool.
    """

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
        return self.credential_provider is not None or "access_key_id" in self.config


def read_settings(place: Place, options: Mapping[str, Any]) -> Settings:
    """The settings for `place`, of which `options` win over what its URL says. What cannot be is `InvalidOption`."""
    named = {**name_options(place.service, place.options), **name_options(place.service, options)}
    given = _Given({name: value for name, value in named.items() if value is not None})
    endpoint = _check_endpoint(given.text(endpoint_name(place.service)))
    # Without an endpoint here the environment may name one, of either kind.
    allow_http = given.flag("allow_http", default=endpoint is None or endpoint.lower().startswith("http://"))
    if endpoint is not None and endpoint.lower().startswith("http://") and not allow_http:
        raise InvalidOption("allow_http: expected True, or an endpoint that begins with https://, found False with http://")
    request_timeout_s = given.seconds("request_timeout_s", 60.0)
    connect_timeout_s = given.seconds("connect_timeout_s", 5.0)
    policy = RetryPolicy(given.count("max_attempts", 8), given.seconds("retry_budget_s", 300.0))
    part_nbytes = given.count("part_nbytes", 0) if "part_nbytes" in given.values else None
    if part_nbytes is not None and not MIN_PART_NBYTES <= part_nbytes <= MAX_PART_NBYTES:
        raise InvalidOption(f"part_nbytes: expected {MIN_PART_NBYTES} to {MAX_PART_NBYTES} bytes, found {part_nbytes}")
    streams, max_requests = given.count("streams_per_blob", 4), given.count("max_requests", 16)
    if place.service != "s3" and "profile" in given.values:
        raise unknown_option(place.service, "profile")
    return Settings(
        client={
            "allow_http": allow_http,
            "timeout": timedelta(seconds=request_timeout_s),
            "connect_timeout": timedelta(seconds=connect_timeout_s),
            **{name: _to_text(given.values.pop(name)) for name in sorted(CLIENT_NAMES & given.values.keys())},
        },
        credential_provider=given.provider(),
        profile=given.text("profile", pop=True),
        policy=policy,
        request_timeout_s=request_timeout_s,
        part_nbytes=part_nbytes,
        streams_per_blob=streams,
        max_requests=max_requests,
        config=given.config(),  # last: all that is left
    )


def _show(value: object) -> str:
    """A number as it is; of anything else the type, for it may be a credential that stands in the wrong place."""
    return repr(value) if isinstance(value, (bool, int, float)) else f"a {type(value).__name__} (not shown)"


def _check_endpoint(endpoint: str | None) -> str | None:
    if endpoint is not None and not re.match(r"https?://[^/?#]", endpoint, re.IGNORECASE):
        raise InvalidOption("endpoint: expected a URL like https://host or http://host:port, found another text (not shown)")
    return endpoint


@dataclass(frozen=True, slots=True)
class _Given:
    """Options not looked at yet; each is taken out as it is read. A value may be a text, as it stands in a query."""

    values: dict[str, Any]

    def text(self, name: str, *, pop: bool = False) -> str | None:
        value = self.values.pop(name, None) if pop else self.values.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            found = "an empty one" if value == "" else type(value).__name__
            raise InvalidOption(f"{name}: expected a text, found {found}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        return read_flag(name, self.values.pop(name, default))

    def seconds(self, name: str, default: float) -> float:
        value = self.values.pop(name, default)
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = -1.0
        if isinstance(value, bool) or not 0.0 < seconds < 1e9:
            raise InvalidOption(f"{name}: expected a number of seconds above 0, found {_show(value)}")
        return seconds

    def count(self, name: str, default: int) -> int:
        value = self.values.pop(name, default)
        if isinstance(value, str) and value.isascii() and value.isdecimal():
            value = int(value)
        if type(value) is not int or (value <= 0 and value is not default):
            raise InvalidOption(f"{name}: expected a whole number above 0, found {_show(value)}")
        return value

    def provider(self) -> Callable[[], Any] | None:
        provider: Callable[[], Any] | None = self.values.pop("credential_provider", None)
        if provider is not None and not callable(provider):
            raise InvalidOption(
                "credential_provider: expected something to call, which returns credentials as obstore takes them"
            )
        if provider is not None and any(map(inspect.iscoroutinefunction, (provider, type(provider).__call__))):
            raise InvalidOption("credential_provider: expected a plain function, found an async one, which nobody here awaits")
        return provider

    def config(self) -> dict[str, Any]:
        """What is left. What has no name at obstore is found when the client is made."""
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            value = _to_text(value)  # noqa: PLW2901 - as obstore takes it
            if not isinstance(value, (str, bool)):
                raise InvalidOption(f"{name}: expected a text, a number or True or False, found {type(value).__name__}")
            found[name] = value
        for name in ("service_account", "application_credentials"):
            if str(found.get(name, "")).lstrip().startswith("{"):
                raise InvalidOption(
                    f"{name}: expected the path of a file, found JSON: give the key itself as service_account_key"
                )
        return found


def _to_text(value: Any) -> Any:
    """Numbers as text, since obstore takes no others."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

"""Settings in the words of fsspec's packages, for a forked child."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from anyshard.errors import InvalidOption
from anyshard.storage.object_store.places import Place
from anyshard.storage.object_store.settings import Settings

_OF_EVERY_CLIENT: Final = frozenset({"allow_http", "timeout", "connect_timeout"})
_GCSFS: Final = MappingProxyType({"base_url": "endpoint_url", "service_account": "token", "application_credentials": "token"})
_ADLFS: Final = MappingProxyType(
    {
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_key": "sas_token",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "tenant_id": "tenant_id",
    }
)


def to_fsspec_options(place: Place, settings: Settings) -> dict[str, Any]:
    """Options for the package of fsspec that reaches `place`. What it has no word for is `InvalidOption`, tuning aside."""
    client = {name: value for name, value in settings.client.items() if name not in _OF_EVERY_CLIENT}
    if place.service == "s3":
        return _to_s3fs(settings, client)
    package = "gcsfs" if place.service == "gcs" else "adlfs"
    if settings.credential_provider is not None:
        raise _unknown(package, "credential_provider")
    for name in client:
        raise _unknown(package, name)
    return _to_gcsfs(settings) if place.service == "gcs" else _to_adlfs(settings)


def _to_s3fs(settings: Settings, client: Mapping[str, Any]) -> dict[str, Any]:
    from anyshard.storage.fsspec_store.s3fs_options import to_s3fs_options  # noqa: PLC0415 - fsspec is optional

    given = {
        **client,
        **settings.config,
        "profile": settings.profile,
        "credential_provider": settings.credential_provider,
        "request_timeout_s": settings.request_timeout_s,
        "connect_timeout_s": settings.client["connect_timeout"].total_seconds(),
    }
    region = given.pop("default_region", None)
    given.setdefault("region", region)
    return to_s3fs_options({name: value for name, value in given.items() if value is not None})


def _to_gcsfs(settings: Settings) -> dict[str, Any]:
    config = dict(settings.config)
    is_anonymous, key = config.pop("skip_signature", False), config.pop("service_account_key", None)
    found = _rename("gcsfs", config.items(), _GCSFS)
    if key is not None:
        found["token"] = _parse_key(key)
    return {**found, **({"token": "anon"} if is_anonymous else {})}


def _parse_key(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        pass  # the error is raised outside of this block: the one of json holds the text
    raise InvalidOption("service_account_key: expected the JSON of a key, found another text")


def _to_adlfs(settings: Settings) -> dict[str, Any]:
    config = dict(settings.config)
    is_anonymous, endpoint = config.pop("skip_signature", False), config.pop("endpoint", None)
    found = _rename("adlfs", config.items(), _ADLFS)
    if endpoint is not None:  # adlfs takes one only so
        facts = {
            "DefaultEndpointsProtocol": endpoint.partition(":")[0],
            "AccountName": config.get("account_name"),
            "AccountKey": config.get("account_key"),
            "SharedAccessSignature": config.get("sas_key"),
            "BlobEndpoint": endpoint,
        }
        found["connection_string"] = ";".join(f"{name}={value}" for name, value in facts.items() if value)
    return {**found, **({"anon": True} if is_anonymous else {})}


def _rename(package: str, options: Iterable[tuple[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options:
        if name not in names:
            raise _unknown(package, name)
        found[names[name]] = value
    return found


def _unknown(package: str, name: str) -> InvalidOption:
    return InvalidOption(
        f"expected a storage option that {package} has a name for, found {name!r}: in a forked process the place is reached "
        f"through {package}. Start the process by spawn, or leave the option out"
    )

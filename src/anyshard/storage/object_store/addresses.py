"""Where requests really go: options and the environment, of which obstore reads its own variables, taken together.

obstore does not say what it found in the environment. But the URL that it signs for an object shows it, and signing with keys of
the caller is computed here: nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import obstore
from obstore.store import AzureStore, S3Store

from anyshard.storage.object_store.names import endpoint_name
from anyshard.storage.object_store.places import Place, Service
from anyshard.storage.object_store.settings import Settings

_KEY: Final = "k"
# Keys that open nothing. The session of S3 Express would be asked for over the network.
_CONFIG: Final = MappingProxyType[Service, dict[str, Any]](
    {
        "s3": {"access_key_id": "none", "secret_access_key": "none", "s3_express": False},
        "azure": {"account_key": "bm9uZQ=="},
    }
)
_TOLD: Final = frozenset(
    {
        "account_name",
        "default_region",
        "endpoint",
        "region",
        "use_emulator",
        "use_fabric_endpoint",
        "virtual_hosted_style_request",
    }
)


@dataclass(frozen=True, slots=True)
class Address:
    """The server behind a bucket, without credentials. `bucket_url` is where its objects are; `region` is known of S3 only."""

    bucket_url: str
    region: str | None

    @property
    def site(self) -> str:
        """Host and path."""
        return self.bucket_url.partition("://")[2]

    def endpoint(self, bucket: str) -> tuple[str, bool]:
        """The URL of the server, and whether it has the bucket in its host instead of its path."""
        url = urlsplit(self.bucket_url)
        if url.path.endswith(f"/{bucket}"):
            return urlunsplit(url._replace(path=url.path.removesuffix(f"/{bucket}"))), False
        return urlunsplit(url._replace(netloc=url.netloc.removeprefix(f"{bucket}."))), True


def find_address(place: Place, settings: Settings) -> Address:
    """Where requests to `place` go. Of Google Cloud Storage, and where obstore does not sign, only what the options say."""
    signed = _sign(place, settings)
    if not signed:
        url = urlsplit(str(settings.config.get(endpoint_name(place.service)) or "https://"))
        return Address(_join(url.scheme, url.netloc, f"{url.path.rstrip('/')}/{place.bucket}"), settings.config.get("region"))
    url = urlsplit(signed)
    scope = parse_qs(url.query).get("X-Amz-Credential", [""])[0].split("/")
    return Address(_join(url.scheme, url.netloc, url.path.removesuffix(f"/{_KEY}")), scope[2] if len(scope) > 2 else None)


def to_config(place: Place, settings: Settings) -> dict[str, Any]:
    """The options of `settings` as obstore takes them: an endpoint also where one of the environment would win."""
    config = dict(settings.config)
    if place.service == "s3" and "endpoint" in config:
        config["aws_endpoint_url_s3"] = config["endpoint"]
    return config


def _sign(place: Place, settings: Settings) -> str | None:
    if place.service not in _CONFIG:
        return None
    told = {
        name: value
        for name, value in to_config(place, settings).items()
        if name.removesuffix("_url_s3").removeprefix("aws_") in _TOLD
    }
    kind: Any = S3Store if place.service == "s3" else AzureStore
    try:
        store = kind(place.bucket, config={**told, **_CONFIG[place.service]}, client_options={"allow_http": True})
        signed: str = obstore.sign(store, "GET", _KEY, timedelta(minutes=1))
        return signed
    except Exception:  # noqa: BLE001 - of any class; an address is for telling places apart, and requests say what is wrong
        return None


def _join(scheme: str, netloc: str, path: str) -> str:
    return f"{scheme}://{netloc.rpartition('@')[2]}{unquote(path)}"

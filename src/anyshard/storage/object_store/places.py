"""Which place a URL names: service, bucket, prefix, and what its query says. Nothing is opened here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import quote, unquote

from anyshard.errors import InvalidPath
from anyshard.storage.keys import split_key

Service = Literal["s3", "gcs", "azure"]

SCHEMES: Final = MappingProxyType[str, Service](
    {
        "s3": "s3",
        "s3a": "s3",
        "gs": "gcs",
        "gcs": "gcs",
        "az": "azure",
        "azure": "azure",
        "abfs": "azure",
        "abfss": "azure",
    }
)
_FORMS: Final = MappingProxyType[Service, str](
    {
        "s3": "s3://bucket/prefix",
        "gcs": "gs://bucket/prefix",
        "azure": "az://container/prefix or abfss://container@account.dfs.core.windows.net/prefix",
    }
)
_BUCKET: Final = re.compile(r"[A-Za-z0-9$_](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_STRAY_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_AZURE_HOST: Final = re.compile(r"([a-z0-9]{3,24})\.(?:dfs|blob)\.([a-z0-9.-]+)")


@dataclass(frozen=True, slots=True)
class Place:
    """One prefix (without slashes at its ends; "" is the whole bucket) of one bucket. `options` is what the URL says of more."""

    service: Service
    scheme: str
    bucket: str
    prefix: str
    host: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """How it is shown, which names the same place again: without query and credentials."""
        authority = f"{self.bucket}@{self.host}" if self.host else self.bucket
        return f"{self.scheme}://{authority}" + (f"/{_quote(self.prefix)}" if self.prefix else "")

    def full_key(self, key: str) -> str:
        """The name of `key` within the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


def parse_place(url: str) -> Place:
    """The place that `url` names; `InvalidPath` says what is wrong without repeating the URL, which may hold credentials.

    In path and query `%20` is a space and `%25` a percent sign; `+` is a plus sign. A `?` begins the query, so in a path it is
    `%3F`, and `#` is `%23`.
    """
    scheme = url.partition("://")[0].lower()
    service = SCHEMES[scheme]
    if "#" in url:
        raise _invalid(service, "found a '#': write %23")
    rest, _, query = url.partition("://")[2].partition("?")
    authority, _, path = rest.partition("/")
    bucket, host, more = _split_authority(service, authority)
    prefix = _decode(service, path.strip("/"))
    if prefix:
        _check_prefix(service, prefix)
    return Place(service, scheme, bucket, prefix, host, {**more, **_parse_query(service, query)})


def _split_authority(service: Service, authority: str) -> tuple[str, str, dict[str, str]]:
    """Bucket, host, and the options that the host says."""
    bucket, at, host = authority.partition("@")
    more: dict[str, str] = {}
    if at and service != "azure":
        raise _invalid(service, "found an '@' before the path: credentials belong into storage_options")
    if at:
        found = _AZURE_HOST.fullmatch(host.lower())
        if found is None:
            raise _invalid(service, "found another host")
        host = found[0]
        more["account_name"] = found[1]
        if found[2] != "core.windows.net":
            more["endpoint"] = f"https://{found[1]}.blob.{found[2]}"
    if not _BUCKET.fullmatch(bucket):
        what = "a container" if service == "azure" else "a bucket"
        raise _invalid(service, f"found no name of {what} where it stands (letters, digits, '.', '_', '-')")
    return bucket, host, more


def _check_prefix(service: Service, prefix: str) -> None:
    try:
        split_key(prefix)
    except InvalidPath as error:
        raise _invalid(
            service, "found a prefix with a component that is empty, '.' or '..', or with a backslash or NUL"
        ) from error
    if not prefix.isprintable() and any(ord(character) < 32 or ord(character) == 127 for character in prefix):
        raise _invalid(service, "found a control character in the prefix")


def _parse_query(service: Service, query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        name, equals, value = pair.partition("=")
        name = _decode(service, name)
        if not equals or not name or name in found:
            raise _invalid(service, "found a query that is not name=value&name=value, each name once")
        found[name] = _decode(service, value)
    return found


def _decode(service: Service, text: str) -> str:
    if _STRAY_PERCENT.search(text):
        raise _invalid(service, "found a '%' that begins no escape: write %25")
    try:
        decoded = unquote(text, errors="strict")
        decoded.encode()
    except UnicodeError as error:
        raise _invalid(service, "found bytes that are no UTF-8") from error
    return decoded


def _quote(prefix: str) -> str:
    return "".join(quote(c) if c in "%?#" or not c.isprintable() else c for c in prefix)


def _invalid(service: Service, found: str) -> InvalidPath:
    return InvalidPath(f"expected {_FORMS[service]}, {found}")

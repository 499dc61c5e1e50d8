"""From a URL and options to a store on fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from fsspec.registry import get_filesystem_class

from anyshard.errors import InvalidOption, InvalidPath
from anyshard.monitor.events import SILENT, Emitter
from anyshard.storage.fsspec_store.faults import Border, UnavailableJudge
from anyshard.storage.fsspec_store.instances import Instances
from anyshard.storage.fsspec_store.store import FsspecStore
from anyshard.storage.fsspec_store.traits import Traits, find_traits
from anyshard.storage.posix.site import nearest_existing
from anyshard.storage.retry import Retrier, RetryPolicy

T = TypeVar("T")

_SECRET = re.compile(r"auth|secret|password|passphrase|token|key|credential|sas|connection_string", re.IGNORECASE)
_MIN_SECRET_LENGTH = 4
_POLICY = RetryPolicy(max_attempts=5)
_POLICY_OF_REPEATERS = RetryPolicy(max_attempts=2)  # each attempt of theirs is several
_ENDPOINTS = ("endpoint_url", "endpoint", "host", "port", "account_name")
# What stands before an @ is a container there, not a user.
_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "az"})


def open_fsspec_store(url: str, options: Mapping[str, Any], *, events: Emitter = SILENT) -> FsspecStore:
    """The store at `url`, whose filesystem object takes `options` and what else the URL says (host, user, ...).

    Nothing is connected yet. A scheme whose package is missing is `InvalidPath`; options that the filesystem refuses are
    `InvalidOption`, when it is first used. Nothing in a path is decoded.
    """
    scheme = url.partition("://")[0].lower()
    url = scheme + url[len(scheme) :]
    kind = _find_class(scheme)
    told = _judge_options(scheme, lambda: kind._get_kwargs_from_urls(url))  # noqa: SLF001 - as fsspec's own functions
    given = {**told, **options}
    root = kind._strip_protocol(url).rstrip("/")  # noqa: SLF001 - as the line above
    traits = find_traits(kind, scheme)
    if traits.bucket and not root.strip("/"):
        raise InvalidPath(f"expected {scheme}://bucket/prefix, found no name of a bucket")
    shown = _show(url, scheme)
    retrier = Retrier(_POLICY_OF_REPEATERS if traits.repeats else _POLICY, UnavailableJudge(), events=events)
    border = Border(shown, events, retrier, _list_secrets(given))
    instances = Instances(lambda: _make(kind, given, scheme), shared=traits.shared)
    return FsspecStore(instances, traits, border, root=root, site=_name_site(shown, root, traits, given))


def _make(kind: type[Any], given: Mapping[str, Any], scheme: str) -> Any:
    filesystem = _judge_options(scheme, lambda: kind(**given, skip_instance_cache=True))
    if hasattr(filesystem, "dircache"):  # few classes take this as an option
        filesystem.dircache.use_listings_cache = False
    return filesystem


def _judge_options(scheme: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (TypeError, ValueError, KeyError) as found:
        # Its text may repeat what it was given, credentials and all: so the error is raised outside of this block, unchained.
        error = InvalidOption(
            f"expected a URL and storage_options that the filesystem of fsspec for {scheme}:// takes, found some that it "
            f"refuses ({type(found).__name__}). See its documentation for their names"
        )
    raise error


def _find_class(scheme: str) -> type[Any]:
    try:
        return get_filesystem_class(scheme)  # type: ignore[no-any-return]
    except ValueError as error:
        raise InvalidPath(f"expected a URL of a scheme that fsspec knows, found {scheme!r}") from error
    except ImportError as error:
        raise InvalidPath(f"{scheme}:// needs a package that is not installed: {error}") from error


def _show(url: str, scheme: str) -> str:
    rest = url[len(scheme) + 3 :].partition("?")[0].rstrip("/")
    host, slash, path = rest.partition("/")
    user, at, name = host.rpartition("@")
    kept = f"{user}@" if at and scheme in _CONTAINER_SCHEMES and ":" not in user else ""
    return f"{scheme}://{kept}{name}{slash}{path}"


def _list_secrets(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The values in `given`, at any depth, that messages must not show; the longest first."""
    found: set[str] = set()
    for name, value in given.items():
        if isinstance(value, Mapping):
            found.update(_list_secrets(value))
        elif isinstance(value, str) and len(value) >= _MIN_SECRET_LENGTH and _SECRET.search(str(name)):
            found.update({value, quote(value, safe="")})
    return tuple(sorted(found, key=lambda text: (-len(text), text)))


def _name_site(shown: str, root: str, traits: Traits, given: Mapping[str, Any]) -> str:
    if traits.in_memory:
        return "fsspec:memory"
    if traits.on_disk:
        return f"fsspec:file:{os.stat(nearest_existing(root)).st_dev}"
    inner = given.get("client_kwargs", {})
    endpoints = {name: given.get(name) or inner.get(name) for name in _ENDPOINTS}
    told = "".join(f" {name}={_hide_user(str(value))}" for name, value in endpoints.items() if value)
    scheme, _, rest = shown.partition("://")
    return f"fsspec:{scheme}://{rest.partition('/')[0]}{told}"


def _hide_user(endpoint: str) -> str:
    return re.sub(r"//[^/@]*@", "//", endpoint).partition("?")[0]

"""From what the user gives as a place to a store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from anyshard.errors import InvalidPath
from anyshard.monitor.events import SILENT, Emitter
from anyshard.storage.local import LocalStore
from anyshard.storage.object_store.places import SCHEMES
from anyshard.storage.protocol import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# A URL that went through pathlib has lost a slash; taken as a path it would name a directory "s3:" right here.
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)|file:")
_MAX_PATH_NBYTES = 4096
_FSSPEC = "fsspec+"  # before a scheme: through fsspec, whatever else knows it
_KNOWN = "a path, file:///absolute/path, s3://, gs:// or az://bucket/prefix, a URL that fsspec knows, or a Store object"


def open_store(
    place: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    events: Emitter = SILENT,
) -> Store:
    """The store at `place`: a path (relative to the directory of this moment, `~` expanded), a URL, or a store itself.

    Nothing is made or looked up yet. Anything else is `InvalidPath`; its message never repeats a URL, which may hold credentials.
    A path and a store take no `storage_options`: they are passed over, so that one set of options serves several places.
    """
    if not isinstance(place, (str, os.PathLike)):
        return _as_store(place)
    path = os.fspath(place)
    if not isinstance(path, str):
        raise InvalidPath(f"expected {_KNOWN}, found a path of type {type(path).__name__}")
    if not path or "\0" in path:
        raise InvalidPath(f"expected {_KNOWN}, found {path!r}")
    scheme = _SCHEME.match(path)
    if scheme is None and _BROKEN_URL.match(path):
        raise InvalidPath(f"expected {_KNOWN}, found what was a URL before pathlib took a slash away; pass URLs as str")
    if scheme is None or scheme[1].lower() == "file":
        return LocalStore(_expand(path) if scheme is None else _file_path(path), events=events)
    return _open_url(path, scheme[1].lower(), storage_options, events)


def _open_url(url: str, scheme: str, options: Mapping[str, Any], events: Emitter) -> Store:
    if scheme in SCHEMES:
        with _needing("obstore", "object-store", scheme):
            from anyshard.storage.object_store.opening import open_object_store
        return open_object_store(url, options, events=events)
    with _needing("fsspec", "fsspec", scheme):
        from fsspec.registry import known_implementations, registry
    if (inner := scheme.removeprefix(_FSSPEC)) not in {*known_implementations, *registry}:
        raise InvalidPath(f"expected {_KNOWN}, found a URL of the unknown scheme {inner!r}")
    from anyshard.storage.fsspec_store import open_fsspec_store

    return open_fsspec_store(url[len(scheme) - len(inner) :], options, events=events)


@contextmanager
def _needing(package: str, extra: str, scheme: str) -> Iterator[None]:
    """For an import of what only some users install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise InvalidPath(
            f"{scheme}:// needs the package {package}, which is not installed: pip install 'anyshard[{extra}]'"
        ) from error


def _as_store(place: Store) -> Store:
    if not hasattr(place, "create_blob"):
        raise InvalidPath(f"expected {_KNOWN}, found an object of type {type(place).__name__}")
    return place


def _expand(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise InvalidPath(f"expected the name of a user after ~, found {path!r}; write ./~ for a directory of that name")
    try:
        whole = os.path.join(os.getcwd(), expanded)
    except FileNotFoundError as error:
        raise InvalidPath("the current directory was removed: give an absolute path") from error
    if len(os.fsencode(whole)) >= _MAX_PATH_NBYTES:
        raise InvalidPath(f"expected a path of less than {_MAX_PATH_NBYTES} bytes, found {len(os.fsencode(whole))}")
    return whole


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise InvalidPath("expected file:///absolute/path (three slashes; ? and # as %3F and %23), found another file URL")
    return unquote(parts.path)

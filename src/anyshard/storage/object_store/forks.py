"""In which process obstore's runtime lives: the one place that knows.

obstore has one runtime per process, started by the first request. A forked child inherits its memory but not its threads, and
shares what watches its sockets: a request made there hangs, and has killed the parent. So a child of a process that has used
it never touches it: it sends nothing, frees nothing, and reaches the same place through fsspec.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import weakref
from types import MappingProxyType
from typing import Any, Final

from anyshard.errors import StorageError
from anyshard.monitor.events import Emitter
from anyshard.storage.object_store.fork_options import to_fsspec_options
from anyshard.storage.object_store.places import Place, Service
from anyshard.storage.object_store.settings import Settings
from anyshard.storage.protocol import Store

_PACKAGES: Final = MappingProxyType[Service, str]({"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"})
_SCHEMES: Final = MappingProxyType[Service, str]({"s3": "s3", "gcs": "gcs", "azure": "abfs"})
_SPAWN: Final = "multiprocessing.get_context('spawn')"


def is_foreign() -> bool:
    """Whether the runtime belongs to another process, of which this one is a fork."""
    return _owner.cache_info().currsize > 0 and _owner() != os.getpid()


def claim_runtime(name: str, *, file: str) -> None:
    """This process uses the runtime from now on; in a fork of one that does, `StorageError`."""
    owner = _owner()
    if owner != os.getpid():
        raise StorageError(
            f"{name}: expected to be used by process {owner}, which opened it, found process {os.getpid()}, a fork of it. Open "
            f"the place anew in this process, which then goes through fsspec, or start processes by spawn ({_SPAWN})",
            file=file,
        )


@functools.cache
def _owner() -> int:
    """The process that asked first; a forked child inherits the answer."""
    return os.getpid()


def keep_in_forks(holder: object, kept: object) -> weakref.finalize[..., Any]:
    """A forked child never frees `kept`, which `holder` holds: closing its sockets there would take them from the parent."""
    return weakref.finalize(holder, _let_go, kept, os.getpid())


def _let_go(kept: object, owner: int) -> None:
    if os.getpid() != owner:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def open_in_fork(place: Place, settings: Settings, *, events: Emitter) -> Store:
    """The same place through fsspec, for a forked child; `StorageError` if the package for it is missing."""
    package = _PACKAGES[place.service]
    if any(importlib.util.find_spec(name) is None for name in ("fsspec", package)):
        raise StorageError(
            f"{place.url}: this process ({os.getpid()}) is a fork of one that has used object stores (process {_owner()}), where "
            f"only {package} can reach it, found no {package}. Start processes by spawn ({_SPAWN}), or install anyshard[fsspec] "
            f"and {package}",
            file="",
        )
    from anyshard.storage.fsspec_store.opening import open_fsspec_store  # noqa: PLC0415 - fsspec is optional, and needed here only

    url = f"{_SCHEMES[place.service]}://{place.bucket}" + (f"/{place.prefix}" if place.prefix else "")
    return open_fsspec_store(url, to_fsspec_options(place, settings), events=events)

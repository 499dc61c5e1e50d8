"""From a URL and storage options to a store: the only door of this room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyshard.monitor.events import SILENT, Emitter
from anyshard.storage.object_store.client import Client
from anyshard.storage.object_store.forks import is_foreign, open_in_fork
from anyshard.storage.object_store.places import parse_place
from anyshard.storage.object_store.settings import read_settings
from anyshard.storage.object_store.store import ObjectStore
from anyshard.storage.protocol import Store


def open_object_store(url: str, options: Mapping[str, Any], *, events: Emitter = SILENT) -> Store:
    """The store at an s3://, gs:// or az:// URL (see `places.SCHEMES`); nothing is asked of the network yet.

    `options` win over the query of the URL. In a fork of a process that has used object stores it goes through fsspec. Raises
    `InvalidPath` and `InvalidOption`.
    """
    place = parse_place(url)
    settings = read_settings(place, options)
    if is_foreign():
        return open_in_fork(place, settings, events=events)
    return ObjectStore(Client(place, settings), events=events)

"""What a store holds for one step: manifests, files by (generation, attempt), and names that anyshard never makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from anyshard.records.names import SECTION_DIRECTORY, FileKind, parse_name
from anyshard.storage.protocol import Entry, Listing, Store

DATA_PREFIX = "data/"
PARTS_PREFIX = "parts/"


class Owner(NamedTuple):
    """The attempt that made a file, and the generation it aimed at."""

    generation: int
    attempt: str


@dataclass(frozen=True, slots=True)
class StepListing:
    """One look at a step. `files` holds indexes, blobs and temporaries; a temporary belongs to its attempt like any file.

    `directories` are `data/` and the directories of sections below it, as prefixes. `has_parts`: something is below `parts/`,
    which is not looked into (see commit/parts.py).
    """

    manifests: Mapping[int, Entry]
    files: Mapping[Owner, tuple[Entry, ...]]
    foreign: tuple[str, ...]
    directories: tuple[str, ...] = ()
    has_parts: bool = False

    @property
    def newest(self) -> int:
        """The highest generation that has a manifest, 0 if none has."""
        return max(self.manifests, default=0)

    @property
    def is_foreign(self) -> bool:
        """Whether something is there, and nothing of it is ours."""
        return bool(self.foreign) and not (self.manifests or self.files or self.has_parts)

    def unfinished(self, newest: int) -> dict[Owner, tuple[Entry, ...]]:
        """Files of attempts at generations above `newest`: saves that have not been published, alive or dead."""
        return {owner: entries for owner, entries in self.files.items() if owner.generation > newest}

    def claims(self, newest: int) -> tuple[Owner, ...]:
        """Attempts at generations above `newest` whose index is there: each has written all of its files, and may publish."""
        return tuple(owner for owner, entries in self.unfinished(newest).items() if _has_index(entries))

    def entries(self) -> Iterator[tuple[Owner, Entry]]:
        """All files that are not manifests, with their owners."""
        for owner, entries in self.files.items():
            for entry in entries:
                yield owner, entry


def list_step(store: Store) -> StepListing:
    """List the root, `data/` and `data/<section>/`, nothing deeper and through no link."""
    root = store.list("")
    listings, foreign, sections = [root], [one for one in root.prefixes if one not in (DATA_PREFIX, PARTS_PREFIX)], list[str]()
    if DATA_PREFIX in root.prefixes:
        data = store.list(DATA_PREFIX)
        sections = [prefix for prefix in data.prefixes if _is_section(prefix)]
        foreign += sorted(set(data.prefixes) - set(sections))
        listings += [data, *(store.list(prefix) for prefix in sections)]
        foreign += [prefix for listing in listings[2:] for prefix in listing.prefixes]
    directories = (DATA_PREFIX, *sections) if DATA_PREFIX in root.prefixes else ()
    return replace(_sort_entries(listings, foreign), directories=directories, has_parts=PARTS_PREFIX in root.prefixes)


def _has_index(entries: tuple[Entry, ...]) -> bool:
    names = (parse_name(entry.key) for entry in entries)
    return any(name is not None and name.kind is FileKind.INDEX for name in names)


def _is_section(prefix: str) -> bool:
    return SECTION_DIRECTORY.fullmatch(prefix.removeprefix(DATA_PREFIX).removesuffix("/")) is not None


def _sort_entries(listings: list[Listing], foreign: list[str]) -> StepListing:
    manifests: dict[int, Entry] = {}
    files: dict[Owner, list[Entry]] = defaultdict(list)
    for entry in (entry for listing in listings for entry in listing.entries):
        name = parse_name(entry.key)
        if name is None:
            foreign.append(entry.key)
        elif name.attempt is None:
            manifests[name.generation] = entry
        else:
            files[Owner(name.generation, name.attempt)].append(entry)
    return StepListing(manifests, {owner: tuple(entries) for owner, entries in sorted(files.items())}, tuple(sorted(foreign)))

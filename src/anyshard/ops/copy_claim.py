"""The claim of a copy: of several copies of one checkpoint to one place, which would use the same names, the last one goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

from anyshard.commit.listing import DATA_PREFIX, StepListing
from anyshard.errors import AnyshardError, BlobNotFound, CommitConflict, StorageError, StorageStuck
from anyshard.ops.copying import BytesFile, CopyJob, copy_files
from anyshard.records.addresses import section_directory
from anyshard.records.names import blob_name, make_attempt, manifest_name, parse_name
from anyshard.storage.protocol import Store

logger = logging.getLogger(__name__)

_SECTION = "anyshard-copy"
_CONTENT = b"made by a copy that is under way or has died, may be deleted\n"


def claim_prefix() -> str:
    """Where claims are."""
    return f"{DATA_PREFIX}{section_directory(_SECTION)}/"


def remove_claims(store: Store, listing: StepListing, generation: int) -> None:
    """Remove what dead copies left of their claims, once the manifest of this generation is there and so needs none."""
    found = _find_ids((entry.key for _, entry in listing.entries() if entry.key.startswith(claim_prefix())), generation)
    if found:
        store.delete([*(key for one in sorted(found) for key in _keys_of(one, generation)), claim_prefix()])


@final
class Claim:
    """A small blob at the target, with an id of its own, for as long as a copy is under way. It has the name of a lost attempt's.

    Files of a save are named after its attempt, so no two writers ever share a name, and a wrong one can be told from one that is
    being written. Two copies of one checkpoint do share all names: without more, one could take a file that the other is writing
    for a leftover, and remove it when the other has published. So a copy makes its claim, removes those of others, and only then
    looks at files; and it publishes only if its claim is still there once all its files are whole. If it is, whoever removes that
    claim later finds all files whole, and removes none of them. If not, this copy ends here.

    What is left is a copy that is stopped between looking at its claim and removing a file, for as long as another one takes from
    its beginning to its end: no store has a removal with a condition that would prevent that.
    """

    def __init__(self, store: Store, generation: int) -> None:
        self.id = make_attempt()
        self._store = store
        self._generation = generation
        self._key, _ = _keys_of(self.id, generation)

    @contextmanager
    def held(self, job: CopyJob) -> Iterator[None]:
        """Take the place over from other copies; at the end the claim goes, unless the process or the storage does."""
        try:
            self._make(job)
            with self._explaining():
                yield
        except StorageStuck:  # nothing more is asked of it
            raise
        except Exception:
            self._end()
            raise
        self._end()

    def check(self) -> None:
        """Raise `CommitConflict` if another copy has taken over."""
        try:
            self._store.read(self._key, max_nbytes=len(_CONTENT))
        except BlobNotFound as error:
            raise self._lost("has taken over from this one") from error

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """A storage that fails may do so because another copy has taken over, and removes what this one writes."""
        try:
            yield
        except StorageStuck:
            raise
        except StorageError as error:
            try:
                self.check()
            except CommitConflict as conflict:
                raise conflict from error
            except AnyshardError:
                logger.warning("%s: %s could not be read", self._store.url, self._key, exc_info=True)
            raise

    def _make(self, job: CopyJob) -> None:
        before = self._list()
        copy_files(job, [BytesFile(self._key, _CONTENT)])
        others = self._list() - {self.id}
        # Of those that begin at the same moment one gives way, or each might end the other.
        if any(other > self.id for other in others - before):
            raise self._lost("began at the same moment as this one, which gives way to it")
        for other in sorted(others):
            self._store.delete(_keys_of(other, self._generation))

    def _list(self) -> set[str]:
        return _find_ids((entry.key for entry in self._store.list(claim_prefix()).entries), self._generation)

    def _end(self) -> None:
        try:
            self._store.delete((self._key, claim_prefix()))
        except AnyshardError:
            logger.warning("%s: %s could not be removed", self._store.url, self._key, exc_info=True)

    def _lost(self, how: str) -> CommitConflict:
        return CommitConflict(
            f"{self._store.url}: another copy to this place {how}. Nothing was published by this one. Wait "
            "for the other one; if it has ended, copy again, and what is there already will be kept"
        )


def _keys_of(one: str, generation: int) -> tuple[str, str]:
    """The claim with this id, and the temporary that its copy may have made of the manifest."""
    claim = blob_name(section_directory(_SECTION), 0, k=0, generation=generation, attempt=one)
    return claim, f"{manifest_name(generation)}.{one}.tmp"


def _find_ids(keys: Iterable[str], generation: int) -> set[str]:
    names = map(parse_name, keys)
    return {name.attempt for name in names if name and name.attempt and name.generation == generation}

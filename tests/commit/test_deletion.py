"""The one deletion rule as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.commit.deletion import Generations, deletable
from anyshard.commit.listing import Owner, StepListing
from anyshard.commit.resolve import named_files
from anyshard.commit.tombstone import make_fence, make_tombstone
from anyshard.records.manifest import Manifest
from anyshard.records.names import blob_name, index_name, manifest_name, parse_name
from anyshard.storage.protocol import Entry
from tests.commit.steps import ATTEMPTS, make_manifest

A, B, C = ATTEMPTS[:3]
HOUR_S = 3600.0

# Record g was made at second 1000 * g; the look is taken long after the grace of all of them.
LONG_AFTER_S = 100_000.0


def make_listing(*files: tuple[int, str], records: tuple[int, ...], foreign: tuple[str, ...] = ()) -> StepListing:
    owned = {Owner(g, attempt): (Entry(blob(g, attempt), 4096, 0.0),) for g, attempt in files}
    return StepListing({g: Entry(manifest_name(g), 500, 1000.0 * g) for g in records}, owned, foreign)


def make_generations(*manifests: Manifest | None) -> Generations:
    numbered = dict(enumerate(manifests, start=1))
    return Generations(numbered, {g: 1000.0 * g for g in numbered})


def blob(generation: int, attempt: str) -> str:
    return blob_name("model", 0, k=0, generation=generation, attempt=attempt)


FIRST, SECOND, THIRD = make_manifest(1, A), make_manifest(2, B), make_manifest(3, C)

ROWS = {
    "the newest record's own files stay": ([(1, A)], [FIRST], []),
    "a lost attempt at the newest generation goes": ([(1, A), (1, B)], [FIRST], [blob(1, B)]),
    "a save at a later generation is unknown and stays": ([(1, A), (2, B)], [FIRST], []),
    "without any record everything stays": ([(1, A), (1, B)], [], []),
    "a superseded generation goes, its record last": ([(1, A), (2, B)], [FIRST, SECOND], [blob(1, A), manifest_name(1)]),
    "a lost attempt at an old generation goes": ([(1, C), (2, B)], [FIRST, SECOND], [blob(1, C), manifest_name(1)]),
    "old records go oldest first": ([(3, C)], [FIRST, SECOND, THIRD], [manifest_name(1), manifest_name(2)]),
    "a tombstone frees what was there": ([(1, A)], [FIRST, make_tombstone(2, FIRST)], [blob(1, A), manifest_name(1)]),
    "a tombstone itself stays": ([], [make_tombstone(1, None)], []),
    "a fence keeps the files it names": ([(1, A), (2, B)], [FIRST, make_fence(2, FIRST)], [blob(2, B), manifest_name(1)]),
    "what a fenced checkpoint named goes with the next one": (
        [(1, A), (3, C)],
        [FIRST, make_fence(2, FIRST), THIRD],
        [blob(1, A), manifest_name(1), manifest_name(2)],
    ),
    "files under a damaged old record go": ([(1, A), (2, B)], [None, SECOND], [blob(1, A), manifest_name(1)]),
}


@pytest.mark.parametrize("row", ROWS)
def test_long_after_the_grace_exactly_the_useless_files_may_go(row: str) -> None:
    """Each row of the rule, with the files and records there and the keys that may go, in order."""
    files, manifests, expected = ROWS[row]
    generations = make_generations(*manifests)
    listing = make_listing(*files, records=tuple(generations.manifests))
    assert tuple(expected) == deletable(listing, generations, now_s=LONG_AFTER_S, grace_s=HOUR_S)


def make_history(acts: list[str]) -> list[Manifest]:
    """The records of these changes of a step that a save of two sections began."""
    manifests = [make_manifest(1, "a" * 13, sections=("model", "extra"))]
    for generation, act in enumerate(acts, start=2):
        newest, attempt = manifests[-1], ("abcdefghijklmnop"[generation] * 13)
        if act == "save":
            manifests.append(make_manifest(generation, attempt, sections=("model", "extra")))
        elif act == "thin" and newest.index is not None:
            index = replace(newest.index, name=index_name(generation, attempt))
            thin = replace(
                newest, generation=generation, attempt=attempt, index=index, sections=("model",), blobs=newest.blobs[:1]
            )
            manifests.append(thin)
        else:
            manifests.append(make_tombstone(generation, newest) if act == "delete" else make_fence(generation, newest))
    return manifests


@given(st.lists(st.sampled_from(["save", "fence", "thin", "delete"]), max_size=8))
def test_without_a_grace_all_goes_that_the_newest_record_does_not_name(acts: list[str]) -> None:
    """Whatever happened to a step: exactly the files of its newest record, and that record, stay."""
    manifests = make_history(acts)
    keys = {key for manifest in manifests for key in named_files(manifest)}
    owned: dict[Owner, tuple[Entry, ...]] = {}
    for key in sorted(keys):
        name = parse_name(key)
        assert name is not None
        owner = Owner(name.generation, name.attempt or "")
        owned[owner] = (*owned.get(owner, ()), Entry(key, 4096, 0.0))
    records = tuple(manifest.generation for manifest in manifests)
    listing = replace(make_listing(records=records), files=owned)
    gone = deletable(listing, make_generations(*manifests), now_s=LONG_AFTER_S, grace_s=0)
    expected = (keys - set(named_files(manifests[-1]))) | {manifest_name(generation) for generation in records[:-1]}
    assert (expected, len(expected)) == (set(gone), len(gone))


@pytest.mark.parametrize(("age_s", "expected"), [(HOUR_S - 1, ()), (HOUR_S, (blob(1, A), manifest_name(1)))])
def test_the_grace_counts_from_the_record_that_superseded(age_s: float, expected: tuple[str, ...]) -> None:
    """A superseded file stays until the grace since the next record, and not a second longer."""
    listing = make_listing((1, A), (2, B), records=(1, 2))
    assert expected == deletable(listing, make_generations(FIRST, SECOND), now_s=2000.0 + age_s, grace_s=HOUR_S)


def test_the_grace_of_a_fenced_checkpoint_counts_from_its_real_successor() -> None:
    """A fence names the old files again, so their grace starts with the record after the fence."""
    listing = make_listing((1, A), (3, C), records=(1, 2, 3))
    generations = make_generations(FIRST, make_fence(2, FIRST), THIRD)
    assert (manifest_name(1),) == deletable(listing, generations, now_s=2000.0 + HOUR_S, grace_s=HOUR_S)


def test_a_damaged_old_record_may_name_every_file_that_is_not_younger() -> None:
    """The grace of a file under a damaged record starts with the record after it."""
    listing = make_listing((1, A), (3, C), records=(1, 2, 3))
    generations = make_generations(FIRST, None, THIRD)
    assert blob(1, A) not in deletable(listing, generations, now_s=2000.0 + HOUR_S, grace_s=HOUR_S)


def test_temporaries_and_indexes_follow_their_attempt() -> None:
    """A temporary of the published attempt stays, one of a lost attempt goes."""
    entries = {
        Owner(1, attempt): (Entry(index_name(1, attempt), 5, 0.0), Entry(f"manifest-1.json.{attempt}.tmp", 5, 0.0))
        for attempt in (A, B)
    }
    listing = replace(make_listing(records=(1,)), files=entries)
    expected = (index_name(1, B), f"manifest-1.json.{B}.tmp")
    assert expected == deletable(listing, make_generations(FIRST), now_s=LONG_AFTER_S, grace_s=HOUR_S)


def test_foreign_names_are_never_deletable() -> None:
    """A name that anyshard never makes is in no answer of the rule, even without any grace."""
    listing = make_listing((1, A), (2, B), records=(1, 2), foreign=("notes.txt", "data/train.csv"))
    keys = deletable(listing, make_generations(FIRST, SECOND), now_s=LONG_AFTER_S, grace_s=0)
    assert (blob(1, A), manifest_name(1)) == keys

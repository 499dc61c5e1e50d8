"""Probes of a store: what they find out, under which names, and that nothing is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyshard.commit.attempt import begin
from anyshard.commit.deletion import read_generations
from anyshard.commit.listing import list_step
from anyshard.commit.probe import Ground, KeyProbe, make_probe_id, name_probe_blob, survey_ground
from anyshard.commit.tombstone import delete_step
from anyshard.errors import BlobNotFound, NotACheckpoint, StorageError
from anyshard.ops.clean import clean
from anyshard.records.names import ATTEMPT, MAX_GENERATION, manifest_name, parse_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Listing
from anyshard.storage.wrappers import Action, FaultStore, Rule, Verb, answer, fail, flip_bit
from tests.commit.steps import save


def make_probe(store: FaultStore | MemoryStore | LocalStore) -> KeyProbe:
    return KeyProbe(store, generation=1, attempt=make_probe_id())


def test_a_good_store() -> None:
    """The key is there between `create` and `remove`, and seen by who knows its attempt."""
    store = MemoryStore()
    probe = make_probe(store)
    probe.create()
    other = KeyProbe(store, generation=1, attempt=probe.attempt)
    assert (1, True) == (len(store.snapshot()), other.is_seen(0))
    probe.remove()
    assert ({}, False) == (store.snapshot(), other.is_seen(0))


def test_a_key_that_shows_late() -> None:
    """A mount that has cached that there is nothing is given some time."""
    store = FaultStore(MemoryStore(), [Rule(Verb.READ, "*", fail(BlobNotFound("cached", file="index")), nth=1)])
    probe = make_probe(store)
    KeyProbe(store.inner, generation=1, attempt=probe.attempt).create()
    assert (True, 1) == (probe.is_seen(30), len(store.fired))


# What goes wrong, and what the error says of it.
FAULTS: dict[str, tuple[Verb, int, Action, str]] = {
    "ignores the condition": (Verb.CREATE, 2, answer(None), "create-if-absent to refuse a key that is there"),
    "loses bits": (Verb.READ, 1, flip_bit(9), "to read back what was written, after it was created"),
    "replaces": (Verb.READ, 2, answer(b"other"), "after another create of it was refused, found 5 other bytes"),
    "does not list": (Verb.LIST, 1, answer(Listing((), ())), "to list the new key"),
    "does not delete": (Verb.DELETE, 1, answer(None), "to find the key gone after it was deleted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_store(fault: str) -> None:
    """What a store does wrong is told as such, with the key."""
    verb, nth, action, message = FAULTS[fault]
    store = FaultStore(MemoryStore(), [Rule(verb, "*", action, nth=nth)])
    probe = make_probe(store)
    with pytest.raises(StorageError, match=f"index-1-{probe.attempt}.parquet: expected .*{message}"):
        probe.create()
        probe.remove()
    assert 1 == len(store.fired)


def test_names_are_those_of_dead_attempts() -> None:
    """What is left of a probe can be told by its name, and is no more foreign than an attempt that died."""
    attempt = make_probe_id()
    blob = parse_name(name_probe_blob(7, generation=3, attempt=attempt))
    assert blob is not None
    assert (3, attempt, "anyshard-probe", 7, 0) == (blob.generation, blob.attempt, blob.section, blob.rank, blob.k)
    assert ATTEMPT.fullmatch(attempt)
    assert attempt.startswith("probe")


def test_leftovers_stand_in_nobodys_way(tmp_path: Path) -> None:
    """After a rehearsal that was killed a save begins as ever, and a clean removes what is left."""
    store = LocalStore(tmp_path)
    probe = make_probe(store)
    store.prepare(["data/anyshard-probe/"])
    probe.create()
    (tmp_path / name_probe_blob(0, generation=1, attempt=probe.attempt)).write_bytes(b"half")
    assert (False, (), False) == (list_step(store).is_foreign, list_step(store).foreign, bool(read_generations(store)[1].newest))
    assert 1 == begin(store, sections=("model",), overwrite=False).generation
    assert 2 == len(clean(tmp_path, older_than_s=0).removed)
    assert ["manifest-1.json"] == [path.name for path in tmp_path.rglob("*") if path.is_file()]


# The ground ------------------------------------------------------------------------------------------------------------


def test_new_ground(tmp_path: Path) -> None:
    """Nothing is made by looking; directories that saves need are missing."""
    directories = ("data/", "data/model/", "data/anyshard-probe/")
    assert Ground(1, directories, ()) == survey_ground(LocalStore(tmp_path / "a"), sections=("model",), is_step=True)
    assert [] == list(tmp_path.iterdir())


def test_ground_with_a_checkpoint() -> None:
    """A committed step is warned of and the next generation aimed at; after its deletion there is nothing to warn of."""
    store = MemoryStore()
    save(store)
    found = survey_ground(store, sections=("model",), is_step=True)
    assert (2, ("data/anyshard-probe/",)) == (found.generation, found.directories)
    assert ("memory:: a checkpoint is there (step 100): a save to this very place needs overwrite=True",) == found.warnings
    delete_step(store)
    assert () == survey_ground(store, sections=("model",), is_step=True).warnings


def test_ground_with_a_damaged_checkpoint() -> None:
    """It is warned of too."""
    found = survey_ground(MemoryStore({manifest_name(4): b"{}"}), sections=(), is_step=True)
    assert (5, True) == (found.generation, "a damaged checkpoint is there" in found.warnings[0])


def test_the_last_generation() -> None:
    """There is no next one."""
    with pytest.raises(ValueError, match="is the last one"):
        survey_ground(MemoryStore({manifest_name(MAX_GENERATION): b"{}"}), sections=(), is_step=True)


def test_foreign_ground() -> None:
    """A directory of another program is refused if it is named like a step, and else warned of: it may be that of a run."""
    store = MemoryStore({".metadata": b"", "__0_0.distcp": b""})
    with pytest.raises(NotACheckpoint, match=r"found '.metadata', '__0_0.distcp'; it looks like a PyTorch DCP checkpoint"):
        survey_ground(store, sections=(), is_step=True)
    (warning,) = survey_ground(store, sections=(), is_step=False).warnings
    assert "memory: holds '.metadata', '__0_0.distcp', which anyshard did not write: save to new directories below it" in warning


@pytest.mark.parametrize("is_step", [True, False])
def test_the_ground_of_a_run(is_step: bool) -> None:
    """A directory with steps in it is that of a run, whatever it is called."""
    store = MemoryStore({"step_1/manifest-1.json": b"", "log.txt": b""})
    assert () == survey_ground(store, sections=(), is_step=is_step).warnings

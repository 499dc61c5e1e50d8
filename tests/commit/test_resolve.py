from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from anyshard.commit.listing import list_step
from anyshard.commit.resolve import LOOKS, PENDING_S, check_complete, resolve
from anyshard.commit.tombstone import delete_step
from anyshard.errors import BlobNotFound, CheckpointDamaged, CheckpointNotFound, CheckpointReplaced, NotACheckpoint, StorageError
from anyshard.ops.clean import clean
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import encode_manifest
from anyshard.records.names import manifest_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Listing
from anyshard.storage.wrappers import FaultStore, Rule, Verb, WrapperStore
from anyshard.storage.wrappers.faults import fail
from tests.commit.steps import ATTEMPTS, INDEX, Clock, make_manifest, run_until, save, save_slowly

A, B = ATTEMPTS[:2]


class LaggingStore(WrapperStore):
    """A store whose listing does not show manifests yet."""

    def list(self, prefix: str) -> Listing:
        listing = super().list(prefix)
        return Listing(tuple(entry for entry in listing.entries if "manifest" not in entry.key), listing.prefixes)


def put(store: MemoryStore, key: str, data: bytes = b"x") -> None:
    store.create(key, data, token=A)


def test_the_highest_generation_counts() -> None:
    """After an overwrite the second generation is resolved, with the digest of its bytes."""
    store = MemoryStore()
    save(store)
    second = save(store, overwrite=True)
    assert (second, digest_bytes(encode_manifest(second))) == (resolve(store).manifest, resolve(store).digest)


def test_a_damaged_newest_record_is_an_error() -> None:
    """A damaged highest generation never falls back to the one before, however young it is."""
    store = MemoryStore()
    save(store)
    put(store, manifest_name(2), encode_manifest(make_manifest(2, B)).replace(b"model", b"medal"))
    with pytest.raises(CheckpointDamaged, match=r"manifest-2\.json"):
        resolve(store)


def torn_steps() -> tuple[MemoryStore, Clock]:
    """A committed generation 1, and after it two records whose writers died half-way."""
    clock = Clock()
    store = MemoryStore(clock=clock.read)
    save(store)
    put(store, manifest_name(2), b"")
    put(store, manifest_name(3), encode_manifest(make_manifest(3, B))[:-7])
    return store, clock


@pytest.mark.parametrize("nbytes", [0, 1, 100, -43, -42, -41, -1])
def test_a_young_torn_record_is_still_being_written(nbytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """However little of the newest record is there, the one before it counts for ten minutes, and the log says so."""
    clock = Clock()
    store = MemoryStore(clock=clock.read)
    first = save(store)
    put(store, manifest_name(2), encode_manifest(make_manifest(2, B))[:nbytes])
    clock.sleep(PENDING_S - 1)
    assert first == resolve(store).manifest
    assert ["memory:: generation 2 is being committed; 1 counts"] == caplog.messages


def test_several_torn_records_are_passed_over() -> None:
    """The newest whole record counts while all torn ones above it are young, also where the listing lags."""
    store, _ = torn_steps()
    assert (1, 1) == (resolve(store).manifest.generation, resolve(LaggingStore(store)).manifest.generation)


def test_an_old_torn_record_is_damage() -> None:
    """Its writer is dead: the error says how to replace it, and doing so works."""
    store, clock = torn_steps()
    clock.sleep(PENDING_S)
    with pytest.raises(CheckpointDamaged, match=r"manifest-3\.json.*600 s ago.*overwrite=True") as caught:
        resolve(store)
    assert "manifest-3.json" == caught.value.file
    assert 4 == save(store, overwrite=True).generation


def test_a_torn_record_that_is_alone_is_damage() -> None:
    """Without a generation before it there is nothing to read."""
    store = MemoryStore({manifest_name(1): b"{"})
    with pytest.raises(CheckpointDamaged, match="wait for it"):
        resolve(store)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_something_else_under_the_name_of_a_record(make: Callable[[Path], None], number: int, tmp_path: Path) -> None:
    """Whatever is no file and in the way of a record stops every verb, which says to move it away; then all is as before."""
    store, path = LocalStore(tmp_path / "step"), tmp_path / "step" / manifest_name(number)
    if number == 2:
        save(store)
    path.parent.mkdir(exist_ok=True)
    make(path)
    verbs = (resolve, lambda store: save(store, overwrite=True), clean, delete_step)
    for verb in verbs:
        with pytest.raises(StorageError, match=rf"{path.name}: is a .*, not a regular file\. .*move it away"):
            verb(store)
    path.rename(tmp_path / "away")
    assert number == save(store, overwrite=True).generation


def test_a_renamed_record_is_damage() -> None:
    """The record of one generation under the name of another is refused."""
    store = MemoryStore()
    put(store, manifest_name(3), encode_manifest(make_manifest(2, B)))
    with pytest.raises(CheckpointDamaged, match=r"manifest-3\.json"):
        resolve(store)


def test_records_that_the_listing_does_not_show_yet_are_found() -> None:
    """Generations are asked for by name until one is absent."""
    store = MemoryStore()
    save(store)
    save(store, overwrite=True)
    assert 2 == resolve(LaggingStore(store)).manifest.generation


@pytest.mark.parametrize("times", [1, LOOKS - 1])
def test_a_record_that_goes_away_while_it_is_looked_at_is_looked_for_again(times: int) -> None:
    """A record that was listed and cannot be read was replaced or removed meanwhile, so a new look decides."""
    inner = MemoryStore()
    manifest = save(inner)
    gone = Rule(Verb.READ, "manifest-1.json", fail(BlobNotFound("gone", file="manifest-1.json")), times=times)
    assert manifest == resolve(FaultStore(inner, [gone])).manifest


def test_a_record_that_keeps_going_away_is_named() -> None:
    """After a few looks it is an error that others replace it faster than it can be read."""
    inner = MemoryStore()
    save(inner)
    gone = Rule(Verb.READ, "manifest-1.json", fail(BlobNotFound("gone", file="manifest-1.json")), times=1000)
    with pytest.raises(CheckpointReplaced, match=r"manifest-1\.json was removed"):
        resolve(FaultStore(inner, [gone]))


def test_an_empty_place_has_no_checkpoint() -> None:
    """A place without anything says so."""
    with pytest.raises(CheckpointNotFound, match="nor anything else"):
        resolve(MemoryStore())


def test_an_unfinished_save_is_recognised() -> None:
    """A place with leftovers only names the attempt and its age."""
    store = MemoryStore()
    run_until(save_slowly(store), "index")
    attempt = next(iter(list_step(store).files)).attempt
    with pytest.raises(CheckpointNotFound, match=rf"unfinished save \(attempt {attempt}, last written \d+ s ago\)"):
        resolve(store)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ((".metadata", "__0_0.distcp"), "PyTorch DCP"),
        (("config.json", "model-00001-of-00002.safetensors"), "Hugging Face"),
        (("zero_to_fp32.py", "latest"), "DeepSpeed"),
        (("latest_checkpointed_iteration.txt",), "Megatron"),
        (("_CHECKPOINT_METADATA",), "Orbax"),
        (("model.pt",), r"torch\.load"),
        (("step_100/manifest-1.json",), "path of one step"),
        (("notes.txt",), r"directory that anyshard\.save made"),
        (("data/train.csv", "data/Train/0.bin", "data/model/0.0-1-a.bin"), "data/train.csv"),
    ],
)
def test_foreign_directories_are_refused_with_advice(names: tuple[str, ...], advice: str) -> None:
    """A directory of another program is not a checkpoint, and the error says what it looks like."""
    store = MemoryStore()
    for name in names:
        put(store, name)
    with pytest.raises(NotACheckpoint, match=advice):
        resolve(store)


def test_foreign_names_beside_a_checkpoint_do_not_matter() -> None:
    """A checkpoint with a stranger's file beside it resolves and lists that file as foreign."""
    store = MemoryStore()
    manifest = save(store)
    put(store, "data/model/notes.txt")
    assert (manifest, ("data/model/notes.txt",)) == (resolve(store).manifest, resolve(store).listing.foreign)


@pytest.mark.parametrize("which", ["index", "blob"])
def test_a_copy_that_lacks_a_file_is_incomplete(which: str) -> None:
    """A missing index or blob is named, with its length (B143: complete means the same everywhere)."""
    store = MemoryStore()
    manifest = save(store)
    check_complete(store, manifest, list_step(store))
    assert manifest.index is not None
    name = manifest.index.name if which == "index" else manifest.blobs[0].name
    store.delete([name])
    with pytest.raises(CheckpointDamaged, match=rf"incomplete copy.*{name}: expected \d+ bytes, found nothing"):
        check_complete(store, manifest, list_step(store))


def test_a_file_of_another_length_is_incomplete() -> None:
    """A file that was cut while it was copied is named with both lengths."""
    store = MemoryStore()
    manifest = save(store)
    assert manifest.index is not None
    store.delete([manifest.index.name])
    put(store, manifest.index.name, b"in")
    with pytest.raises(CheckpointDamaged, match=f"expected {len(INDEX)} bytes, found 2"):
        check_complete(store, manifest, list_step(store))


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A blob that lies behind a link does not count as there."""
    store = LocalStore(tmp_path / "step")
    manifest = save(store)
    blob = tmp_path / "step" / manifest.blobs[0].name
    blob.rename(tmp_path / "elsewhere.bin")
    blob.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(CheckpointDamaged, match="found nothing"):
        check_complete(store, manifest, list_step(store))

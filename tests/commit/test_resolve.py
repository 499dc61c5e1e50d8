from __future__ import annotations

from pathlib import Path

import pytest

from anyshard.commit.listing import list_step
from anyshard.commit.resolve import check_complete, resolve
from anyshard.errors import BlobNotFound, CheckpointDamaged, CheckpointNotFound, CheckpointReplaced, NotACheckpoint
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import encode_manifest
from anyshard.records.names import manifest_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Listing
from anyshard.storage.wrappers import FaultStore, Rule, Verb, WrapperStore
from anyshard.storage.wrappers.faults import fail
from tests.commit.steps import ATTEMPTS, make_manifest, run_until, save, save_slowly

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
    """A damaged highest generation never falls back to the one before."""
    store = MemoryStore()
    save(store)
    put(store, manifest_name(2), encode_manifest(make_manifest(2, B))[:-7])
    with pytest.raises(CheckpointDamaged, match=r"manifest-2\.json"):
        resolve(store)


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


def test_a_record_that_goes_away_while_it_is_looked_at_is_named() -> None:
    """A record that was listed and cannot be read any more was replaced or removed meanwhile."""
    inner = MemoryStore()
    save(inner)
    gone = Rule(Verb.READ, "manifest-1.json", fail(BlobNotFound("gone", file="manifest-1.json")))
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
    with pytest.raises(CheckpointDamaged, match="expected 5 bytes, found 2"):
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

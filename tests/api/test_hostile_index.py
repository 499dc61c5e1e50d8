"""A checkpoint whose records contradict each other, although every digest is right, is damaged: never a foreign error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import anyshard
from anyshard.records.digests import digest_bytes
from anyshard.records.index import decode_index, encode_index
from anyshard.records.manifest import Manifest, decode_manifest, encode_manifest
from anyshard.records.tables import Index, ShardTable, TensorTable
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, Verb


def state() -> dict[str, dict[str, torch.Tensor]]:
    return {"a": {"w": torch.ones(100)}, "b": {"u": torch.ones(4)}}


def forge(edit: Callable[[Index], Index], sign: Callable[[Manifest], Manifest] = lambda manifest: manifest) -> MemoryStore:
    """A checkpoint of `state` with another index and manifest, signed anew."""
    store = MemoryStore()
    anyshard.save(store, state())
    files = store.snapshot()
    manifest = decode_manifest(files["manifest-1.json"], file="manifest-1.json")
    assert manifest.index is not None
    name = manifest.index.name
    data = encode_index(edit(decode_index(files[name], max_rows=9, file=name)))
    entry = replace(manifest.index, nbytes=len(data), digest=digest_bytes(data))
    record = encode_manifest(sign(replace(manifest, index=entry)))
    return MemoryStore({**files, name: data, "manifest-1.json": record})


def with_tensors(index: Index, tensors: TensorTable) -> Index:
    return replace(index, shards=replace(index.shards, tensors=tensors))


def grow(index: Index) -> Index:
    """The first tensor is said to have 2^40 elements."""
    shapes, lengths = index.shards.tensors.shapes.copy(), index.shards.lengths.copy()
    shapes[0], lengths[0] = 2**40, 2**40
    return replace(index, shards=replace(index.shards, tensors=replace(index.shards.tensors, shapes=shapes), lengths=lengths))


def grow_elsewhere(index: Index) -> Index:
    """As `grow`, but said to lie in a blob of the other section."""
    return replace(grow(index), blob=np.array([1, 1]), slot=np.array([7, 0]))


def move_out(index: Index) -> Index:
    """The second tensor is in a section that the manifest lacks."""
    return with_tensors(index, replace(index.shards.tensors, addresses=("a/w", "zz/u")))


def name_like_a_section(index: Index) -> Index:
    """The second address begins with the name of a section, and is in none."""
    return with_tensors(index, replace(index.shards.tensors, addresses=("a/w", "bb/u")))


def drop(index: Index) -> Index:
    """The first tensor is not listed, although the values of its section name it."""
    old = index.shards
    tensors = TensorTable(
        old.tensors.addresses[1:], old.tensors.dtypes[1:], old.tensors.ndims[1:], old.tensors.shapes[1:], old.tensors.alias_of[1:]
    )
    return Index(ShardTable(tensors, np.array([0]), old.offsets[1:], old.lengths[1:]), index.blob[1:], index.slot[1:])


FORGED = (grow, grow_elsewhere, move_out, name_like_a_section, drop)


@pytest.mark.parametrize("edit", FORGED)
def test_opened(edit: Callable[[Index], Index]) -> None:
    """Reading a tensor through `open` says that the checkpoint is damaged, and allocates nothing of a claimed size."""
    store = forge(edit)
    with pytest.raises(anyshard.CheckpointDamaged):
        anyshard.open(store)["a/w"].numpy()
    with pytest.raises(anyshard.CheckpointDamaged):
        anyshard.open(store).values("a")


@pytest.mark.parametrize("edit", FORGED)
def test_loaded(edit: Callable[[Index], Index]) -> None:
    """Loading says that the checkpoint is damaged before a tensor changes."""
    live = {"a": {"w": torch.zeros(100)}, "b": {"u": torch.zeros(4)}}
    with pytest.raises(anyshard.CheckpointDamaged):
        anyshard.load(forge(edit), live)
    assert 0 == live["a"]["w"].sum() + live["b"]["u"].sum()


def test_index_of_another_length() -> None:
    """The manifest's length of the index counts, even if the digest is right."""

    def lengthen(manifest: Manifest) -> Manifest:
        assert manifest.index is not None
        return replace(manifest, index=replace(manifest.index, nbytes=manifest.index.nbytes + 1))

    with pytest.raises(anyshard.CheckpointDamaged, match=r"index-1-.*expected \d+ bytes, found"):
        anyshard.open(forge(lambda index: index, lengthen))


def test_section_with_a_slash_in_its_name() -> None:
    """Sections are compared by their names, addresses hold them escaped."""
    store = MemoryStore()
    anyshard.save(store, {"a/b": {"w": torch.ones(2), "n": 3}, "a": {"x": torch.ones(1)}, "a~": 4})
    checkpoint = anyshard.open(store)
    assert (2.0, 3, 4) == (checkpoint["a~1b/w"].numpy().sum(), checkpoint["a~1b/n"], checkpoint["a~0"])


def test_index_of_any_length() -> None:
    """A manifest that claims an index of 1 PiB is damaged before the file is read."""

    def lengthen(manifest: Manifest) -> Manifest:
        assert manifest.index is not None
        return replace(manifest, index=replace(manifest.index, nbytes=1 << 50))

    store = CountingStore(forge(lambda index: index, lengthen))
    with pytest.raises(anyshard.CheckpointDamaged, match=r"index-1-.*expected an index of at most \d+ bytes"):
        anyshard.open(store)
    assert store.count(Verb.READ).nbytes < 1000  # manifests only

"""Indexes without some of their sections, and what is said about those that are gone."""

from __future__ import annotations

import numpy as np
import pytest

from anyshard.errors import InvalidOption
from anyshard.records.index import decode_index, encode_index
from anyshard.records.manifest import BlobEntry, Thinned
from anyshard.records.names import blob_name
from anyshard.records.tables import NO_BLOB, Index, ShardTable, make_tensor_table, whole_shards
from anyshard.records.thinner import explain_gone, select_blobs, select_sections
from tests.records.samples import ATTEMPT, make_manifest

ADDRESSES = ["ema/w", "model/a", "model/b", "model/empty", "model/tied", "optimizer/m", "optimizer/tied"]
SHAPES = [(4,), (4,), (2, 3), (0, 5), (4,), (7,), (7,)]
TIES = {"model/tied": "model/a", "optimizer/tied": "optimizer/m"}
SECTIONS = ("ema", "model", "model", "optimizer")  # of the blobs


def make_index(ties: dict[str, str] = TIES) -> Index:
    shards = whole_shards(make_tensor_table(ADDRESSES, ["float32"] * 7, SHAPES, ties))
    blobs = {"ema/w": 0, "model/a": 1, "model/b": 2, "model/tied": 2, "optimizer/m": 3, "optimizer/tied": 3}
    blob = np.array([blobs.get(shards.tensors.addresses[row], NO_BLOB) for row in shards.tensor])
    return Index(shards, blob, np.where(blob == NO_BLOB, NO_BLOB, np.arange(len(blob))))


def make_blobs() -> tuple[BlobEntry, ...]:
    names = [blob_name(section, 0, k=k, generation=1, attempt=ATTEMPT) for k, section in enumerate(SECTIONS)]
    return tuple(BlobEntry(name, section, 0, 8192, 4096, "") for name, section in zip(names, SECTIONS, strict=True))


def describe(index: Index) -> list[tuple[object, ...]]:
    """Address, shape, region, blob and slot of each shard, and the ties."""
    shards: ShardTable = index.shards
    tensors = shards.tensors
    rows = [
        (tensors.addresses[t], tensors.shape(t), shards.region(row), int(index.blob[row]), int(index.slot[row]))
        for row, t in enumerate(shards.tensor.tolist())
    ]
    return [*rows, *((a, tensors.addresses[to]) for a, to in zip(tensors.addresses, tensors.alias_of, strict=True) if to >= 0)]


@pytest.mark.parametrize("sections", [("model",), ("ema", "optimizer"), ("model", "optimizer"), ("ema", "model", "optimizer")])
def test_rows_of_the_kept_sections_stay_as_they_are(sections: tuple[str, ...]) -> None:
    """Only the positions of their blobs change, and the table that is written reads the same."""
    index, blobs = make_index(), make_blobs()
    left, positions = select_blobs(blobs, sections)
    found = select_sections(index, sections, positions)
    expected = [row for row in describe(index) if str(row[0]).split("/")[0] in sections]
    numbers = {old: left.index(blob) for old, blob in enumerate(blobs) if blob in left} | {NO_BLOB: NO_BLOB}
    assert [row if len(row) == 2 else (*row[:3], numbers[row[3]], row[4]) for row in expected] == describe(found)  # type: ignore[index]
    again = decode_index(encode_index(found), max_rows=found.num_rows, file="index")
    assert describe(found) == describe(again)


def test_a_tie_to_what_goes_is_refused() -> None:
    """What is kept must be stored in what is kept; the message names both."""
    index = make_index({"model/a": "ema/w", "model/tied": "ema/w"})
    _, positions = select_blobs(make_blobs(), ("model",))
    with pytest.raises(InvalidOption, match="model/a is stored as ema/w .and 1 more like it.; keep section 'ema' too"):
        select_sections(index, ("model",), positions)


def test_what_is_gone_is_said_with_its_time() -> None:
    """Only sections that were there once are gone, and only of a thinned checkpoint."""
    manifest = make_manifest(thinned=Thinned(ATTEMPT, ("optimizer", "ema"), "2026-01-03T00:00:00Z"))
    said = "It was thinned to model: optimizer, ema are gone since 2026-01-03T00:00:00Z. Load without, or load another step"
    assert said == explain_gone(manifest, ("model", "optimizer", "ema", "other"))
    assert "optimizer is gone" in explain_gone(manifest, ("optimizer",))
    assert ["", ""] == [explain_gone(manifest, ("model", "other")), explain_gone(make_manifest(), ("optimizer",))]

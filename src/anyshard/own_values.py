"""What each rank has of its own, as ranks with the same key compare it: every value and every byte of its tensors."""

from __future__ import annotations

import xxhash

from anyshard.engine.samples import digest_source
from anyshard.records.captured import Captured
from anyshard.records.handles import Source
from anyshard.records.tables import NOT_AN_ALIAS, TensorTable
from anyshard.records.value_parts import DIGEST_NBYTES, PartList, canonical_bytes, list_own_parts
from anyshard.records.values import TensorMark, ValueRegistry, map_marks


def digest_own_values(captured: Captured, *, registry: ValueRegistry, has_bytes: bool) -> PartList:
    """The per-rank values of a rank as parts, whose digests are equal for equal values, whichever rank has them.

    With `has_bytes` the bytes of their tensors count; else no tensor is read.
    """
    shards, parts = captured.shards, captured.per_rank.items()
    sources = dict(zip(shards.tensor.tolist(), captured.sources, strict=True)) if has_bytes else {}
    return list_own_parts(
        {address: (part.key, _digest(part.tree, shards.tensors, sources, registry=registry)) for address, part in parts}
    )


def name_own_values(captured: Captured) -> PartList:
    """The same parts without digests, for a rank whose keys no other has."""
    return list_own_parts({address: (part.key, bytes(DIGEST_NBYTES)) for address, part in captured.per_rank.items()})


def _digest(tree: object, tensors: TensorTable, sources: dict[int, Source], *, registry: ValueRegistry) -> bytes:
    def describe(mark: TensorMark) -> object:
        # Not by its address, which ends in the rank.
        row = tensors.rows[mark.address]
        stored = row if tensors.alias_of[row] == NOT_AN_ALIAS else int(tensors.alias_of[row])
        digest = digest_source(sources[stored]) if sources else b""
        return (mark.kind, tensors.dtypes[row], tensors.shape(row), digest)

    return xxhash.xxh3_64_digest(canonical_bytes(map_marks(tree, describe), registry=registry))

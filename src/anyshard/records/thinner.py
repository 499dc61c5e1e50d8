"""The index of a checkpoint without some of its sections, over the blobs that are left; and what is gone, in words. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from anyshard.errors import InvalidOption
from anyshard.records.addresses import section_of, show
from anyshard.records.manifest import BlobEntry, Manifest
from anyshard.records.tables import NO_BLOB, NOT_AN_ALIAS, Index, IntColumn, ShardTable, TensorTable

_SHOWN = 3


def select_blobs(blobs: Sequence[BlobEntry], sections: Collection[str]) -> tuple[tuple[BlobEntry, ...], IntColumn]:
    """The blobs of these sections, and for each of all blobs its position among them, `NO_BLOB` if it is not."""
    kept = [position for position, blob in enumerate(blobs) if blob.section in sections]
    positions = np.full(len(blobs), NO_BLOB, dtype=np.int64)
    positions[kept] = np.arange(len(kept))
    return tuple(blobs[position] for position in kept), positions


def select_sections(index: Index, sections: Collection[str], positions: IntColumn) -> Index:
    """The rows of the tensors in these sections, in their order; `positions` are those of `select_blobs`.

    Raises `InvalidOption` if one of them is tied to a tensor that is not.
    """
    shards, tensors = index.shards, index.shards.tensors
    is_kept = np.array([section_of(address) in sections for address in tensors.addresses], dtype=bool)
    _refuse_ties(tensors, is_kept)
    rows = np.flatnonzero(is_kept[shards.tensor])
    number = np.cumsum(is_kept) - 1
    of_kept = ShardTable(_select(tensors, is_kept), number[shards.tensor[rows]], shards.offsets[rows], shards.lengths[rows])
    blob = index.blob[rows]
    return Index(of_kept, np.where(blob == NO_BLOB, NO_BLOB, positions[blob]), index.slot[rows])


def explain_gone(manifest: Manifest, sections: Collection[str]) -> str:
    """One sentence on which of `sections` a thinned checkpoint has no more, and since when; empty if it never had any of them."""
    thinned = manifest.thinned
    gone = () if thinned is None else tuple(section for section in thinned.dropped if section in sections)
    if thinned is None or not gone:
        return ""
    is_or_are = "is" if len(gone) == 1 else "are"
    return (
        f"It was thinned to {_list_names(manifest.sections)}: {_list_names(gone)} {is_or_are} gone since {thinned.time}. "
        "Load without, or load another step"
    )


def _select(tensors: TensorTable, is_kept: np.ndarray) -> TensorTable:
    rows = np.flatnonzero(is_kept)
    number = np.cumsum(is_kept) - 1
    alias_of = tensors.alias_of[rows]
    return TensorTable(
        addresses=tuple(tensors.addresses[row] for row in rows.tolist()),
        dtypes=tuple(tensors.dtypes[row] for row in rows.tolist()),
        ndims=tensors.ndims[rows],
        shapes=tensors.shapes[rows],
        alias_of=np.where(alias_of == NOT_AN_ALIAS, NOT_AN_ALIAS, number[alias_of]),
    )


def _refuse_ties(tensors: TensorTable, is_kept: np.ndarray) -> None:
    torn = np.flatnonzero(is_kept & (tensors.alias_of != NOT_AN_ALIAS) & ~is_kept[tensors.alias_of])
    if len(torn):
        first = int(torn[0])
        address, stored = (show(tensors.addresses[row]) for row in (first, int(tensors.alias_of[first])))
        more = f" (and {len(torn) - 1} more like it)" if len(torn) > 1 else ""
        raise InvalidOption(
            f"sections: expected with what is kept all that it is tied to, found that {address} is stored as {stored}{more}; "
            f"keep section {show(section_of(stored))!r} too"
        )


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(show(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"

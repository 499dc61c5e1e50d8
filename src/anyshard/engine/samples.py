"""Samples: digests by which ranks see whether they hold the same bytes, without reading all of them.

A long region is read in 64 cells, one at a pseudo-random place in each of 64 equal stretches. The places follow from the seed,
the address and the region alone, so every rank reads the same ones, and others under another seed. Each region is read once, for
one digest of its own; those of sets and tensors are made from these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import Source
from anyshard.records.rank_table import RankTable
from anyshard.records.replica_digests import BUFFER_DIGEST_NBYTES, SetDigest
from anyshard.records.tables import IntColumn, ShardTable

_NUM_CELLS = 64
_CELL_NBYTES = 4096  # a multiple of the size of any element
_SHORT_NBYTES = _NUM_CELLS * _CELL_NBYTES  # what the cells would cover is read in full
_PIECE_NBYTES = 1 << 20
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


@dataclass(frozen=True, slots=True)
class Sampling:
    """What is read: all bytes (`in_full`), or of long regions cells whose places the seed chooses (0 <= seed < 2^64)."""

    seed: int
    in_full: bool


def make_seed(text: str) -> int:
    """A seed that is the same on every rank for the same text, and for other texts another one."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def digest_rows(sources: Sequence[Source], table: RankTable, *, replica_set: IntColumn, sampling: Sampling) -> dict[int, bytes]:
    """The digest of each row that is in a replica set (`replica_set` is 0 or more), equal for equal bytes; each is read once.

    Regions up to 256 KiB are read in full. Ranks must call a tensor the same (see `RankPlan.held`), or they read other cells.
    `sources` are parallel to the rows.
    """
    rows = np.flatnonzero(replica_set >= 0)
    nbytes = np.array([sources[row].nbytes for row in rows.tolist()], dtype=np.int64)
    is_long = (nbytes > _SHORT_NBYTES) & (not sampling.in_full)
    places = iter(_choose_places(table.shards, rows[is_long], nbytes[is_long], seed=sampling.seed).tolist())
    memory = memoryview(bytearray(_PIECE_NBYTES))
    cells = [memory[start : start + _CELL_NBYTES] for start in range(0, _SHORT_NBYTES, _CELL_NBYTES)]
    digests: dict[int, bytes] = {}
    for row, length, has_places in zip(rows.tolist(), nbytes.tolist(), is_long.tolist(), strict=True):
        source = sources[row]
        digests[row] = _digest_cells(source, next(places), cells, memory) if has_places else _digest_all(source, length, memory)
    return digests


def digest_sets(rows: Mapping[int, bytes], table: RankTable, *, replica_set: IntColumn) -> dict[int, SetDigest]:
    """One digest per replica set that this rank is in, equal for equal digests of its rows; the order of rows does not matter."""
    order = _order(rows, table.shards)
    is_buffer = table.is_buffer[table.shards.tensor[order]]
    mains, buffers = dict[int, list[bytes]](), dict[int, list[bytes]]()
    for row, number, is_apart in zip(order.tolist(), replica_set[order].tolist(), is_buffer.tolist(), strict=True):
        (buffers if is_apart else mains).setdefault(number, []).append(rows[row])
    return {
        number: SetDigest(
            _join(mains[number]) if number in mains else b"",
            tuple(digest[:BUFFER_DIGEST_NBYTES] for digest in buffers.get(number, ())),
        )
        for number in sorted({*mains, *buffers})
    }


def list_row_digests(
    rows: Mapping[int, bytes], table: RankTable, *, replica_set: IntColumn, sets: Collection[int]
) -> dict[int, dict[str, bytes]]:
    """For each of `sets` that this rank is in, a digest of each tensor that is no buffer, by address, of all its rows there."""
    tensors, order = table.shards.tensors, _order(rows, table.shards)
    order = order[np.isin(replica_set[order], list(sets)) & ~table.is_buffer[table.shards.tensor[order]]]
    digests: dict[int, dict[str, list[bytes]]] = {}
    columns = order.tolist(), replica_set[order].tolist(), table.shards.tensor[order].tolist()
    for row, number, tensor in zip(*columns, strict=True):
        digests.setdefault(number, {}).setdefault(tensors.addresses[tensor], []).append(rows[row])
    return {number: {address: _join(own) for address, own in of_set.items()} for number, of_set in digests.items()}


def digest_source(source: Source) -> bytes:
    """A digest of all bytes of a source, equal for equal bytes."""
    return _digest_all(source, source.nbytes, memoryview(bytearray(min(source.nbytes, _PIECE_NBYTES))))


def _digest_all(source: Source, nbytes: int, memory: memoryview) -> bytes:
    digest = xxhash.xxh3_64()
    for start in range(0, nbytes, _PIECE_NBYTES):
        piece = memory[: nbytes - start]
        source.read_into(start, piece)
        digest.update(piece)
    return digest.digest()


def _digest_cells(source: Source, places: Sequence[int], cells: Sequence[memoryview], memory: memoryview) -> bytes:
    for place, cell in zip(places, cells, strict=True):
        source.read_into(place, cell)
    return xxhash.xxh3_64_digest(memory[:_SHORT_NBYTES])


def _join(digests: Sequence[bytes]) -> bytes:
    return xxhash.xxh3_64_digest(b"".join(digests))


def _order(rows: Mapping[int, bytes], shards: ShardTable) -> IntColumn:
    """The rows in an order that is the same on all ranks: by address, then offsets."""
    own = np.fromiter(rows, dtype=np.int64, count=len(rows))
    return own[np.lexsort((*shards.offsets[own].T[::-1], shards.tensor[own]))]


def _choose_places(shards: ShardTable, rows: IntColumn, nbytes: IntColumn, *, seed: int) -> IntColumn:
    """Where the cells of each row begin, in bytes: rising, disjoint, on element borders, within the region."""
    itemsize = _itemsizes(shards, rows)[:, None]
    numel, cell = nbytes[:, None] // itemsize, _CELL_NBYTES // itemsize
    bound = np.arange(_NUM_CELLS + 1)
    borders = numel // _NUM_CELLS * bound + numel % _NUM_CELLS * bound // _NUM_CELLS
    room = np.diff(borders, axis=1) - cell + 1
    places: IntColumn = (borders[:, :-1] + _draw(shards, rows, seed=seed) % room) * itemsize
    return places


def _itemsizes(shards: ShardTable, rows: IntColumn) -> IntColumn:
    dtypes = shards.tensors.dtypes
    return np.array([find_dtype(dtypes[tensor]).itemsize for tensor in shards.tensor[rows].tolist()], dtype=np.int64)


def _draw(shards: ShardTable, rows: IntColumn, *, seed: int) -> IntColumn:
    """64 pseudo-random numbers from 0 on for each row: splitmix64, begun at a digest of address and offsets."""
    keys = [xxhash.xxh3_64_intdigest(_identify(shards, row), seed) for row in rows.tolist()]
    step, *factors = (np.uint64(number) for number in _MIX)
    state = np.array(keys, dtype=np.uint64)[:, None] + step * np.arange(1, _NUM_CELLS + 1, dtype=np.uint64)
    for shift, factor in zip((30, 27), factors, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * factor
    drawn: IntColumn = ((state ^ (state >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return drawn


def _identify(shards: ShardTable, row: int) -> bytes:
    tensor = int(shards.tensor[row])
    offsets: bytes = shards.offsets[row, : shards.tensors.ndims[tensor]].astype("<i8").tobytes()
    return shards.tensors.addresses[tensor].encode() + b"\0" + offsets

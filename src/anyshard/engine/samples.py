"""Samples: digests by which ranks see whether they hold the same bytes, without reading all of them.

A long region is read in 64 cells, one at a pseudo-random place in each of 64 equal stretches. The places follow from the seed,
the address and the region alone, so every rank reads the same ones, and others at the next save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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


def digest_replicas(
    sources: Sequence[Source], table: RankTable, *, replica_set: IntColumn, sampling: Sampling
) -> dict[int, SetDigest]:
    """One digest per replica set (the numbers in `replica_set`; rows with less than 0 are in none), equal for equal bytes.

    Regions up to 256 KiB are read in full. Ranks must call a tensor the same (see `RankPlan.held`); the order of their rows does
    not matter. `sources` are parallel to the rows.
    """
    mains: dict[int, xxhash.xxh3_64] = {}
    buffers: dict[int, list[bytes]] = {}
    is_buffer = table.is_buffer[table.shards.tensor]
    for row, pieces in _read(sources, table.shards, _order(table.shards, replica_set), sampling=sampling):
        number = int(replica_set[row])
        if is_buffer[row]:
            own = xxhash.xxh3_64()
            _update(own, pieces)
            buffers.setdefault(number, []).append(own.digest()[:BUFFER_DIGEST_NBYTES])
        else:
            _update(mains.setdefault(number, xxhash.xxh3_64()), pieces)
    return {
        number: SetDigest(mains[number].digest() if number in mains else b"", tuple(buffers.get(number, ())))
        for number in sorted({*mains, *buffers})
    }


def list_row_digests(
    sources: Sequence[Source], table: RankTable, *, replica_set: IntColumn, sets: Collection[int], sampling: Sampling
) -> dict[int, dict[str, bytes]]:
    """For each of `sets` that this rank is in, a digest of each tensor that is no buffer, by address, equal for equal bytes.

    It covers the same bytes as `digest_replicas` with the same sampling.
    """
    shards, digests = table.shards, dict[int, dict[str, xxhash.xxh3_64]]()
    is_asked = np.isin(replica_set, list(sets)) & ~table.is_buffer[shards.tensor]
    rows = _order(shards, np.where(is_asked, replica_set, -1))
    for row, pieces in _read(sources, shards, rows, sampling=sampling):
        of_set = digests.setdefault(int(replica_set[row]), {})
        _update(of_set.setdefault(shards.tensors.addresses[shards.tensor[row]], xxhash.xxh3_64()), pieces)
    return {number: {address: own.digest() for address, own in of_set.items()} for number, of_set in digests.items()}


def digest_source(source: Source) -> bytes:
    """A digest of all bytes of a source, equal for equal bytes."""
    digest = xxhash.xxh3_64()
    _update(digest, _read_all(source, memoryview(bytearray(min(source.nbytes, _PIECE_NBYTES)))))
    return digest.digest()


def _update(digest: xxhash.xxh3_64, pieces: Iterator[memoryview]) -> None:
    for piece in pieces:
        digest.update(piece)


def _order(shards: ShardTable, replica_set: IntColumn) -> IntColumn:
    """The rows in a set, in an order that is the same on all ranks: by address, then offsets."""
    order = np.lexsort((*shards.offsets.T[::-1], shards.tensor))
    return order[replica_set[order] >= 0]


def _read(
    sources: Sequence[Source], shards: ShardTable, rows: IntColumn, *, sampling: Sampling
) -> Iterator[tuple[int, Iterator[memoryview]]]:
    """For each row the bytes that are digested, which stay until the next piece is asked for."""
    memory = memoryview(bytearray(_PIECE_NBYTES))
    cells = [memory[start : start + _CELL_NBYTES] for start in range(0, _SHORT_NBYTES, _CELL_NBYTES)]
    nbytes = np.array([sources[row].nbytes for row in rows.tolist()], dtype=np.int64)
    is_long = (nbytes > _SHORT_NBYTES) & (not sampling.in_full)
    places = iter(_choose_places(shards, rows[is_long], nbytes[is_long], seed=sampling.seed).tolist())
    for row, has_places in zip(rows.tolist(), is_long.tolist(), strict=True):
        source = sources[row]
        yield row, _read_cells(source, next(places), cells, memory) if has_places else _read_all(source, memory)


def _read_all(source: Source, memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, source.nbytes, len(memory)):
        piece = memory[: source.nbytes - start]
        source.read_into(start, piece)
        yield piece


def _read_cells(source: Source, places: Sequence[int], cells: Sequence[memoryview], memory: memoryview) -> Iterator[memoryview]:
    for place, cell in zip(places, cells, strict=True):
        source.read_into(place, cell)
    yield memory[:_SHORT_NBYTES]


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

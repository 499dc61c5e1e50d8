"""A checkpoint in a dict, of one or several ranks: adapters, the value codec and plain bytes; no plans, engine or storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.adapters.capture import capture
from anyshard.adapters.target import LoadTarget, plan_load
from anyshard.adapters.values import torch_types
from anyshard.options import LoadOptions
from anyshard.records.addresses import section_of
from anyshard.records.captured import Captured, Stored, StoredRun
from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import BITS_DTYPES, Destination, Source
from anyshard.records.tables import TensorTable, make_tensor_table
from anyshard.records.value_parts import merge_trees
from anyshard.records.values import ValueRegistry, decode_value, encode_value

REGISTRY = ValueRegistry().extended(torch_types())

Bits = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank puts into a checkpoint: the bytes of its regions, and its encoded value trees."""

    captured: Captured
    regions: Sequence[bytes]
    values: Mapping[str, bytes]
    own: Mapping[str, tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a checkpoint would hold."""

    tensors: TensorTable
    data: Mapping[str, bytes]
    values: Mapping[str, Sequence[bytes]]
    own: Sequence[Mapping[str, tuple[bytes, bytes]]]
    warnings: tuple[str, ...]

    @property
    def trees(self) -> dict[str, Any]:
        """The decoded value trees, each that of all ranks."""
        return {
            name: merge_trees([_decode(data, name) for data in of_ranks], file=name) for name, of_ranks in self.values.items()
        }

    @property
    def per_rank(self) -> dict[str, dict[bytes, int]]:
        """The rank that has each key of each per-rank value."""
        found: dict[str, dict[bytes, int]] = {}
        for rank, own in enumerate(self.own):
            for address, (key, _) in own.items():
                found.setdefault(address, {}).setdefault(key, rank)
        return found

    def read_rank(self, rank: int, section: str) -> dict[str, object]:
        """The trees that one rank has of its own in a section."""
        own = self.own[rank].items()
        return {address: _decode(data, address) for address, (_, data) in own if section_of(address) == section}

    def bits(self, address: str) -> Bits:
        """A whole tensor as bits."""
        row = self.tensors.rows[address]
        bits = np.frombuffer(self.data[address], dtype=BITS_DTYPES[find_dtype(self.tensors.dtypes[row]).itemsize])
        return bits.reshape(self.tensors.shape(row))


def _encode(tree: object, address: str) -> bytes:
    return encode_value(tree, address=address, registry=REGISTRY)


def _decode(data: bytes, name: str) -> Any:
    return decode_value(data, registry=REGISTRY, file=name)


def keep(app_state: Mapping[str, object]) -> Kept:
    """Save an app state on one rank."""
    return unite([take(app_state)])


def take(app_state: Mapping[str, object], *, rank: int = 0, world_size: int = 1) -> Part:
    """The part of one rank in a save."""
    captured = capture(app_state, registry=REGISTRY, rank=rank, world_size=world_size)
    table = captured.shards.tensors
    dtypes = (find_dtype(table.dtypes[tensor]) for tensor in captured.shards.tensor)
    regions = [_read(source, dtype.itemsize) for source, dtype in zip(captured.sources, dtypes, strict=True)]
    values = {name: _encode(tree, name) for name, tree in captured.trees.items()}
    own = {address: (part.key, _encode(part.tree, address)) for address, part in captured.per_rank.items()}
    return Part(captured, regions, values, own)


def _read(source: Source, itemsize: int) -> bytes:
    """All bytes of a source, read in two parts."""
    whole = bytearray(source.nbytes)
    middle = source.nbytes // itemsize // 2 * itemsize
    for start, stop in ((0, middle), (middle, source.nbytes)):
        if stop > start:
            source.read_into(start, memoryview(whole)[start:stop])
    return bytes(whole)


def unite(parts: Sequence[Part]) -> Kept:
    """The checkpoint of all ranks, which must hold every element of every tensor."""
    tensors = _unite_tables([part.captured.shards.tensors for part in parts])
    whole: dict[str, Bits] = {}
    held: dict[str, NDArray[np.bool_]] = {}
    for part in parts:
        for row, data in enumerate(part.regions):
            shards = part.captured.shards
            address, (offsets, lengths) = shards.tensors.addresses[shards.tensor[row]], shards.region(row)
            number = tensors.rows[address]
            dtype, shape = BITS_DTYPES[find_dtype(tensors.dtypes[number]).itemsize], tensors.shape(number)
            box = _box(offsets, lengths)
            whole.setdefault(address, np.zeros(shape, dtype))[box] = np.frombuffer(data, dtype).reshape(lengths)
            held.setdefault(address, np.zeros(shape, bool))[box] = True
    stored = {address for address, alias in zip(tensors.addresses, tensors.alias_of, strict=True) if alias < 0}
    assert stored == {address for address in held if held[address].all()}
    values = {name: [part.values[name] for part in parts if name in part.values] for part in parts for name in part.values}
    warnings = tuple(warning for part in parts for warning in part.captured.warnings)
    return Kept(tensors, {a: bits.tobytes() for a, bits in whole.items()}, values, [part.own for part in parts], warnings)


def _unite_tables(tables: Sequence[TensorTable]) -> TensorTable:
    rows = {address: (table, row) for table in tables for row, address in enumerate(table.addresses)}
    aliases = {address: table.addresses[alias] for address, (table, row) in rows.items() if (alias := table.alias_of[row]) >= 0}
    dtypes = [table.dtypes[row] for table, row in rows.values()]
    return make_tensor_table(tuple(rows), dtypes, [table.shape(row) for table, row in rows.values()], aliases)


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def plan(kept: Kept, app_state: Mapping[str, object], *, rank: int = 0, world_size: int = 1, **options: Any) -> LoadTarget:
    """Plan a load of what was kept on one rank."""
    trees = kept.trees
    asked = {name: tree for name, tree in trees.items() if name in app_state}
    stored = Stored(kept.tensors, asked, tuple(trees), kept.per_rank, kept.read_rank)
    loads = LoadOptions(**options)
    return plan_load(app_state, stored, options=loads, registry=REGISTRY, checkpoint="kept", rank=rank, world_size=world_size)


def give(kept: Kept, app_state: Mapping[str, object], *, rank: int = 0, world_size: int = 1, **options: Any) -> LoadTarget:
    """Load what was kept on one rank; ties are compared as the caller of the adapters has to."""
    target = plan(kept, app_state, rank=rank, world_size=world_size, **options)
    for one, other in target.ties:
        assert _read_run(kept, one) == _read_run(kept, other), f"{one.address} and {other.address} differ"
    wanted = target.wanted
    for row, destination in enumerate(target.destinations):
        box = _box(*wanted.region(row))
        _fill(destination, np.array(kept.bits(wanted.tensors.addresses[wanted.tensor[row]])[box]))
    target.apply()
    return target


def _read_run(kept: Kept, run: StoredRun) -> bytes:
    return kept.bits(run.address).transpose(run.dims).reshape(-1)[run.start : run.stop].tobytes()


def _fill(destination: Destination, bits: Bits) -> None:
    memory = destination.memory()
    if memory is not None:
        memory[:] = bits.tobytes()
    else:
        destination.place(tuple(slice(0, length) for length in bits.shape), bits)

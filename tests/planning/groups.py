"""A process group in plain NumPy: who holds which regions, what all ranks write, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from anyshard.planning.group_plan import GroupPlan
from anyshard.planning.rank_plan import RankPlan, decode_rank_plan, encode_rank_plan
from anyshard.records.handles import ArraySource
from anyshard.records.layout import lay_out
from anyshard.records.load_plan import BlobLayout
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.tables import NOT_AN_ALIAS, TensorTable, make_tensor_table
from tests.planning.simulated import Region, Simulated, fill_bits, make_shards, part, partitions, tensor_tables

SECTIONS = ("a", "b")
Holding = tuple[int, Region]


def make_group(
    tensors: TensorTable, holdings: Sequence[Sequence[Holding]], *, buffers: frozenset[str] = frozenset()
) -> list[RankTable]:
    """The tables of ranks that hold these regions of tensors in the sections `a` and `b`."""
    return [make_rank_table(make_shards(tensors, held), SECTIONS, buffers=buffers) for held in holdings]


def replicate(tensors: TensorTable, num_ranks: int) -> list[RankTable]:
    """Ranks that hold everything (DDP)."""
    held = [(t, ((0,) * len(tensors.shape(t)), tensors.shape(t))) for t in range(len(tensors))]
    return make_group(tensors, [held] * num_ranks)


def shard_rows(tensors: TensorTable, num_shards: int, num_replicas: int) -> list[RankTable]:
    """Ranks that hold rows of everything, cut as FSDP does, and the replicas of each of them (HSDP). Rank = replica, shard."""
    holdings = []
    for rank in range(num_shards * num_replicas):
        held = []
        for t in range(len(tensors)):
            shape = tensors.shape(t)
            chunk = -(-shape[0] // num_shards)
            start = min(chunk * (rank % num_shards), shape[0])
            count = min(chunk, shape[0] - start)
            held.append((t, ((start,) + (0,) * (len(shape) - 1), (count, *shape[1:]))))
        holdings.append(held)
    return make_group(tensors, holdings)


@st.composite
def groups(draw: st.DrawFn, *, max_ranks: int = 4) -> list[RankTable]:
    """One to four ranks that together hold any partition of any tensors, each region on one or more of them."""
    tensors, num_ranks = draw(tensor_tables()), draw(st.integers(1, max_ranks))
    held: list[list[Holding]] = [[] for _ in range(num_ranks)]
    for t in range(len(tensors)):
        for region in draw(partitions(tensors.shape(t))):
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                held[rank].append((t, region))
    buffers = frozenset(address for address in tensors.addresses if draw(st.integers(0, 3)) == 3)
    return make_group(tensors, [draw(st.permutations(own)) for own in held], buffers=buffers)


def make_wide_tensors(shapes: Sequence[tuple[int, ...]], *, dtype: str = "float32") -> TensorTable:
    """Tensors t00, t01, ... in section a."""
    return make_tensor_table([f"a/t{i:02}" for i in range(len(shapes))], [dtype] * len(shapes), shapes, {})


def describe(plan: GroupPlan) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Address, offsets, lengths and rank of each row of the index."""
    shards = plan.index.shards
    return [(shards.tensors.addresses[shards.tensor[i]], *shards.region(i), int(plan.rank[i])) for i in range(len(shards))]


def hand_out(plan: GroupPlan, tables: Sequence[RankTable]) -> list[RankPlan]:
    """The plans of all ranks as they get them."""
    parts = enumerate(plan.split())
    return [decode_rank_plan(encode_rank_plan(part, rank=rank), tables[rank]) for rank, part in parts]


def write(plan: GroupPlan, tables: Sequence[RankTable], *, cell_nbytes: int) -> Simulated:
    """All ranks write what they were handed, each from its own shards, as the engine would."""
    stored = plan.tensors
    bits, layouts, blobs = fill_bits(stored), {}, {}
    numbers = {}
    for number in range(len(plan.blobs)):
        name = plan.sections[plan.blobs.section[number]], int(plan.blobs.rank[number]), int(plan.blobs.k[number])
        numbers[name] = number
    for own, mine in zip(tables, hand_out(plan, tables), strict=True):
        addresses = own.shards.tensors.addresses
        rows = [stored.rows[addresses[t]] for t in own.shards.tensor.tolist()]
        rows = [row if stored.alias_of[row] == NOT_AN_ALIAS else stored.alias_of[row] for row in rows]
        sources = [ArraySource(part(bits[t], own.shards.region(i))) for i, t in enumerate(rows)]
        picked = mine.pick_sources(sources)
        for blob in mine.plan.blobs:
            extents = []
            for row in blob.rows.tolist():
                extents.append(bytearray(picked[row].nbytes))
                picked[row].read_into(0, memoryview(extents[-1]))
            nbytes = np.array([len(extent) for extent in extents], dtype=np.int64)
            position = lay_out(nbytes)
            data = bytearray(int((position + nbytes)[-1]) if extents else 64)
            for start, extent in zip(position.tolist(), extents, strict=True):
                data[start : start + len(extent)] = extent
            number = numbers.pop((blob.section, blob.rank, blob.k))
            blobs[number] = data + b"\xff" * 10
            layouts[number] = BlobLayout(cell_nbytes, len(data) + 10, position, nbytes)
    assert {} == numbers
    return Simulated(stored, bits, plan.index, layouts, blobs)

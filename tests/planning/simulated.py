"""A checkpoint in plain NumPy: logical tensors, their blobs as bytes, and an engine that runs load plans on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from anyshard.planning.pack import make_index, order_blobs, plan_save
from anyshard.records.handles import BITS_DTYPES
from anyshard.records.layout import lay_out
from anyshard.records.load_plan import BlobLayout, LoadPlan
from anyshard.records.regions import decompose_run
from anyshard.records.tables import Index, IntColumn, ShardTable, TensorTable, make_tensor_table

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}
Region = tuple[tuple[int, ...], tuple[int, ...]]
Bits = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What was saved (`bits` per logical tensor) and what is stored."""

    tensors: TensorTable
    bits: list[Bits]
    index: Index
    layouts: dict[int, BlobLayout]
    blobs: dict[int, bytearray]


def part(array: Bits, region: Region) -> Bits:
    """The region of an array."""
    return array[(*(slice(o, o + n) for o, n in zip(*region, strict=True)), ...)]


def make_shards(tensors: TensorTable, regions: Sequence[tuple[int, Region]]) -> ShardTable:
    """A shard table of (tensor, region) pairs, in their order."""
    width = tensors.shapes.shape[1]
    offsets, lengths = np.zeros((len(regions), width), dtype=np.int64), np.ones((len(regions), width), dtype=np.int64)
    for row, (_, (offset, length)) in enumerate(regions):
        offsets[row, : len(offset)], lengths[row, : len(length)] = offset, length
    return ShardTable(tensors, np.array([tensor for tensor, _ in regions], dtype=np.int64), offsets, lengths)


def fill_bits(tensors: TensorTable) -> list[Bits]:
    """Bits that differ from element to element and tensor to tensor: a counter times an odd constant plus a seed."""
    found: list[Bits] = []
    for tensor in range(len(tensors)):
        dtype, shape = BITS_DTYPES[DTYPES[tensors.dtypes[tensor]]], tensors.shape(tensor)
        words = np.arange(int(np.prod(shape)), dtype=np.uint64) * 0x9E3779B97F4A7C15 + tensor
        found.append(np.repeat(words, 2).view(dtype)[:: 16 // dtype.itemsize].reshape(shape))
    return found


def save(tensors: TensorTable, ranks: Sequence[ShardTable], *, cell_nbytes: int, max_blob_nbytes: int) -> Simulated:
    """Store what all ranks hold, as the engine would, with bytes of 255 for the values and zeros as padding."""
    plans = [plan_save(shards, ("a", "b"), rank=rank, max_blob_nbytes=max_blob_nbytes) for rank, shards in enumerate(ranks)]
    bits, layouts, blobs = fill_bits(tensors), {}, {}
    for number, blob in enumerate(order_blobs(plans)):
        shards = plans[blob.rank].shards
        extents = [part(bits[shards.tensor[row]], shards.region(row)).tobytes() for row in blob.rows]
        nbytes = np.array([len(extent) for extent in extents], dtype=np.int64)
        position = lay_out(nbytes)
        data = bytearray(int((position + nbytes)[-1]) if extents else 64)
        for start, extent in zip(position.tolist(), extents, strict=True):
            data[start : start + len(extent)] = extent
        blobs[number] = data + b"\xff" * 10
        layouts[number] = BlobLayout(cell_nbytes, len(data) + 10, position, nbytes)
    return Simulated(tensors, bits, make_index(plans, tensors), layouts, blobs)


def load(
    stored: Simulated, wanted: ShardTable, plan: LoadPlan, *, is_strided: bool
) -> tuple[list[Bits], list[NDArray[np.uint8]]]:
    """Run a plan: the wanted shards, and how often each of their elements was written. Strided destinations have no memory."""
    shapes = [wanted.region(row)[1] for row in range(len(wanted))]
    out = [np.zeros(shape, stored.bits[tensor].dtype) for shape, tensor in zip(shapes, wanted.tensor, strict=True)]
    writes = [np.zeros(shape, np.uint8) for shape in shapes]
    reads, pieces, items = plan.reads, plan.pieces, plan.items
    for read in range(len(reads)):
        block = bytes(stored.blobs[reads.blob[read]][reads.start[read] : reads.stop[read]])
        for piece in range(reads.first_piece[read], reads.first_piece[read + 1]):
            row, target, itemsize = pieces.wanted[piece], pieces.wanted_position[piece], items.itemsize[pieces.item[piece]]
            if target >= 0 and not is_strided:
                begin = pieces.position[piece] - reads.start[read]
                got = np.frombuffer(block[begin : begin + pieces.nbytes[piece]], out[row].dtype)
                out[row].reshape(-1)[target // itemsize :][: got.size] = got
                writes[row].reshape(-1)[target // itemsize :][: got.size] += 1
                continue
            for step in plan.place_steps(piece):
                got = np.frombuffer(block, out[row].dtype, step.nbytes // itemsize, step.position - reads.start[read])
                out[row][step.where] = got.reshape(step.shape)[step.inside]
                writes[row][step.where] += 1
    return out, writes


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A way to cut a tensor in regions: box by box, or as runs of the flattened tensor."""
    if draw(st.booleans()):
        numel = int(np.prod(shape))
        cuts = sorted(draw(st.sets(st.integers(0, numel), max_size=3)) | {0, numel})
        runs = [decompose_run(shape, start, stop) for start, stop in itertools.pairwise(cuts)]
        return [_region(o, n) for offsets, lengths in runs for o, n in zip(offsets, lengths, strict=True)]
    regions: list[Region] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        offset, length = regions.pop(draw(st.integers(0, len(regions) - 1)))
        regions += _halves(offset, length, draw(st.integers(0, len(shape))), draw(st.floats(0, 1)))
    return regions


def _region(offset: IntColumn, length: IntColumn) -> Region:
    return tuple(offset.tolist()), tuple(length.tolist())


def _halves(offset: tuple[int, ...], length: tuple[int, ...], dim: int, where: float) -> list[Region]:
    if dim == len(length) or length[dim] < 2:
        return [(offset, length)]
    cut = 1 + int(where * (length[dim] - 2))
    second = (*offset[:dim], offset[dim] + cut, *offset[dim + 1 :])
    lengths = [(*length[:dim], part_length, *length[dim + 1 :]) for part_length in (cut, length[dim] - cut)]
    return [(offset, lengths[0]), (second, lengths[1])]


@st.composite
def tensor_tables(draw: st.DrawFn) -> TensorTable:
    """A few logical tensors of different shapes and element sizes, some empty or scalar, in two sections."""
    count = draw(st.integers(1, 4))
    shapes = [tuple(draw(st.lists(st.integers(0, 9) | st.just(40), max_size=3))) for _ in range(count)]
    dtypes = [draw(st.sampled_from(sorted(DTYPES))) for _ in range(count)]
    return make_tensor_table([f"{'ab'[i % 2]}/t{i}" for i in range(count)], dtypes, shapes, {})


@st.composite
def simulated_checkpoints(draw: st.DrawFn) -> Simulated:
    """Any partition of any tensors over one to three ranks, in blobs and cells of several sizes."""
    tensors = draw(tensor_tables())
    regions = [(t, region) for t in range(len(tensors)) for region in draw(partitions(tensors.shape(t)))]
    num_ranks = draw(st.integers(1, 3))
    owners = [draw(st.integers(0, num_ranks - 1)) for _ in regions]
    ranks = [make_shards(tensors, [r for r, owner in zip(regions, owners, strict=True) if owner == i]) for i in range(num_ranks)]
    sizes = draw(st.sampled_from([(64, 256), (64, 4096), (256, 1 << 20), (1024, 4096), (64, 1 << 20)]))
    return save(tensors, ranks, cell_nbytes=sizes[0], max_blob_nbytes=sizes[1])

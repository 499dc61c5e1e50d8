"""Fills tensors with bits that say where they belong, on any layout, and compares whole tensors as bytes.

An element's bits are its position in the logical tensor times an odd constant plus a seed made of its name, cut to its size. So
no two elements near each other are equal in any dtype, and the same name gives the same logical tensor under every layout.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from anyshard.adapters.placements import LocalRegions, local_regions, regions_of
from anyshard.adapters.tensors import bits_of, dtype_name, host_bits, local_tensor

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "float8_e5m2": 2, "float8_e4m3fn": 3}
_SIGNED = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_SHOWN = 20

Bits: TypeAlias = NDArray[Any]


class Fill(enum.Enum):
    """Which bits: all of them, only finite numbers, or only finite numbers that are not negative."""

    BITS = "bits"
    FINITE = "finite"
    POSITIVE = "positive"


def fill(tensor: torch.Tensor, name: str, *, kind: Fill = Fill.BITS) -> None:
    """Fill a tensor, or this rank's part of a DTensor, in place with the bits of its name. Calls no collective.

    `FINITE` makes floating-point numbers between 2^-4 and 2^4 in size, so that a step can be taken and shows.
    """
    with torch.no_grad():
        regions, local = _look_at(tensor, name)
        shape = tuple(tensor.shape)
        if local.is_complex():
            local, shape = torch.view_as_real(local), (*shape, 2)
        bits = bits_of(local)
        for row in range(len(regions)):
            target = bits[regions.slices(row)]
            if target.numel():
                made = _make_bits(_list_positions(shape, regions, row), name, local.dtype, kind)
                target.copy_(torch.from_numpy(made.view(_SIGNED[made.itemsize])).view(target.shape))


def _look_at(tensor: torch.Tensor, name: str) -> tuple[LocalRegions, torch.Tensor]:
    """The regions that this rank holds and the plain tensor that they lie in."""
    if isinstance(tensor, DTensor):
        return regions_of(tensor, name), tensor.to_local().detach()
    return local_regions(tuple(tensor.shape), [], mesh_shape=[], coordinate=[]), tensor.detach()


def _list_positions(shape: tuple[int, ...], regions: LocalRegions, row: int) -> Bits:
    """The positions in the logical tensor of all elements of one region, in C order."""
    offsets, lengths = regions.offsets[row].tolist(), regions.lengths[row].tolist()
    offsets += [0] * (len(shape) - len(offsets))  # the pair of a complex number
    lengths += shape[len(lengths) :]
    positions: Bits = np.zeros((), dtype=np.uint64)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        along = np.arange(offset, offset + length, dtype=np.uint64) * np.uint64(math.prod(shape[dim + 1 :]))
        positions = positions[..., None] + along
    return positions.reshape(-1)


def _make_bits(positions: Bits, name: str, dtype: torch.dtype, kind: Fill) -> Bits:
    wide: Bits = positions * _ODD + np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    bits = wide.astype(f"<u{dtype.itemsize}")
    if dtype == torch.bool:
        return (wide & np.uint64(1)).astype(np.uint8)
    return bits if kind is Fill.BITS or not dtype.is_floating_point else _make_finite(bits, dtype, kind)


def _make_finite(bits: Bits, dtype: torch.dtype, kind: Fill) -> Bits:
    """Keep sign and mantissa, and of the exponent so little that a step with a usual learning rate changes every number."""
    mantissa_bits = _MANTISSA_BITS[dtype_name(dtype)]
    exponent_bits = dtype.itemsize * 8 - 1 - mantissa_bits
    half = min(4, 1 << (exponent_bits - 3))
    bias = (1 << (exponent_bits - 1)) - 1
    unsigned = bits.dtype.type
    exponent = (bits >> unsigned(mantissa_bits)) % unsigned(2 * half) + unsigned(bias - half)
    mantissa = bits & unsigned((1 << mantissa_bits) - 1)
    sign = bits & unsigned(0 if kind is Fill.POSITIVE else 1 << (mantissa_bits + exponent_bits))
    return cast("Bits", sign | exponent << unsigned(mantissa_bits) | mantissa)


def local_bytes(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """What this rank holds of each tensor, as bytes by address."""
    return {address: host_bits(bits_of(local_tensor(tensor, address).cpu())).tobytes() for address, tensor in state.items()}


def full_bytes(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Each logical tensor of all ranks' states as the bytes of the whole, on every rank, by address; every rank calls.

    Raises `AssertionError` if ranks disagree about dtype, shape or any element that several of them hold, or if none holds one.
    """
    parts = [part for address, tensor in state.items() for part in _take_parts(address, tensor)]
    gathered: list[list[_Part]] = [parts]
    if dist.is_initialized():
        gathered = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, parts)
    whole: dict[str, list[_Part]] = {}
    for part in (part for parts in gathered for part in parts):
        whole.setdefault(part[0], []).append(part)
    return {address: _join_parts(address, whole[address]) for address in sorted(whole)}


# Address, what all ranks must agree on, offsets, lengths, bytes of the region.
_Part: TypeAlias = tuple[str, tuple[str, tuple[int, ...], int], Sequence[int], Sequence[int], bytes]


def _take_parts(address: str, tensor: torch.Tensor) -> Iterator[_Part]:
    regions, local = _look_at(tensor, address)
    logical = (dtype_name(tensor.dtype), tuple(tensor.shape), tensor.element_size())
    bits = host_bits(bits_of(local.cpu()))
    for row in range(len(regions)):
        yield address, logical, regions.offsets[row].tolist(), regions.lengths[row].tolist(), bits[regions.slices(row)].tobytes()


def _join_parts(address: str, parts: Sequence[_Part]) -> bytes:
    logical = {part[1] for part in parts}
    assert len(logical) == 1, f"{address}: ranks disagree about dtype and shape: {logical}"
    ((_, shape, itemsize),) = logical
    whole = np.zeros((*shape, itemsize), dtype=np.uint8)
    held = np.zeros(shape, dtype=bool)
    for _, _, offsets, lengths, data in parts:
        box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
        if whole[box].size == 0:
            continue
        found = np.frombuffer(data, dtype=np.uint8).reshape(*lengths, itemsize)
        assert (whole[box] == found)[held[box]].all(), f"{address}: ranks hold different elements at {offsets}, {lengths}"
        whole[box], held[box] = found, True
    assert held.all(), f"{address}: no rank holds {int((~held).sum())} of {held.size} elements"
    return whole.tobytes()


def assert_same_bytes(expected: Mapping[str, bytes], found: Mapping[str, bytes]) -> None:
    """Fail with the addresses that are missing, unexpected or different, and where each difference begins."""
    differing = [address for address in expected if address in found and expected[address] != found[address]]
    lines = [
        *(f"{address}: missing" for address in expected if address not in found),
        *(f"{address}: unexpected" for address in found if address not in expected),
        *(f"{address}: {_describe(expected[address], found[address])}" for address in differing),
    ]
    assert not lines, f"{len(lines)} address(es) differ:\n" + "\n".join(lines[:_SHOWN])


def _describe(expected: bytes, found: bytes) -> str:
    if len(expected) != len(found):
        return f"{len(found)} bytes instead of {len(expected)}"
    wrong = np.flatnonzero(np.frombuffer(expected, dtype=np.uint8) != np.frombuffer(found, dtype=np.uint8))
    return f"{len(wrong)} of {len(found)} bytes differ, the first at {wrong[0]}"

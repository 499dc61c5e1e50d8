"""Where live tensors and arrays lie in memory: which of them overlap, and which elements they have in common there.

Nothing here touches an element; footprints stand for the memory of any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from anyshard.adapters.tensors import reach_of

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_MAX_OVERLAP_WORK = 10_000


Owner: TypeAlias = torch.Tensor | NDArray[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The memory of one tensor or array, from the byte `low` up to `high` on its device."""

    name: str
    owner: Owner
    low: int
    high: int


# The dims of a tensor from the outermost in memory to the innermost, and a range of its elements in that order.
Run: TypeAlias = tuple[tuple[int, ...], int, int]
_Look: TypeAlias = tuple[Place, NDArray[np.generic]]


def make_place(name: str, owner: Owner) -> Place:
    """The place of a tensor or array that is called `name`."""
    if isinstance(owner, np.ndarray):
        return Place(name, owner, *byte_bounds(owner))
    return Place(name, owner, owner.data_ptr(), owner.data_ptr() + reach_of(owner) * owner.element_size())


def overlaps_itself(owner: Owner) -> bool:
    """Whether two elements of one tensor may lie on the same memory, as in an expanded one."""
    if owner.flags.c_contiguous if isinstance(owner, np.ndarray) else owner.is_contiguous():
        return False
    array, reach = _footprint(owner), 0
    for stride, length in _list_dims(array):
        if stride < reach + array.itemsize:
            return True
        reach += stride * (length - 1)
    return False


def find_overlaps(places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """All pairs that share memory. Interleaved places, such as the columns of one matrix, are not compared pair by pair."""
    devices: dict[torch.device, list[tuple[int, int, Place]]] = {}
    for place in places:
        if place.high > place.low:
            device = place.owner.device if isinstance(place.owner, torch.Tensor) else _CPU
            devices.setdefault(device, []).append((place.low, place.high, place))
    for spans in devices.values():
        for cluster in _chain(spans):
            if len(cluster) > 1:
                for group in _split_by_phase([(place, _footprint(place.owner)) for place in cluster]):
                    yield from _find_pairs(group)


def find_common_runs(one: Place, other: Place) -> tuple[Run, Run] | None:
    """The elements that two overlapping places have in common, or None unless each of them is dense in memory."""
    arrays = _footprint(one.owner), _footprint(other.owner)
    orders, itemsize = [_memory_order(array) for array in arrays], arrays[0].itemsize
    if None in orders or itemsize != arrays[1].itemsize or (one.low - other.low) % itemsize:
        return None
    low, high = max(one.low, other.low), min(one.high, other.high)
    first, second = (
        (order or (), (low - place.low) // itemsize, (high - place.low) // itemsize)
        for order, place in zip(orders, (one, other), strict=True)
    )
    return first, second


def _memory_order(array: NDArray[np.generic]) -> tuple[int, ...] | None:
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    order = sorted(range(array.ndim), key=lambda dim: -array.strides[dim])
    return tuple(order) if array.transpose(order).flags.c_contiguous else None


def _chain(spans: Iterable[tuple[int, int, _T]]) -> Iterator[list[_T]]:
    """Groups of things whose spans touch one another, be it by way of others; spans of two groups do not touch."""
    group: list[_T] = []
    reach = 0
    for low, high, item in sorted(spans, key=lambda span: span[:2]):
        if group and low >= reach:
            yield group
            group = []
        reach = max(reach, high) if group else high
        group.append(item)
    if group:
        yield group


def _split_by_phase(cluster: list[_Look]) -> Iterable[list[_Look]]:
    """Groups that cannot overlap one another: all their rows repeat with one period, each group's in a part of its own."""
    rows = [_cut_into_rows(array) for _, array in cluster]
    period = math.gcd(*(stride for _, strides in rows for stride in strides))
    phases = [(place.low - cluster[0][0].low) % max(period, 1) for place, _ in cluster]
    if any(phase + nbytes > period for phase, (nbytes, _) in zip(phases, rows, strict=True)):
        return (cluster,)
    return _chain((phase, phase + nbytes, look) for phase, (nbytes, _), look in zip(phases, rows, cluster, strict=True))


def _cut_into_rows(array: NDArray[np.generic]) -> tuple[int, list[int]]:
    """Length in bytes of the unbroken rows that an array is made of, and the strides from row to row."""
    nbytes, strides = array.itemsize, list[int]()
    for stride, length in _list_dims(array):
        if stride == nbytes and not strides:
            nbytes *= length
        else:
            strides.append(stride)
    return nbytes, strides


def _list_dims(array: NDArray[Any]) -> list[tuple[int, int]]:
    """Stride and length of each dim that has more than one index, innermost first."""
    return sorted((abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True) if length > 1)


def _find_pairs(group: list[_Look]) -> Iterator[tuple[Place, Place]]:
    open_looks: list[_Look] = []
    for place, array in sorted(group, key=lambda look: (look[0].low, look[0].high)):
        open_looks = [look for look in open_looks if look[0].high > place.low]
        yield from ((other, place) for other, its_array in open_looks if _share_memory(its_array, array))
        open_looks.append((place, array))


def _share_memory(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MAX_OVERLAP_WORK)  # type: ignore[arg-type]  # the stub knows two values only
    except np.exceptions.TooHardError:
        return True


def _footprint(owner: Owner) -> NDArray[np.generic]:
    """An array that lies where a tensor lies, for questions about overlap only: its memory is never touched."""
    return owner if isinstance(owner, np.ndarray) else np.asarray(_Footprint(owner))


class _Footprint:
    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
            "typestr": f"|V{itemsize}",
            "data": (tensor.data_ptr(), False),
        }

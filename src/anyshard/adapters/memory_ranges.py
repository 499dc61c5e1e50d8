"""Where many tensors lie in memory, as columns of numbers, and sets of such bytes that can be asked about many at once.

Nothing here keeps a tensor or touches an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.tensors import DeviceSource, HostSource, inner_tensors, is_dtensor, is_flattened, is_wrapper

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OFF_HOST = 1 << 62  # added to addresses of other devices, so that they are never taken for those of the host

Column: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


def list_locals(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors themselves, but of DTensors their local tensors, not waited for."""
    samples = {type(tensor): tensor for tensor in tensors}
    sharded = {kind for kind, sample in samples.items() if is_dtensor(sample)}
    if not sharded:
        return list(tensors)
    found: list[Any] = list(tensors)
    if all(hasattr(samples[kind], "_local_tensor") for kind in sharded):  # `to_local` takes ten times as long
        return [tensor._local_tensor if type(tensor) in sharded else tensor for tensor in found]  # noqa: SLF001 - see above
    with torch.no_grad():  # else each is a new node of the autograd graph
        return [tensor.to_local() if type(tensor) in sharded else tensor for tensor in found]


def list_plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors with memory in which these ones lie: local tensors of DTensors, inner ones of flattened subclasses."""
    plain: list[torch.Tensor] = []
    for tensor in list_locals(tensors):
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            plain.append(tensor)
        else:
            plain.extend(_look_inside(tensor))
    return plain


def _look_inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    if is_flattened(tensor):
        return list_plain(list(inner_tensors(tensor).values()))
    return [] if is_wrapper(tensor) or tensor.layout is not torch.strided else [tensor]


def locate(tensors: Sequence[torch.Tensor]) -> tuple[Column, Column]:
    """The first byte of each of these plain tensors, and the one behind its last if it is dense in memory."""
    places, nbytes = [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors]
    return _make_ranges(places, nbytes, [tensor.is_cpu for tensor in tensors])


def locate_sources(sources: Sequence[HostSource | DeviceSource]) -> tuple[Column, Column]:
    """What `locate` gave of the tensors of these sources when these were made; no tensor is asked again."""
    places, nbytes = (list(map(attrgetter(name), sources)) for name in ("data_ptr", "nbytes"))
    return _make_ranges(places, nbytes, [kind is HostSource for kind in map(type, sources)])


def _make_ranges(places: Sequence[int], nbytes: Sequence[int], is_host: Sequence[bool]) -> tuple[Column, Column]:
    starts = np.array(places, dtype=np.int64) + np.where(np.array(is_host, dtype=np.bool_), 0, _OFF_HOST)
    return starts, starts + np.array(nbytes, dtype=np.int64)


@final
class MemoryRanges:
    """A set of bytes in memory: that of dense tensors that lie from `starts` to `stops`, as `locate` gives them."""

    def __init__(self, starts: Column, stops: Column) -> None:
        order = np.argsort(starts, kind="stable")
        order = order[starts[order] < stops[order]]
        starts, reach = starts[order], np.maximum.accumulate(stops[order])
        begins = np.ones(len(starts), dtype=np.bool_)
        begins[1:] = starts[1:] > reach[:-1]  # what touches its neighbour is one range with it
        self._starts = starts[begins]
        self._stops = reach[np.append(begins[1:], True)[: len(reach)]]

    @classmethod
    def empty(cls) -> MemoryRanges:
        """The set without a byte."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def contain(self, starts: Column, stops: Column) -> Mask:
        """Which of these ranges lie in the set as a whole; none without a byte does."""
        place = np.searchsorted(self._starts, starts, side="right") - 1
        return (place >= 0) & (starts < stops) & (stops <= np.append(self._stops, 0)[place])

    def touch(self, starts: Column, stops: Column) -> Mask:
        """Which of these ranges have a byte in the set."""
        place = np.searchsorted(self._stops, starts, side="right")
        return (starts < stops) & (np.append(self._starts, np.iinfo(np.int64).max)[place] < stops)

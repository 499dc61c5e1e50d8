"""Which parts of an app state a lazy snapshot may copy after its call has returned, and why the others are copied at the call.

What may be lazy is what nothing is meant to change but the steps of `torch.optim.Optimizer`s that run hooks, for these can be
made to wait. That is a matter of memory, not of names: a row is lazy if all its bytes are such an optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.memory_ranges import Column, Mask, MemoryRanges, list_plain, locate, locate_sources
from anyshard.adapters.ownership import FREE, FROZEN, FSDP1, Holding, find_objects, list_holdings, list_modules, list_optimizers
from anyshard.adapters.tensors import DeviceSource, HostSource
from anyshard.records.addresses import section_of
from anyshard.records.captured import Captured
from anyshard.records.tables import NOT_AN_ALIAS, TensorTable
from anyshard.records.values import ValueRegistry

MIN_LAZY_NBYTES: Final = 16 << 10  # less is copied about as fast as its samples are taken and compared
_ALIGNMENT = 8
_TENSOR_SOURCES = frozenset({HostSource, DeviceSource})
_FSDP1_CLASS = "FullyShardedDataParallel"

_NO_TENSOR = "NumPy arrays and byte strings"
_BUFFER = "buffers, which a forward pass may change"
_RENORMED = "embeddings with max_norm, which a forward pass changes"
_NOT_DENSE = "not dense in memory in C order, or a conj or neg view"
_UNALIGNED = f"not aligned to {_ALIGNMENT} bytes"
_CAPTURING = "on a device while a graph of its work is captured"
_NOT_OWNED = "of no torch.optim.Optimizer in the app state"
_SHARED = "in one storage with tensors that may change outside of an optimizer's steps"


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Which rows of what was captured may be copied after the call, and what has to wait until they are.

    `is_lazy` says it per row of `captured.shards`. `reasons` has the addresses of the other rows by the reason why these have to
    be copied at the call. `optimizers` are those to which the lazy rows belong, in the order of the app state. `memory` is that
    of the lazy rows.
    """

    is_lazy: NDArray[np.bool_]
    reasons: Mapping[str, tuple[str, ...]]
    optimizers: tuple[torch.optim.Optimizer, ...]
    memory: MemoryRanges = field(default_factory=MemoryRanges.empty)


def find_eligible(
    app_state: Mapping[str, object], captured: Captured, registry: ValueRegistry, *, min_nbytes: int = MIN_LAZY_NBYTES
) -> Eligibility:
    """Find what may be lazy of an app state, which was captured just now; no element is read.

    Rows of less than `min_nbytes` never are. The same app state in the same layout gives the same answer.
    """
    objects = {name: tuple(find_objects(value, registry)) for name, value in app_state.items()}
    modules = {name: list_modules(found) for name, found in objects.items()}
    optimizers = list_optimizers(chain.from_iterable(objects.values()))
    rows = _Rows(captured)
    estates = {obstacle: _Estate(held, rows) for obstacle, held in list_holdings(optimizers, rows.by_tensor).items()}
    free = estates.pop(FREE, None) or _Estate(Holding(), rows)
    is_stranger = rows.is_tensor & ~free.find_owned(rows)
    is_buffer = _find_buffers(captured.buffers, captured.shards.tensors)[captured.shards.tensor]
    rows.refuse(_NO_TENSOR, ~rows.is_tensor)
    rows.refuse(f"smaller than {min_nbytes / 1024:g} KiB", rows.stops - rows.starts < max(1, min_nbytes))
    rows.refuse(_BUFFER, is_buffer)
    rows.refuse(_RENORMED, _find_renormed(chain.from_iterable(modules.values())).touch(rows.starts, rows.stops))
    for obstacle, estate in estates.items():
        rows.refuse(obstacle, MemoryRanges(estate.starts, estate.stops).touch(rows.starts, rows.stops))
    if (rows.is_open & is_stranger).any():
        _refuse_strangers(rows, is_stranger, modules)
    rows.refuse(_UNALIGNED, rows.starts % _ALIGNMENT != 0)
    rows.refuse(_NOT_DENSE, rows.mark(_is_scattered))
    rows.refuse(_SHARED, _share_storage(rows, is_stranger | is_buffer))
    if _is_capturing():
        rows.refuse(_CAPTURING, rows.mark(lambda tensor: not tensor.is_cpu))
    memory = MemoryRanges(rows.starts[rows.is_open], rows.stops[rows.is_open])
    owners = tuple(optimizers[number] for number in free.find_owners(memory))
    return Eligibility(rows.is_open, rows.list_reasons(), owners, memory)


@final
class _Rows:
    """The rows of what was captured, where they lie, and which of them are still thought to be lazy."""

    def __init__(self, captured: Captured) -> None:
        self._shards = captured.shards
        self._reasons: dict[str, Mask] = {}
        held: Sequence[Any] = captured.sources
        rows = [row for row, kind in enumerate(map(type, held)) if kind in _TENSOR_SOURCES]
        sources: list[HostSource | DeviceSource] = [held[row] for row in rows]
        tensors: list[torch.Tensor] = list(map(attrgetter("tensor"), sources))
        self.tensors = dict(zip(rows, tensors, strict=True))
        self.by_tensor = dict(zip(map(id, tensors), rows, strict=True))
        self.is_open = np.ones(len(captured.sources), dtype=np.bool_)
        self.is_tensor = np.zeros_like(self.is_open)
        self.is_tensor[rows] = True
        self.starts, self.stops = np.zeros((2, len(self.is_open)), dtype=np.int64)
        self.starts[rows], self.stops[rows] = locate_sources(sources)

    def refuse(self, reason: str, mask: Mask) -> None:
        """These rows are not lazy. Of several reasons of a row the first one counts."""
        self._reasons[reason] = self._reasons.get(reason, np.False_) | (self.is_open & mask)
        self.is_open = self.is_open & ~mask

    def mark(self, is_wanted: Callable[[torch.Tensor], bool]) -> Mask:
        """Which of the rows that are still open have a tensor that is wanted."""
        marked = np.zeros(len(self.is_open), dtype=np.bool_)
        rows = np.flatnonzero(self.is_open)
        marked[rows] = [is_wanted(self.tensors[row]) for row in rows.tolist()]
        return marked

    def list_addresses(self, mask: Mask) -> list[str]:
        """The address of each of these rows."""
        addresses = self._shards.tensors.addresses
        return [addresses[tensor] for tensor in self._shards.tensor[mask].tolist()]

    def list_reasons(self) -> dict[str, tuple[str, ...]]:
        """The addresses of the rows that are not lazy by reason."""
        return {reason: tuple(dict.fromkeys(self.list_addresses(mask))) for reason, mask in self._reasons.items() if mask.any()}


@final
class _Estate:
    """Where it lies what optimizers hold that have one obstacle in common, and which of them holds it."""

    def __init__(self, held: Holding, rows: _Rows) -> None:
        starts, stops = locate(held.others)
        self._held = held
        self.starts = np.append(rows.starts[held.rows], starts)
        self.stops = np.append(rows.stops[held.rows], stops)
        self._owners = np.array([*held.row_owners, *held.other_owners], dtype=np.int64)

    def find_owned(self, rows: _Rows) -> Mask:
        """Which rows are in here with all of their bytes, be it as a part of a tensor."""
        is_owned = np.zeros_like(rows.is_tensor)
        is_owned[self._held.rows] = True
        others = rows.is_tensor & ~is_owned
        if (others & MemoryRanges(self.starts, self.stops).touch(rows.starts, rows.stops)).any():
            tensors = [*(rows.tensors[row] for row in self._held.rows), *self._held.others]
            is_dense = np.array([tensor.is_contiguous() for tensor in tensors], dtype=np.bool_)
            is_owned |= MemoryRanges(self.starts[is_dense], self.stops[is_dense]).contain(rows.starts, rows.stops)
        return is_owned

    def find_owners(self, memory: MemoryRanges) -> list[int]:
        """The numbers of the optimizers that hold some byte of this memory."""
        numbers: list[int] = np.unique(self._owners[memory.touch(self.starts, self.stops)]).tolist()
        return numbers


def _find_buffers(buffers: frozenset[str], table: TensorTable) -> Mask:
    """Which stored tensors are buffers, under whichever of their addresses."""
    rows = np.array([table.rows[address] for address in buffers], dtype=np.int64)
    is_buffer = np.zeros(len(table.addresses), dtype=np.bool_)
    is_buffer[np.where(table.alias_of[rows] == NOT_AN_ALIAS, rows, table.alias_of[rows])] = True
    return is_buffer


def _find_renormed(modules: Iterable[torch.nn.Module]) -> MemoryRanges:
    embeddings = [module for module in modules if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    return MemoryRanges(*locate(list_plain([module.weight for module in embeddings if module.max_norm is not None])))


def _refuse_strangers(rows: _Rows, is_stranger: Mask, modules: Mapping[str, Sequence[torch.nn.Module]]) -> None:
    """Say of rows that are no optimizer's what they are, as far as the modules of each section can tell."""
    sharded = {name for name, found in modules.items() if any(type(module).__name__ == _FSDP1_CLASS for module in found)}
    in_sharded = np.zeros(len(is_stranger), dtype=np.bool_)
    in_sharded[is_stranger] = [section_of(address) in sharded for address in rows.list_addresses(is_stranger)]
    params = [param for found in modules.values() for module in found for param in vars(module)["_parameters"].values()]
    frozen = MemoryRanges(*locate(list_plain([param for param in params if param is not None and not param.requires_grad])))
    rows.refuse(FSDP1, in_sharded)
    rows.refuse(FROZEN, is_stranger & frozen.touch(rows.starts, rows.stops))
    rows.refuse(_NOT_OWNED, is_stranger)


def _is_scattered(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()


def _share_storage(rows: _Rows, is_stranger: Mask) -> Mask:
    """Which rows lie in one storage with a stranger."""
    strangers = is_stranger & (rows.stops > rows.starts)
    if not strangers.any() or not rows.is_open.any():
        return np.zeros(len(is_stranger), dtype=np.bool_)
    storages = _find_storages(rows)
    return ~strangers & np.isin(storages, storages[strangers])


def _find_storages(rows: _Rows) -> Column:
    """Where the storage of each row begins. Nearly always that is where the tensor does, and no storage has to be asked."""
    storages = rows.starts.copy()
    for row, tensor in rows.tensors.items():
        if offset := tensor.storage_offset():
            storages[row] -= offset * tensor.element_size()
    return storages


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

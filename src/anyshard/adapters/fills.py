"""Which live memory is filled from which stored tensors, and what is newly made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from anyshard.adapters.findings import Findings
from anyshard.adapters.tensors import (
    array_bits,
    can_cast,
    check_storable,
    destination_of,
    dtype_name,
    footprint,
    inner_tensors,
    is_flattened,
    is_wrapper,
    torch_dtype,
)
from anyshard.errors import InvalidAppState, Mismatch
from anyshard.records.addresses import component, join_address, show
from anyshard.records.arrays import numpy_dtype
from anyshard.records.captured import Stored
from anyshard.records.handles import ArrayDestination, Destination
from anyshard.records.tables import NOT_AN_ALIAS, ShardTable, make_tensor_table, whole_shards
from anyshard.records.values import TensorMark, collect_marks, map_marks

Make: TypeAlias = Callable[[], Any]
NewTensor: TypeAlias = Callable[[TensorMark, tuple[int, ...], torch.dtype], torch.Tensor]
_MAX_OVERLAP_WORK = 10_000


@dataclass(slots=True)
class _Fill:
    """One piece of live memory, the stored tensors that want to fill it, and the live names it has."""

    row: int
    destination: Destination
    place: NDArray[np.generic]
    device: torch.device
    tensor: torch.Tensor | None
    rows: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fills:
    """The outcome: what is wanted of the checkpoint and where it goes, ordered by stored address."""

    wanted: ShardTable
    destinations: tuple[Destination, ...]
    ties: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


def make_on_cpu(mark: TensorMark, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new plain tensor for a stored one that has no live counterpart."""
    del mark
    return torch.empty(shape, dtype=dtype)


@final
class Filler:
    """Pairs live tensors with stored ones, checks each pair, and makes what is to be created."""

    def __init__(self, stored: Stored, findings: Findings) -> None:
        self._tensors = stored.tensors
        self._rows = {address: row for row, address in enumerate(stored.tensors.addresses)}
        self._findings = findings
        self._fills: dict[object, _Fill] = {}
        self._missing: list[tuple[str, object]] = []
        self._made: dict[tuple[int, object], torch.Tensor] = {}

    def shape_of(self, mark: TensorMark) -> tuple[int, ...]:
        """The stored shape."""
        return self._tensors.shape(self._rows[mark.address])

    def dtype_of(self, mark: TensorMark) -> str:
        """The name of the stored dtype."""
        return self._tensors.dtypes[self._rows[mark.address]]

    def fits(self, node: object, live: torch.Tensor) -> bool:
        """Whether a stored node is a tensor of the live one's shape and dtype."""
        if type(node) is not TensorMark or node.kind != "tensor":
            return False
        return self.shape_of(node) == tuple(live.shape) and self.dtype_of(node) == dtype_name(live.dtype)

    def fill(self, node: object, live: torch.Tensor, address: str) -> None:
        """Fill a live tensor from a stored node, if it is selected and fits; else record the difference."""
        if is_flattened(live):
            self._fill_inner(node, live, address)
        elif self._findings.selection.takes(address):
            check_storable(live, address)
            self._findings.match(address)
            if self._agree(node, live, address) and isinstance(node, TensorMark):
                self._add_tensor(node, live, address)

    def miss(self, live: torch.Tensor, address: str) -> None:
        """Record a live tensor without a stored one; not missing after all if another of its names is stored."""
        if self._findings.selection.takes(address):
            if not is_flattened(live):
                check_storable(live, address)
            self._missing.append((address, _identity(live)))

    def make(self, node: object, *, new_tensor: NewTensor = make_on_cpu, arrays: dict[str, NDArray[Any]] | None = None) -> Make:
        """What gives a stored tree with all its leaves in place of the marks; call it after the fill.

        `arrays` are live arrays by address that are filled instead of new ones, where they fit.
        """
        made = {mark.address: self._make_leaf(mark, new_tensor, arrays or {}) for mark in collect_marks(node)}
        return lambda: map_marks(node, lambda mark: made[mark.address]())

    def finish(self) -> Fills:
        """Tables of all fills; raises `InvalidAppState` for destinations that overlap one another or themselves."""
        for address, identity in self._missing:
            if identity not in self._fills:
                self._findings.miss(address)
        fills = sorted(self._fills.values(), key=lambda fill: min(fill.rows))
        _check_places(fills)
        return Fills(
            self._tabulate([min(fill.rows) for fill in fills]),
            tuple(fill.destination for fill in fills),
            tuple(self._list_ties(fills)),
            tuple(min(fill.names, key=str.encode) for fill in fills),
            tuple(fill.tensor for fill in fills if fill.tensor is not None),
        )

    def _fill_inner(self, node: object, live: torch.Tensor, address: str) -> None:
        nodes = node if isinstance(node, dict) else {}
        for name, inner in inner_tensors(live).items():
            if name in nodes:
                self.fill(nodes[name], inner, join_address(address, component(name)))
            else:
                self._findings.differ(
                    Mismatch.KIND, address, expected=f"{type(live).__name__} with {name}", found=_describe(node)
                )

    def _agree(self, node: object, live: torch.Tensor, address: str) -> bool:
        if not isinstance(node, TensorMark) or node.kind != "tensor":
            self._findings.differ(Mismatch.KIND, address, expected="a tensor", found=_describe(node))
            return False
        shape, live_shape = self.shape_of(node), tuple(live.shape)
        if shape != live_shape:
            self._findings.differ(Mismatch.SHAPE, address, expected=str(live_shape), found=str(shape))
            return False
        dtype, live_dtype = self.dtype_of(node), dtype_name(live.dtype)
        if dtype != live_dtype and not (self._findings.options.cast and can_cast(torch_dtype(dtype), live.dtype)):
            self._findings.differ(Mismatch.DTYPE, address, expected=live_dtype, found=dtype)
            return False
        return True

    def _add_tensor(self, mark: TensorMark, live: torch.Tensor, address: str) -> None:
        row, identity = self._resolve(mark), _identity(live)
        if identity not in self._fills:
            destination = destination_of(live, torch_dtype(self.dtype_of(mark)))
            self._fills[identity] = _Fill(row, destination, footprint(live), live.device, live)
        self._fills[identity].rows.add(row)
        self._fills[identity].names.append(address)

    def _make_leaf(self, mark: TensorMark, new_tensor: NewTensor, arrays: dict[str, NDArray[Any]]) -> Make:
        if mark.kind == "tensor":
            tensor = self._make_tensor(mark, new_tensor)
            return lambda: tensor
        if mark.kind == "ndarray":
            array = self._choose_array(mark, arrays)
            return lambda: array
        data = np.empty(self.shape_of(mark), dtype=np.uint8)
        self._add_array(mark, data)
        return data.tobytes

    def _make_tensor(self, mark: TensorMark, new_tensor: NewTensor) -> torch.Tensor:
        tensor = new_tensor(mark, self.shape_of(mark), torch_dtype(self.dtype_of(mark)))
        # Leaves that were tied when they were saved come back as one tensor.
        tensor = self._made.setdefault((self._resolve(mark), (tensor.device, tensor.stride())), tensor)
        self._add_tensor(mark, tensor, mark.address)
        self._findings.created.append(mark.address)
        return tensor

    def _choose_array(self, mark: TensorMark, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
        shape, dtype = self.shape_of(mark), numpy_dtype(self.dtype_of(mark))
        live = arrays.get(mark.address)
        if live is None or live.shape != shape or live.dtype != dtype or not live.flags.writeable:
            live = np.empty(shape, dtype)
            self._findings.created.append(mark.address)
        self._add_array(mark, live)
        return live

    def _add_array(self, mark: TensorMark, array: NDArray[Any]) -> None:
        row, bits = self._resolve(mark), array_bits(array)
        fill = self._fills.setdefault(
            ("array", id(array)), _Fill(row, ArrayDestination(bits), array, torch.device("cpu"), tensor=None)
        )
        fill.rows.add(row)
        fill.names.append(mark.address)

    def _resolve(self, mark: TensorMark) -> int:
        row = self._rows[mark.address]
        alias = int(self._tensors.alias_of[row])
        return row if alias == NOT_AN_ALIAS else alias

    def _tabulate(self, rows: list[int]) -> ShardTable:
        table, kept = self._tensors, sorted(set(rows))
        tensors = make_tensor_table(
            [table.addresses[row] for row in kept], [table.dtypes[row] for row in kept], [table.shape(row) for row in kept], {}
        )
        whole = whole_shards(tensors)
        repeated = np.searchsorted(np.array(kept, dtype=np.int64), np.array(rows, dtype=np.int64))
        return ShardTable(tensors, whole.tensor[repeated], whole.offsets[repeated], whole.lengths[repeated])

    def _list_ties(self, fills: Iterable[_Fill]) -> Iterable[tuple[str, str]]:
        for fill in fills:
            first, *others = sorted(fill.rows)
            yield from ((self._tensors.addresses[first], self._tensors.addresses[other]) for other in others)


def _identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same elements in memory, whether or not they are the same object."""
    if is_wrapper(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _describe(node: object) -> str:
    if isinstance(node, TensorMark):
        return f"a stored {node.kind}"
    return f"a stored {type(node).__name__}"


def _check_places(fills: Iterable[_Fill]) -> None:
    by_device: dict[torch.device, list[tuple[int, int, _Fill]]] = {}
    for fill in fills:
        if fill.place.size:
            _check_self_overlap(fill)
            by_device.setdefault(fill.device, []).append((*byte_bounds(fill.place), fill))
    for places in by_device.values():
        _check_overlap(sorted(places, key=lambda place: place[:2]))


def _check_self_overlap(fill: _Fill) -> None:
    reach = 0
    for stride, length in sorted((abs(s), n) for s, n in zip(fill.place.strides, fill.place.shape, strict=True) if n > 1):
        if stride < reach + fill.place.itemsize:
            raise InvalidAppState(
                f"{show(fill.names[0])}: expected a tensor whose elements have memory of their own, found an expanded one; "
                "make it contiguous before the load"
            )
        reach += stride * (length - 1)


def _check_overlap(places: list[tuple[int, int, _Fill]]) -> None:
    open_places: list[tuple[int, int, _Fill]] = []
    for low, high, fill in places:
        open_places = [place for place in open_places if place[1] > low]
        for _, _, other in open_places:
            if _share_memory(fill.place, other.place):
                raise InvalidAppState(
                    f"{show(other.names[0])} and {show(fill.names[0])}: expected tensors with memory of their own, found that "
                    "they overlap in part; exclude one of them"
                )
        open_places.append((low, high, fill))


def _share_memory(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MAX_OVERLAP_WORK)  # type: ignore[arg-type]  # the stub knows two values only
    except np.exceptions.TooHardError:
        return True

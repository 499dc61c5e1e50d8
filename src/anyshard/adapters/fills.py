"""Which live memory is filled from which stored tensors, and what is newly made for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.findings import Findings
from anyshard.adapters.overlaps import Owner, find_common_runs, find_overlaps, make_place, overlaps_itself
from anyshard.adapters.tensors import (
    array_bits,
    can_cast,
    check_storable,
    destination_of,
    dtype_name,
    identity,
    inner_tensors,
    is_flattened,
    torch_dtype,
)
from anyshard.errors import InvalidAppState, Mismatch
from anyshard.records.addresses import component, join_address, show
from anyshard.records.arrays import numpy_dtype
from anyshard.records.captured import Stored, StoredRun
from anyshard.records.handles import ArrayDestination, Destination
from anyshard.records.tables import NOT_AN_ALIAS, ShardTable, make_tensor_table, whole_shards
from anyshard.records.values import TensorMark, collect_marks, map_marks

Make: TypeAlias = Callable[[], Any]
NewTensor: TypeAlias = Callable[[TensorMark, tuple[int, ...], torch.dtype], torch.Tensor]
Tie: TypeAlias = tuple[StoredRun, StoredRun]


@dataclass(slots=True)
class _Fill:
    """One piece of live memory, the stored tensors that want to fill it, and the live names it has.

    `is_image`: its memory will hold the stored bytes as they are.
    """

    owner: Owner
    destination: Destination
    is_image: bool
    rows: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fills:
    """The outcome: what is wanted of the checkpoint and where it goes, ordered by stored address."""

    wanted: ShardTable
    destinations: tuple[Destination, ...]
    ties: tuple[Tie, ...]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


def make_on_cpu(mark: TensorMark, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new plain tensor for a stored one that has no live counterpart."""
    del mark
    return torch.empty(shape, dtype=dtype, device="cpu")


@final
class Filler:
    """Pairs live tensors with stored ones, checks each pair, and makes what is to be created."""

    def __init__(self, stored: Stored, findings: Findings) -> None:
        self._tensors = stored.tensors
        self._rows = stored.tensors.rows
        self._findings = findings
        self._fills: dict[object, _Fill] = {}
        self._missing: list[tuple[str, object]] = []
        self._ties: list[Tie] = []
        self._made: dict[tuple[int, object], torch.Tensor] = {}

    def shape_of(self, mark: TensorMark) -> tuple[int, ...]:
        """The stored shape."""
        return self._tensors.shape(self._rows[mark.address])

    def dtype_of(self, mark: TensorMark) -> str:
        """The name of the stored dtype."""
        return self._tensors.dtypes[self._rows[mark.address]]

    def row_of(self, mark: TensorMark) -> int:
        """The row of the stored tensor; equal for tied names."""
        row = self._rows[mark.address]
        alias = int(self._tensors.alias_of[row])
        return row if alias == NOT_AN_ALIAS else alias

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
            self._missing.append((address, identity(live)))

    def make(self, node: object, *, new_tensor: NewTensor = make_on_cpu, arrays: dict[str, NDArray[Any]] | None = None) -> Make:
        """What gives a stored tree with all its leaves in place of the marks; call it after the fill.

        `arrays` are live arrays by address that are filled instead of new ones, where they fit.
        """
        made = {mark.address: self._make_leaf(mark, new_tensor, arrays or {}) for mark in collect_marks(node)}
        return (lambda: map_marks(node, lambda mark: made[mark.address]())) if made else (lambda: node)

    def finish(self) -> Fills:
        """Tables of all fills. Destinations that overlap are tied there; raises `InvalidAppState` where that is not possible."""
        for address, of_live in self._missing:
            if of_live not in self._fills:
                self._findings.miss(address)
        fills = sorted(self._fills.values(), key=lambda fill: min(fill.rows))
        for fill in fills:
            if len(fill.rows) > 1:
                self._tie_rows(sorted(fill.rows))
        self._tie_overlaps(fills)
        return Fills(
            self._tabulate([min(fill.rows) for fill in fills]),
            tuple(fill.destination for fill in fills),
            tuple(self._ties),
            tuple(min(fill.names, key=str.encode) for fill in fills),
            tuple(fill.owner for fill in fills if isinstance(fill.owner, torch.Tensor)),
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
            cast = ", whose numbers it does not hold, so that cast=True does not help" if self._findings.options.cast else ""
            self._findings.differ(Mismatch.DTYPE, address, expected=live_dtype, found=dtype + cast)
            return False
        return True

    def _add_tensor(self, mark: TensorMark, live: torch.Tensor, address: str) -> None:
        key = identity(live)
        if key not in self._fills:
            dtype = torch_dtype(self.dtype_of(mark))
            is_image = dtype == live.dtype and not live.is_conj() and not live.is_neg()
            self._fills[key] = _Fill(live, destination_of(live, dtype), is_image)
        self._fills[key].rows.add(self.row_of(mark))
        self._fills[key].names.append(address)

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
        tensor = self._made.setdefault((self.row_of(mark), (tensor.device, tensor.stride())), tensor)
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
        key = ("array", id(array))
        if key not in self._fills:
            self._fills[key] = _Fill(array, ArrayDestination(array_bits(array)), is_image=True)
        fill = self._fills[key]
        fill.rows.add(self.row_of(mark))
        fill.names.append(mark.address)

    def _tabulate(self, rows: list[int]) -> ShardTable:
        table, kept = self._tensors, sorted(set(rows))
        tensors = make_tensor_table(
            [table.addresses[row] for row in kept], [table.dtypes[row] for row in kept], [table.shape(row) for row in kept], {}
        )
        whole = whole_shards(tensors)
        repeated = np.searchsorted(np.array(kept, dtype=np.int64), np.array(rows, dtype=np.int64))
        return ShardTable(tensors, whole.tensor[repeated], whole.offsets[repeated], whole.lengths[repeated])

    def tie(self, marks: Sequence[TensorMark]) -> None:
        """Have the bytes of stored tensors of one shape and dtype compared before the fill: they must be equal."""
        self._tie_rows(sorted({self.row_of(mark) for mark in marks}))

    def _tie_rows(self, rows: Sequence[int]) -> None:
        first, *others = (self._whole_run(row) for row in rows)
        self._ties.extend((first, other) for other in others)

    def _whole_run(self, row: int) -> StoredRun:
        shape = self._tensors.shape(row)
        return StoredRun(self._tensors.addresses[row], tuple(range(len(shape))), 0, math.prod(shape))

    def _tie_overlaps(self, fills: Sequence[_Fill]) -> None:
        """Tie what lies on the same memory, such as a transposed view: it can be loaded if the stored bytes agree."""
        by_name = {fill.names[0]: fill for fill in fills}
        for name, fill in by_name.items():
            if overlaps_itself(fill.owner):
                raise InvalidAppState(
                    f"{show(name)}: expected a tensor whose elements have memory of their own, found an expanded one; "
                    "make it contiguous before the load"
                )
        for one, other in find_overlaps(make_place(name, fill.owner) for name, fill in by_name.items()):
            pair = by_name[one.name], by_name[other.name]
            runs = find_common_runs(one, other) if pair[0].is_image and pair[1].is_image else None
            if runs is None:
                raise InvalidAppState(
                    f"{show(one.name)} and {show(other.name)}: expected tensors with memory of their own, or dense ones of equal "
                    f"dtypes, found that they overlap; leave one of them out with exclude=[...]"
                )
            first, second = (
                StoredRun(self._tensors.addresses[min(fill.rows)], *run) for fill, run in zip(pair, runs, strict=True)
            )
            self._ties.append((first, second))


def _describe(node: object) -> str:
    if isinstance(node, TensorMark):
        return f"a stored {node.kind}"
    return f"a stored {type(node).__name__}"

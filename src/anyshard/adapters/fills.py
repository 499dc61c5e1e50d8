"""Which live memory is filled from which stored tensors, and what is newly made for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.findings import Findings
from anyshard.adapters.overlaps import Owner, find_common_runs, find_overlaps, make_place, overlaps_itself
from anyshard.adapters.placements import regions_of
from anyshard.adapters.tensors import (
    array_bits,
    can_cast,
    check_storable,
    destination_of,
    dtype_name,
    identity,
    inner_tensors,
    is_dtensor,
    is_flattened,
    local_tensor,
    torch_dtype,
)
from anyshard.errors import InvalidAppState, Mismatch
from anyshard.records.addresses import component, join_address, show
from anyshard.records.arrays import numpy_dtype
from anyshard.records.captured import Stored, StoredRun
from anyshard.records.handles import ArrayDestination, Destination, Slices
from anyshard.records.tables import NOT_AN_ALIAS, ShardTable, make_tensor_table
from anyshard.records.values import TensorMark, collect_marks, map_marks

Make: TypeAlias = Callable[[], Any]
NewTensor: TypeAlias = Callable[[TensorMark, tuple[int, ...], torch.dtype], torch.Tensor]
Tie: TypeAlias = tuple[StoredRun, StoredRun]
Region: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, lengths


@dataclass(slots=True)
class _Fill:
    """One live tensor or array, the stored tensors that want to fill it, and the live names it has.

    `owner` is its memory on this rank: the local tensor of a DTensor. `regions` are those that this rank holds, each with a
    destination. `is_image`: the memory will hold the stored bytes, all of them, as they are.
    """

    live: Owner
    owner: Owner
    regions: tuple[Region, ...]
    destinations: tuple[Destination, ...]
    is_image: bool
    rows: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The stored tensor that it is filled from; others must have the same bytes."""
        return min(self.rows)

    @property
    def name(self) -> str:
        """The smallest of its names."""
        return min(self.names, key=str.encode)


@dataclass(frozen=True, slots=True)
class Fills:
    """The outcome: the regions that are wanted of the checkpoint and where each goes, ordered by stored address, then offsets.

    `tensors` are all that will have changed: plain and local tensors, and the DTensors around them.
    """

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
        fills = sorted(self._fills.values(), key=lambda fill: fill.row)
        for fill in fills:
            if len(fill.rows) > 1:
                self._tie_rows(sorted(fill.rows), fill.regions)
        self._tie_overlaps(fills)
        pieces = [(fill, *piece) for fill in fills for piece in zip(fill.regions, fill.destinations, strict=True)]
        pieces.sort(key=lambda piece: (piece[0].row, piece[1]))
        return Fills(
            self._tabulate([(fill.row, region) for fill, region, _ in pieces]),
            tuple(destination for _, _, destination in pieces),
            tuple(self._ties),
            tuple(fill.name for fill, _, _ in pieces),
            tuple(_list_changed(fills)),
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
            self._fills[key] = _make_fill(live, torch_dtype(self.dtype_of(mark)), address)
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
        tensor = self._made.setdefault((self.row_of(mark), _layout_of(tensor)), tensor)
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
            whole, destination = _whole(array.shape), ArrayDestination(array_bits(array))
            self._fills[key] = _Fill(array, array, (whole,), (destination,), is_image=True)
        fill = self._fills[key]
        fill.rows.add(self.row_of(mark))
        fill.names.append(mark.address)

    def _tabulate(self, pieces: Sequence[tuple[int, Region]]) -> ShardTable:
        table, kept = self._tensors, sorted({row for row, _ in pieces})
        tensors = make_tensor_table(
            [table.addresses[row] for row in kept], [table.dtypes[row] for row in kept], [table.shape(row) for row in kept], {}
        )
        number = {row: position for position, row in enumerate(kept)}
        offsets = np.zeros((len(pieces), tensors.shapes.shape[1]), dtype=np.int64)
        lengths = np.ones_like(offsets)
        for position, (_, region) in enumerate(pieces):
            ndim = len(region[0])
            offsets[position, :ndim], lengths[position, :ndim] = region
        return ShardTable(tensors, np.array([number[row] for row, _ in pieces], dtype=np.int64), offsets, lengths)

    def tie(self, marks: Sequence[TensorMark]) -> None:
        """Have the bytes of stored tensors of one shape and dtype compared before the fill: they must be equal."""
        rows = sorted({self.row_of(mark) for mark in marks})
        self._tie_rows(rows, [_whole(self._tensors.shape(rows[0]))])

    def _tie_rows(self, rows: Sequence[int], regions: Iterable[Region]) -> None:
        for region in regions:
            first, *others = (self._find_slab(row, region) for row in rows)
            self._ties.extend((first, other) for other in others)

    def _find_slab(self, row: int, region: Region) -> StoredRun:
        """The thinnest slab of a stored tensor, from end to end in all dims but one, that a region lies in."""
        (offsets, lengths), shape = region, self._tensors.shape(row)
        address, dims, nelements = self._tensors.addresses[row], tuple(range(len(shape))), math.prod(shape)
        if lengths == shape:
            return StoredRun(address, dims, 0, nelements)
        across = min(dims, key=lambda dim: lengths[dim] / shape[dim])
        order = (across, *(dim for dim in dims if dim != across))
        start, thickness = (num * (nelements // shape[across]) for num in (offsets[across], lengths[across]))
        return StoredRun(address, order, start, start + thickness)

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
                    f"{show(one.name)} and {show(other.name)}: expected tensors with memory of their own, or whole dense ones "
                    f"of equal dtypes, found that they overlap; leave one of them out with exclude=[...]"
                )
            first, second = (StoredRun(self._tensors.addresses[fill.row], *run) for fill, run in zip(pair, runs, strict=True))
            self._ties.append((first, second))


def _make_fill(live: torch.Tensor, dtype: torch.dtype, address: str) -> _Fill:
    """How a live tensor takes elements stored as `dtype`, region by region."""
    owner, whole = local_tensor(live, address), _whole(live.shape)
    places: dict[Region, Slices] = {whole: ()}
    if is_dtensor(live):
        held = regions_of(live, address)
        pairs = zip(held.offsets.tolist(), held.lengths.tolist(), strict=True)
        places = {(tuple(offsets), tuple(lengths)): held.slices(row) for row, (offsets, lengths) in enumerate(pairs)}
    destinations = tuple(destination_of(owner[where], dtype) for where in places.values())
    is_image = whole in places and dtype == live.dtype and not owner.is_conj() and not owner.is_neg()
    return _Fill(live, owner, tuple(places), destinations, is_image)


def _whole(shape: Sequence[int]) -> Region:
    return (0,) * len(shape), tuple(shape)


def _layout_of(tensor: torch.Tensor) -> object:
    on_ranks = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
    return tensor.device, tensor.stride(), on_ranks


def _list_changed(fills: Iterable[_Fill]) -> Iterator[torch.Tensor]:
    for fill in fills:
        if fill.regions and isinstance(fill.owner, torch.Tensor):
            yield fill.owner
            # Autograd counts the versions of a DTensor apart from those of the local tensor.
            if isinstance(fill.live, torch.Tensor) and fill.live is not fill.owner:
                yield fill.live


def _describe(node: object) -> str:
    if isinstance(node, TensorMark):
        return f"a stored {node.kind}"
    return f"a stored {type(node).__name__}"

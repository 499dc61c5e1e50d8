"""The rows of a plan that are to be staged, and where their tensors lie. What these are is known to adapters and to `stage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.engine.images import ImageLayout
from anyshard.records.captured import MemoryFacts
from anyshard.records.handles import RangeSource, Source
from anyshard.records.tables import IntColumn


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the plan that have elements: number, source, tensor and where it lies; None and 0 of what has to be read.

    `is_sure`: that its tensor was at `address` a moment ago, as was found of all `known` ones together.
    """

    number: IntColumn
    sources: list[Any]
    tensors: list[Any]
    address: IntColumn
    is_host: NDArray[np.bool_]
    is_dense: NDArray[np.bool_]
    is_sure: NDArray[np.bool_]

    def pick(self, which: NDArray[np.bool_]) -> Rows:
        """Some of them."""
        if which.all():
            return self
        at = np.flatnonzero(which).tolist()
        sources, tensors = [self.sources[i] for i in at], [self.tensors[i] for i in at]
        flags = (flag[which] for flag in (self.is_host, self.is_dense, self.is_sure))
        return Rows(self.number[which], sources, tensors, self.address[which], *flags)


def take_rows(sources: Sequence[Source], layout: ImageLayout, known: MemoryFacts | None) -> Rows:
    """The rows of a plan; raises `InvalidAppState` for one whose tensor has other memory than it had when it was captured."""
    number = np.flatnonzero(layout.row_nbytes)
    picked: list[Any] = [sources[row] for row in number.tolist()]
    tensors = [getattr(source, "tensor", None) for source in picked]
    is_cut = np.array([tensor is None for tensor in tensors], dtype=np.bool_)
    for at in np.flatnonzero(is_cut).tolist():
        tensors[at] = _cut(picked[at])
    facts = _know_nothing(len(number)) if known is None else known.pick(number)
    is_sure = (facts.address != 0) & ~is_cut
    rows = Rows(number, picked, tensors, facts.address, facts.is_host, facts.is_dense, is_sure)
    _ask(rows, np.flatnonzero(~is_sure).tolist())
    return rows


def _know_nothing(num: int) -> MemoryFacts:
    return MemoryFacts(np.zeros(num, dtype=np.int64), *np.zeros((2, num), dtype=np.bool_))


def _ask(rows: Rows, unsure: list[int]) -> None:
    """Fill in where these rows lie."""
    tensors, sources = [rows.tensors[at] for at in unsure], [rows.sources[at] for at in unsure]
    found = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    before = [getattr(source, "data_ptr", None) for source in sources]
    for source, then, now in zip(sources, before, found, strict=True) if before != found else ():
        if then not in (None, now):
            source.bits  # noqa: B018 - raises the error that says so: it was freed or moved, and copying it would crash
    rows.address[unsure] = found
    rows.is_host[unsure] = list_host(tensors)
    rows.is_dense[unsure] = [tensor is not None and tensor.is_contiguous() for tensor in tensors]


def list_host(tensors: Sequence[Any]) -> list[bool]:
    """Which of these are tensors in host memory."""
    return [tensor is not None and tensor.is_cpu for tensor in tensors]


def _cut(source: Source) -> Any:
    """What a range is of a dense tensor, as bits; None of any other source."""
    start, nbytes = 0, source.nbytes
    while isinstance(source, RangeSource):
        start, source = start + source.start, source.source
    bits = getattr(source, "bits", None)
    if bits is None or not bits.is_contiguous():
        return None
    return bits.view(-1)[start // bits.element_size() : (start + nbytes) // bits.element_size()]

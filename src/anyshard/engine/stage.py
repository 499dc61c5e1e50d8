"""Staging: copies one rank's share of an app state out of the training memory into the images in an arena.

States of a snapshot: made -> begun (all that is not lazy is copied; of the rest, words are remembered) -> finished (the rest is
copied too, and has these words, so nothing changed in between). Tensors are reached through what the sources of adapters have
beside `read_into`: `tensor`, the plain tensor whose elements in C order are the source's bytes once conj and neg views are
resolved, `bits`, these elements as integers, and `data_ptr`, the tensor's when it was taken. Other sources are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.engine.images import ImageLayout, Images
from anyshard.engine.lazy_rows import LazyRows
from anyshard.engine.rows import Rows, take_rows
from anyshard.engine.tiny_rows import TinyRows, find_tiny
from anyshard.engine.words import WORD_NBYTES, WordPlaces, choose_words
from anyshard.errors import InvalidAppState, TornSnapshot
from anyshard.records.addresses import show
from anyshard.records.captured import MemoryFacts
from anyshard.records.handles import Source
from anyshard.records.tables import IntColumn

_POLL_S = 0.001
_SHOWN = 10
_MIN_SAMPLES, _STRETCH_NBYTES = 16, 64 << 10  # of a row on a device; of others see `words`

# Copied as they are, bit by bit. Of other dtypes torch lacks the operator, or makes other bits of some (a bool that is 2).
_COPIED = frozenset(
    getattr(torch, name) for name in "float64 float32 float16 bfloat16 complex64 complex128 int64 int32 int16 int8 uint8".split()
)

# One call for all tensors lets other threads run once, and 100,000 calls lose the interpreter to them again and again. The name
# is private to torch, so it may be gone.
_COPY_ALL = getattr(torch, "_foreach_copy_", None)

Tensors = Sequence[torch.Tensor]
_Seen = tuple[bytes, list[torch.dtype], list[int]]  # rows, and of their tensors the dtypes and lengths


def register_pages(memory: memoryview) -> Callable[[], None]:
    """Pin an arena's memory if this process uses CUDA, so that copies from the device run beside it; gives what undoes it."""
    cuda, pages = cast("Any", torch.cuda), np.frombuffer(memory, np.uint8)
    address, nbytes = pages.ctypes.data, pages.nbytes
    if not cuda.is_initialized():
        return _do_nothing
    if int(cuda.cudart().cudaHostRegister(address, nbytes, 0)):  # not allowed, or too much to pin: copies are slower
        _clear_error()
        return _do_nothing
    return partial(cuda.cudart().cudaHostUnregister, address)


def _clear_error() -> None:
    """Take away the error of a refused call, which CUDA keeps for whatever kernel this thread launches next."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def refuse_capture() -> None:
    """Raise if a CUDA graph is being captured: what a save does on the device would become part of it, or end it."""
    if _is_capturing():
        raise InvalidAppState("expected a save outside of CUDA graphs, found that one is being captured: save after that")


def _is_capturing() -> bool:
    cuda = cast("Any", torch.cuda)
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _do_nothing() -> None:
    return


@final
class Staging:
    """One snapshot's copy into an arena. After `begin` it holds the tensors of lazy rows alone, after `finish` none.

    `sources`, `is_lazy` and `addresses` are per row of the plan's shards. The memory of a lazy row is its tensor's own, dense and
    without conj and neg views. Rows that cannot be lazy (other sources, less than 8 bytes) are copied by `begin`.
    `known` says where they lie, found just before on this thread: tensors are not asked for what it says.
    """

    def __init__(
        self,
        images: Images,
        sources: Sequence[Source],
        *,
        is_lazy: NDArray[np.bool_],
        addresses: Sequence[str],
        known: MemoryFacts | None = None,
    ) -> None:
        self._images = images
        self._sources = sources
        self._is_lazy = is_lazy
        self._addresses = addresses
        self._known = known
        self._lazy: list[LazyRows | _DeviceRows] = []
        self.lazy_nbytes = 0  # of the rows that `finish` will copy

    def begin(self) -> None:
        """Copy all rows that are not lazy; called once, on the training thread. After an error the snapshot is over."""
        refuse_capture()
        try:
            # What is made in inference mode can never be written outside of it. Leaving it turns gradients on, so both.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._begin()
        except BaseException:
            self.drop()
            raise
        finally:
            self._sources = ()

    def drop(self) -> None:
        """Give the snapshot up: returns once no copy into the arena is under way and no tensor is held."""
        lazy, self._lazy = self._lazy, []
        for part in lazy:
            part.drop()

    def finish(self, check: Callable[[], None]) -> None:
        """Copy the lazy rows; called once, on any thread. `check` is called now and then, and what it raises is raised.

        Raises `TornSnapshot` if one of them was changed or freed since `begin`. In any case all tensors are let go.
        """
        lazy, self._lazy = self._lazy, []
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                torn = [row for part in lazy for row in part.finish(check)]
        finally:
            for part in lazy:
                part.drop()
        if torn:
            raise _tear([self._addresses[row] for row in sorted(torn)])

    def _begin(self) -> None:
        arena, layout = self._images.arena, self._images.layout
        if not isinstance(views := arena.views, _Views) or views.layout is not layout:
            _clear_gaps(layout, arena.memory)
            views = arena.views = _Views(layout, arena.memory)
        rows = take_rows(self._sources, layout, self._known)
        is_host, is_read = rows.is_host, rows.address == 0
        is_lazy = self._is_lazy[rows.number] & ~is_read & _can_be_lazy(rows, layout)
        is_device = ~is_host & ~is_read
        is_tiny = ~is_lazy & find_tiny(rows, layout)
        eager = _split_devices(rows.pick(is_device & ~is_lazy), views)
        later = _split_devices(rows.pick(is_device & is_lazy), views)
        self._lazy += later  # before they begin: whatever fails now, all of them are waited for
        if len((lazy := rows.pick(is_host & is_lazy)).number):
            places = views.choose_words(lazy.number)
            self._lazy.append(LazyRows(self._images, lazy.number, tensors=lazy.tensors, address=lazy.address).begin(places))
        self.lazy_nbytes = int(layout.row_nbytes[rows.number[is_lazy]].sum())
        try:
            for part in eager:
                part.begin()
            for part in later:
                part.remember().begin()
            views.tiny.copy(rows.number[is_tiny], rows.address[is_tiny])
            _copy(rows.pick(is_host & ~is_lazy & ~is_tiny), views)
            _read(rows.pick(is_read), layout, arena.memory)
        finally:
            for part in eager:
                part.drop()


def _can_be_lazy(rows: Rows, layout: ImageLayout) -> NDArray[np.bool_]:
    """Which rows are dense and as long as a word: their first and their last bytes may then be looked at."""
    fits: NDArray[np.bool_] = rows.is_dense & (layout.row_nbytes[rows.number] >= WORD_NBYTES)
    return fits


def _clear_gaps(layout: ImageLayout, memory: memoryview) -> None:
    """Make zeros of all that is in no extent: an earlier layout had extents there."""
    order = np.argsort(layout.row_position, kind="stable")
    start, nbytes = layout.row_position[order], layout.row_nbytes[order]
    begins = [0, *(start + nbytes).tolist()]
    for begin, end in zip(begins, [*start.tolist(), layout.total_nbytes], strict=True):
        if begin < end:
            memory[begin:end] = bytes(end - begin)


def _copy(rows: Rows, views: _Views) -> None:
    """Copy tensors in host memory."""
    tensors, dtypes = rows.tensors, [tensor.dtype for tensor in rows.tensors]
    if not _COPIED.issuperset(dtypes):
        pairs = zip(rows.sources, tensors, dtypes, strict=True)
        tensors = [tensor if dtype in _COPIED else source.bits for source, tensor, dtype in pairs]
    try:
        _copy_all(views.find_targets(rows.number, tensors, dtypes=dtypes), tensors)
    except RuntimeError:  # tensors of other shapes than the last ones, which can only fail to fit; or the same error again
        _copy_all(views.make_targets(rows.number, tensors), tensors)


def _copy_all(targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if _COPY_ALL is not None and tensors:
        _COPY_ALL(targets, tensors)
        return
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)


def _read(rows: Rows, layout: ImageLayout, memory: memoryview) -> None:
    """Copy what has no tensor, or none that is dense."""
    for source, row in zip(rows.sources, rows.number.tolist(), strict=True):
        start = int(layout.row_position[row])
        source.read_into(0, memory[start : start + int(layout.row_nbytes[row])])


@final
class _Views:
    """An arena as tensors, for the rows of one layout; kept with it, for making 100,000 of them takes as long as the copy."""

    def __init__(self, layout: ImageLayout, memory: memoryview) -> None:
        self.layout = layout
        self.tiny = TinyRows(layout, memory)
        self._bytes = torch.from_numpy(np.frombuffer(memory, np.uint8))
        # What is kept, with what it is for: one object each, which no interrupt leaves half done.
        self._kept: tuple[_Seen, list[torch.Tensor]] = (b"", [], []), []
        none: IntColumn = np.zeros(0, dtype=np.int64)
        self._words = none, WordPlaces(none, none)

    def find_targets(self, number: IntColumn, tensors: Tensors, *, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """As `make_targets`; the last ones are kept, for tensors of the same `dtypes` and lengths.

        Their shapes are not looked at: making 100,000 of these sets off a garbage collection, which takes longer than the copy.
        """
        seen = number.tobytes(), dtypes, [tensor.nbytes for tensor in tensors]
        if seen != self._kept[0]:
            self._kept = seen, self.make_targets(number, tensors)
        return self._kept[1]

    def make_targets(self, number: IntColumn, tensors: Tensors) -> list[torch.Tensor]:
        """The extents of some rows, dense, with the dtypes and shapes of these tensors."""
        typed = {tensor.dtype: self._bytes.view(tensor.dtype) for tensor in tensors}
        position, nbytes = (column[number].tolist() for column in (self.layout.row_position, self.layout.row_nbytes))
        targets = []
        for tensor, start, length in zip(tensors, position, nbytes, strict=True):
            if tensor.nbytes != length:
                raise ValueError(f"expected a tensor of {length} bytes for this row of the plan, found one of {tensor.nbytes}")
            shape, itemsize = tensor.shape, tensor.itemsize
            targets.append(typed[tensor.dtype].as_strided(shape, _dense_strides(shape), start // itemsize))
        return targets

    def choose_words(self, number: IntColumn) -> WordPlaces:
        """Which words of lazy rows are remembered; the last choice is kept."""
        if not np.array_equal(number, self._words[0]):
            self._words = number, choose_words(self.layout.row_nbytes[number])
        return self._words[1]


def _dense_strides(shape: torch.Size) -> list[int]:
    strides, stride = [], 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return strides[::-1]


def _split_devices(rows: Rows, views: _Views) -> list[_DeviceRows]:
    bits = [getattr(source, "bits", tensor) for source, tensor in zip(rows.sources, rows.tensors, strict=True)]
    devices = {one.device: [at for at, other in enumerate(bits) if other.device == one.device] for one in bits}
    return [_DeviceRows(rows.number[at], [bits[i] for i in at], views) for at in devices.values()]


@final
class _DeviceRows:
    """Rows on one device, copied on a stream of their own behind what the device was told before."""

    def __init__(self, number: IntColumn, bits: list[torch.Tensor], views: _Views) -> None:
        self._number = number
        self._bits = bits  # held until they are copied
        self._targets = views.make_targets(number, bits)
        self._stream = _SideStream(bits[0].device)
        self._samples: dict[torch.dtype, torch.Tensor] = {}

    def remember(self) -> _DeviceRows:
        """Have the device take samples of each row."""
        for dtype in {bits.dtype for bits in self._bits}:
            self._samples[dtype] = torch.cat([_sample(bits) for bits in self._bits if bits.dtype == dtype])
        return self

    def begin(self) -> _DeviceRows:
        """Have the device copy when it can."""
        self._stream.copy(self._targets, self._bits)
        return self

    def wait(self, check: Callable[[], None]) -> None:
        """Return when all is copied."""
        while not self._stream.is_done():
            check()
            time.sleep(_POLL_S)

    def finish(self, check: Callable[[], None]) -> list[int]:
        """Wait for the copies; the numbers of rows that were changed meanwhile."""
        self.wait(check)
        torn = []
        for dtype, samples in self._samples.items():
            rows = [
                (row, _sample(one)) for row, one in zip(self._number.tolist(), self._targets, strict=True) if one.dtype == dtype
            ]
            taken = torch.split(self._stream.fetch(samples), [sample.numel() for _, sample in rows])
            torn += [row for (row, sample), before in zip(rows, taken, strict=True) if not _are_same(sample, before)]
        return torn

    def drop(self) -> None:
        """Let go of all tensors, and of the arena: copies that the device was told to make have ended when this returns."""
        self._stream.settle()
        self._bits, self._targets, self._samples = [], [], {}


def _sample(bits: torch.Tensor) -> torch.Tensor:
    """Elements of a dense tensor, spread over it; the last one, which is copied last, is among them."""
    step = max(1, min(bits.numel() // _MIN_SAMPLES, _STRETCH_NBYTES // bits.itemsize))
    return bits.view(-1)[(bits.numel() - 1) % step :: step]


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements are the same bit by bit (two complex numbers without value are not equal)."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@final
class _SideStream:
    """A stream of a device for copies to the host that the training's own streams do not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)
        self._done: torch.Event | None = None

    def copy(self, targets: Tensors, bits: Tensors) -> None:
        """Copy when all is done that the calling thread's current stream has to do now."""
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        try:
            with self._stream:
                for target, source in zip(targets, bits, strict=True):
                    target.copy_(source, non_blocking=True)
                    source.record_stream(self._stream)  # if it is freed, its memory is used again only after the copy
        finally:
            self._done = self._stream.record_event()

    def is_done(self) -> bool:
        """Whether the copies have ended."""
        return self._done is None or self._done.query()

    def settle(self) -> None:
        """Return when the copies have ended."""
        if self._done is not None:
            self._done.synchronize()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was made before the copies began, in host memory."""
        with self._stream:
            return tensor.cpu()


def _tear(addresses: Sequence[str]) -> TornSnapshot:
    more = f" and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    return TornSnapshot(
        f"expected tensors that stay as they are until they are copied, found changed or freed between async_save and its copy: "
        f"{', '.join(map(show, addresses[:_SHOWN]))}{more}. Call pending.staged() before what changes them, or save with "
        "staging='eager'",
        addresses=addresses,
    )

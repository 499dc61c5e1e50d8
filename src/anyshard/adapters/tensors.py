"""Torch tensors as raw bits: which tensors can be stored, and the handles through which the engine reaches their bytes.

This is the one place that knows how the elements of a tensor lie in memory. Stored bytes are C order, dense, with conj and
neg views resolved; strides, `requires_grad` and the device are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.errors import InvalidAppState, UnsupportedFormat, UnsupportedValue
from anyshard.records.addresses import show
from anyshard.records.dtypes import DTYPES, find_dtype
from anyshard.records.handles import BITS_DTYPES, ArrayDestination, ArraySource, Destination, Slices, Source
from anyshard.records.regions import decompose_run

# Torch lacks operators for most unsigned integers, so its side of the bits is signed.
_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NUMPY_SIGNED = {1: "<u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}

MAX_NDIM = 63  # one less than a table of regions may have, which needs a column for the size of the elements at times

_ADVICE = "convert it to a dense tensor first, or leave it out of the app state"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype in a checkpoint."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a stored name, or `UnsupportedFormat` if this release or this torch lacks it."""
    find_dtype(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormat(f"expected a torch with dtype {name!r}, found torch {torch.__version__}; use a newer one")
    return dtype


def check_storable(tensor: torch.Tensor, address: str) -> None:
    """Return if the bytes of a tensor can be stored and filled; else raise an error that names the address and the reason."""
    if _is_ordinary(tensor):
        return
    for refuses, problem, advice in _REFUSALS:
        if refuses(tensor):
            if problem in _WITHOUT_MEMORY:
                raise InvalidAppState(f"{show(address)}: expected a tensor with memory, found a {problem}; {advice}")
            message = f"{show(address)}: expected a dense tensor of a known dtype, found a {problem}; {advice}"
            raise UnsupportedValue(message, address=address)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Quickly: none of the refusals can apply. Nearly all tensors are like that."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.dtype in _STORABLE
        and not (tensor.is_meta or tensor.is_nested or tensor.ndim > MAX_NDIM)
        and not (_lacks_storage(tensor) or _lacks_memory(tensor))
    )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in type(tensor).__mro__)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that answers for tensors inside it and has no bytes of its own."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _lacks_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


def reach_of(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last one in memory, holes included."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.numel()
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """A tensor whose storage was freed or shrunk under it (`untyped_storage().resize_(0)`): reading it would crash."""
    if tensor.numel() == 0:
        return False
    return tensor.untyped_storage().nbytes() < (tensor.storage_offset() + reach_of(tensor)) * tensor.element_size()


_STORABLE = frozenset(dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype))
_WITHOUT_MEMORY = ("lazy parameter", "meta tensor", "tensor whose storage was freed")

# In this order: what later rows ask would fail on what earlier rows refuse.
_REFUSALS: tuple[tuple[Callable[[torch.Tensor], bool], str, str], ...] = (
    (torch.nn.parameter.is_lazy, "lazy parameter", "run one forward pass first"),
    (_is_dtensor, "DTensor", "sharded tensors come with the next release; use full_tensor() until then"),
    (lambda t: t.is_meta, "meta tensor", "call to_empty(device=...) on its module first"),
    (lambda t: t.is_nested, "nested tensor", _ADVICE),
    (lambda t: t.layout is not torch.strided, "sparse tensor", _ADVICE),
    (is_wrapper, "tensor subclass without __tensor_flatten__", _ADVICE),
    (_lacks_storage, "tensor inside of torch.func.grad, vmap or the like", "save or load outside of it"),
    (lambda t: t.ndim > MAX_NDIM, f"tensor of more than {MAX_NDIM} dims", "reshape it"),
    (lambda t: t.is_quantized, "quantized tensor", "store int_repr() and the scales as tensors of their own"),
    (lambda t: dtype_name(t.dtype) not in DTYPES, "tensor of a dtype that the format lacks", "convert it to another dtype"),
    (_lacks_memory, "tensor whose storage was freed", "load or allocate it again first"),
)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass made of inner tensors that are stored in its stead (`__tensor_flatten__`)."""
    return is_wrapper(tensor) and not _is_dtensor(tensor) and hasattr(tensor, "__tensor_flatten__")


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inner tensors of a flattened subclass by name."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same size (16 bytes: complex128), sharing memory unless a conj or neg view is resolved."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.view(_TORCH_BITS[plain.element_size()])


def array_bits(array: NDArray[Any]) -> NDArray[np.generic]:
    """The elements of an array as raw bits, sharing its memory."""
    return array.view(cast("np.dtype[np.generic]", BITS_DTYPES[array.itemsize]))


def synchronise(devices: Iterable[torch.device]) -> None:
    """Wait for the work of other streams on these devices, so that copies from any thread see it, and it sees the copies."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _bits_from(array: NDArray[np.generic]) -> torch.Tensor:
    writable = array if array.flags.writeable else array.copy()  # torch warns of read-only memory
    return torch.from_numpy(writable.view(_NUMPY_SIGNED[array.itemsize]))


def source_of(tensor: torch.Tensor, address: str) -> Source:
    """A source of the tensor's bytes, which copies none now but those of conj and neg views; raises as `check_storable` does."""
    check_storable(tensor, address)
    bits = bits_of(tensor)
    return ArraySource(array_bits(bits.numpy())) if bits.device.type == "cpu" else DeviceSource(bits)


def destination_of(tensor: torch.Tensor, dtype: torch.dtype) -> Destination:
    """A destination that fills a checked tensor in place with elements stored as `dtype`."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if dtype != plain.dtype or plain.is_conj() or plain.is_neg():
        return CopyDestination(plain, dtype)
    if plain.device.type == "cpu":
        return ArrayDestination(array_bits(bits_of(plain).numpy()))
    return CopyDestination(bits_of(plain), _TORCH_BITS[plain.element_size()])


def can_cast(stored: torch.dtype, live: torch.dtype) -> bool:
    """Whether `cast=True` may turn one dtype into the other: torch has the operator and no kind of number is lost.

    Floats may lose digits and become infinite, as in any cast between them; an integer always stays within the range.
    """
    if not torch.can_cast(stored, live):
        return False
    try:
        torch.empty(1, dtype=live, device="cpu").copy_(torch.empty(1, dtype=stored, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    if _is_inexact(stored) or torch.bool in (stored, live):
        return True
    wide = torch.finfo(live) if _is_inexact(live) else torch.iinfo(live)
    return wide.min <= torch.iinfo(stored).min and torch.iinfo(stored).max <= wide.max


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@final
class DeviceSource:
    """Source over a tensor that is not in host memory; copies part by part."""

    def __init__(self, bits: torch.Tensor) -> None:
        self._bits = bits

    @property
    def nbytes(self) -> int:
        """Length of the tensor's bytes."""
        return self._bits.numel() * self._bits.element_size()

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy the bytes [start, start + len(out)) into `out`."""
        bits, itemsize = self._bits, self._bits.element_size()
        target = torch.frombuffer(out, dtype=bits.dtype)
        first, stop = start // itemsize, start // itemsize + target.numel()
        if bits.is_contiguous():
            target.copy_(bits.view(-1)[first:stop])
            return
        position = 0
        for offset, length in zip(*decompose_run(tuple(bits.shape), first, stop), strict=True):
            box = bits[tuple(slice(int(o), int(o + n)) for o, n in zip(offset, length, strict=True))]
            target[position : position + box.numel()].view(box.shape).copy_(box)
            position += box.numel()


@final
class CopyDestination:
    """Destination that goes through `copy_`: another device, another dtype, or a conj or neg view."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._dtype = dtype

    def memory(self) -> memoryview | None:
        """None: there are no bytes to write to directly."""
        return None

    def place(self, where: Slices, bits: NDArray[np.generic]) -> None:
        """Copy `bits`, elements stored as the destination's stored dtype, to the slices `where`."""
        with torch.inference_mode(self._tensor.is_inference()):
            self._tensor[where].copy_(_bits_from(bits).view(self._dtype))


def identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same elements in memory, whether or not they are the same object."""
    if is_wrapper(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

"""Torch tensors as raw bits: which tensors can be stored, and the handles through which the engine reaches their bytes.

This is the one place that knows how the elements of a tensor lie in memory. Stored bytes are C order, dense, with conj and
neg views resolved; strides, `requires_grad` and the device are not stored. Of a DTensor it knows the local tensor only; which
part of the whole that is, `placements` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard, cast, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.errors import InvalidAppState, UnsupportedFormat, UnsupportedValue
from anyshard.records.addresses import show
from anyshard.records.dtypes import DTYPES, find_dtype
from anyshard.records.handles import BITS_DTYPES, ArrayDestination, ArraySource, Destination, Slices, Source
from anyshard.records.regions import decompose_run

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Torch lacks operators for most unsigned integers, so its side of the bits is signed.
_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NUMPY_SIGNED = {1: "<u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}

_PLAIN = (torch.Tensor, torch.nn.Parameter)

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
    """Return if the bytes of a tensor can be stored and filled; else raise an error that names the address and the reason.

    Of a DTensor its local tensor is looked at, not where its placements put it.
    """
    local_tensor(tensor, address)


def local_tensor(tensor: torch.Tensor, address: str) -> torch.Tensor:
    """The plain tensor in which this rank's elements lie: of a DTensor its local tensor, else the tensor itself.

    Raises as `check_storable` does. Waits for a tensor that a collective still fills. Outside a DTensor's mesh the shape is (0,).
    """
    local = _take_local(tensor)
    _check_plain(local, address)
    return local


def _take_local(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in _PLAIN:
        return tensor
    if is_dtensor(tensor):
        with torch.no_grad():  # else it is a new node of the autograd graph
            tensor = tensor.to_local()
    return cast("Any", tensor).wait() if _is_awaited(tensor) else tensor


def _check_plain(tensor: torch.Tensor, address: str) -> None:
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
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.dtype in _STORABLE
        and not (tensor.is_meta or tensor.is_nested or tensor.ndim > MAX_NDIM)
        and not (_lacks_storage(tensor) or _lacks_memory(tensor))
    )


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor, known by name: nothing is imported for the sake of looking."""
    return _is_distributed(tensor, "DTensor")


def _is_awaited(tensor: torch.Tensor) -> bool:
    return _is_distributed(tensor, "AsyncCollectiveTensor")


def _is_distributed(value: object, name: str) -> bool:
    if type(value) in _PLAIN:
        return False
    return any(base.__name__ == name and base.__module__.startswith("torch.distributed") for base in type(value).__mro__)


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
    (lambda t: t.is_meta, "meta tensor", "call to_empty(device=...) on its module first"),
    (lambda t: t.is_nested, "nested tensor", _ADVICE),
    (lambda t: t.layout is not torch.strided, "sparse tensor", _ADVICE),
    (is_wrapper, "tensor subclass without bytes of its own", _ADVICE),
    (_lacks_storage, "tensor inside of torch.func.grad, vmap or the like", "save or load outside of it"),
    (lambda t: t.ndim > MAX_NDIM, f"tensor of more than {MAX_NDIM} dims", "reshape it"),
    (lambda t: t.is_quantized, "quantized tensor", "store int_repr() and the scales as tensors of their own"),
    (lambda t: dtype_name(t.dtype) not in DTYPES, "tensor of a dtype that the format lacks", "convert it to another dtype"),
    (_lacks_memory, "tensor whose storage was freed", "load or allocate it again first"),
)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass made of inner tensors that are stored in its stead (`__tensor_flatten__`)."""
    if not is_wrapper(tensor) or is_dtensor(tensor) or _is_awaited(tensor):
        return False
    return hasattr(tensor, "__tensor_flatten__")


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


@final
class _HostMemory:
    """The memory of a tensor as NumPy asks for it. `Tensor.numpy()` would forbid for ever to resize or free its storage."""

    def __init__(self, bits: torch.Tensor) -> None:
        itemsize = bits.element_size()
        self._bits = bits  # the array holds this object, and so the memory
        self.__array_interface__ = {
            "version": 3,
            "data": (bits.data_ptr(), False),
            "shape": tuple(bits.shape),
            "strides": tuple(stride * itemsize for stride in bits.stride()),
            "typestr": BITS_DTYPES[itemsize].str,
        }


def host_bits(bits: torch.Tensor) -> NDArray[np.generic]:
    """What `bits_of` gave of a tensor in host memory as an array of raw bits, sharing memory."""
    return np.asarray(cast("Any", _HostMemory(bits)))


def source_of(tensor: torch.Tensor, address: str) -> Source:
    """A source of a checked plain tensor's bytes, which neither copies nor looks at one of them now."""
    return source_of_known(tensor, address, None, None)


def source_of_known(tensor: torch.Tensor, address: str, data_ptr: int | None, nbytes: int | None) -> Source:
    """`source_of` for who knows where the bytes lie, and how many there are: to ask for that takes most of the time."""
    plain = tensor if type(tensor) in _PLAIN else tensor.detach().as_subclass(torch.Tensor)
    return (HostSource if plain.is_cpu else DeviceSource)(plain, address, data_ptr, nbytes)


def destination_of(tensor: torch.Tensor, dtype: torch.dtype) -> Destination:
    """A destination that fills a checked tensor in place with elements stored as `dtype`."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if dtype != plain.dtype or plain.is_conj() or plain.is_neg():
        return CopyDestination(plain, dtype)
    if plain.device.type == "cpu":
        return ArrayDestination(host_bits(bits_of(plain)))
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


class _TensorSource:
    """What both sources over a tensor have. Making one does nothing but store: an app state may have 100,000 tensors."""

    __slots__ = ("_address", "_array", "_bits", "data_ptr", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, address: str, data_ptr: int | None = None, nbytes: int | None = None) -> None:
        self.tensor = tensor
        self.data_ptr = tensor.data_ptr() if data_ptr is None else data_ptr
        self.nbytes = tensor.nbytes if nbytes is None else nbytes
        self._address = address
        self._bits: torch.Tensor | None = None
        self._array: ArraySource | None = None

    @property
    def bits(self) -> torch.Tensor:
        """What `bits_of` gives, made on first use. Raises `InvalidAppState` if the memory is not the tensor's any more."""
        tensor = self.tensor
        if tensor.data_ptr() != self.data_ptr or tensor.nbytes != self.nbytes:
            raise InvalidAppState(
                f"{show(self._address)}: expected a tensor that keeps its memory while it is saved, found that its storage was "
                "freed, resized or replaced; do so after the save has returned, or an asynchronous one is staged"
            )
        if self._bits is None:
            self._bits = bits_of(tensor)
        return self._bits


@final
class HostSource(_TensorSource):
    """Source over a tensor in host memory; an error if that was freed, resized or replaced before it has been read.

    `tensor` is plain (a parameter, it may be); the source's bytes are its elements in C order, conj and neg views resolved.
    `data_ptr` and `nbytes` are the tensor's when the source was made; who knows them may give them.
    """

    __slots__ = ()

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy the bytes [start, start + len(out)) into `out`."""
        bits = self.bits
        if self._array is None:
            self._array = ArraySource(host_bits(bits))
        self._array.read_into(start, out)


@final
class DeviceSource(_TensorSource):
    """Source over a tensor that is not in host memory; copies part by part. The rest is as in `HostSource`."""

    __slots__ = ()

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy the bytes [start, start + len(out)) into `out`."""
        bits = self.bits
        itemsize = bits.element_size()
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
    """Equal for tensors that are the same elements in memory, whether or not they are the same object.

    DTensors are the same if their local tensors are, and these are the same part of the same whole.
    """
    local = _take_local(tensor)
    if is_wrapper(local) or local.numel() == 0:
        return id(tensor)
    place = local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype
    return (place, tuple(tensor.shape), tensor.placements, tensor.device_mesh) if is_dtensor(tensor) else place

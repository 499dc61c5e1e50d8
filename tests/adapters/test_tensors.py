"""Tensors as raw bits: every dtype and memory layout comes back bit by bit; what has no bytes of its own is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anyshard.adapters import tensors
from anyshard.errors import InvalidAppState, StateMismatch, UnsupportedFormat, UnsupportedValue
from anyshard.records.dtypes import DTYPES
from tests.adapters.roundtrip import give, keep
from tests.cases.training import move

_SHAPE = (3, 4)
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def patterned(dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose raw bits are a counter times an odd constant, so that every bit of every element differs somewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is experimental
        tensor = torch.empty(_SHAPE, dtype=dtype)
    size = min(8, tensor.element_size())
    counter = np.arange(tensor.nbytes // size, dtype=np.uint64) + np.uint64(1)
    pattern = (counter * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(3)).astype(f"<u{size}")
    if dtype is torch.bool:
        pattern &= np.uint8(1)
    data = torch.frombuffer(bytearray(pattern.tobytes()), dtype=torch.uint8)
    tensors.bits_of(tensor).view(torch.uint8).view(-1).copy_(data)
    return tensor


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes that have to be stored: elements in C order."""
    return tensors.bits_of(tensor).numpy().tobytes()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    """A tensor of each dtype of the format, NaN payloads included, is saved and filled in place unchanged."""
    saved = patterned(tensors.torch_dtype(name))
    live = {"x": torch.zeros_like(tensors.bits_of(saved)).view(saved.dtype)}
    place = live["x"].data_ptr()
    give(keep({"x": saved}), live)
    assert raw(saved) == raw(live["x"])
    assert place == live["x"].data_ptr()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_fills_a_transposed_tensor(name: str) -> None:
    """Non-contiguous memory is read in C order on the way out and filled by element on the way in."""
    saved = patterned(tensors.torch_dtype(name)).t()
    live = {"x": torch.zeros(_SHAPE, dtype=tensors.bits_of(saved).dtype).view(saved.dtype).t()}
    kept = keep({"x": saved})
    assert raw(saved) == kept.data["x"]
    give(kept, live)
    assert raw(saved) == raw(live["x"])


def _expanded() -> torch.Tensor:
    return torch.arange(4.0).expand(3, 4)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0).view(2, 3)


_LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(1.5),
    "conj view": lambda: patterned(torch.complex64).conj(),
    "neg view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "expanded": _expanded,
    "inference": _inference,
    "zero rows": lambda: torch.zeros(0, 4),
    "zero columns": lambda: torch.zeros(3, 0),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "strided": lambda: torch.arange(20.0)[3:19:5],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_is_stored_in_c_order(layout: str) -> None:
    """What is stored is the resolved elements in C order, whatever the memory looks like."""
    tensor = _LAYOUTS[layout]()
    kept = keep({"x": tensor})
    expected = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert expected == kept.data["x"]
    assert tuple(tensor.shape) == kept.tensors.shape(0)


@pytest.mark.parametrize("layout", [name for name in _LAYOUTS if name != "expanded"])
def test_every_layout_is_filled_in_place(layout: str) -> None:
    """Conj and neg views, leaf parameters and inference tensors are filled where they lie."""
    saved, live = _LAYOUTS[layout](), _LAYOUTS[layout]()
    live.detach().zero_()
    give(keep({"x": saved}), {"x": live})
    assert torch.equal(saved, live)


def test_source_copies_nothing_before_it_is_read() -> None:
    """A change between capture and read is what the source yields: nothing was copied at capture."""
    tensor = torch.zeros(4)
    source = tensors.source_of(tensor, "w")
    tensor.fill_(7.0)
    out = bytearray(16)
    source.read_into(0, memoryview(out))
    assert tensor.numpy().tobytes() == bytes(out)


def test_memory_can_be_freed_after_a_save_and_not_before() -> None:
    """Neither handle forbids torch to resize a storage, as `Tensor.numpy()` does; a source of what was freed is an error."""
    tensor = torch.ones(4, 2)
    source = tensors.source_of(tensor[1:].t(), "s/w")
    tensors.destination_of(tensor, torch.float32)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InvalidAppState, match="s/w: expected a tensor that keeps its memory"):
        source.read_into(0, memoryview(bytearray(4)))


@pytest.mark.parametrize("kind", [tensors.HostSource, tensors.DeviceSource])
def test_memory_that_was_replaced_is_an_error(kind: type[tensors.HostSource | tensors.DeviceSource]) -> None:
    """A parameter that was given other data, or was resized, is not what was captured any more."""
    changes: list[Callable[[torch.nn.Parameter], object]] = [
        lambda param: setattr(param, "data", torch.zeros(4, 2)),
        lambda param: param.data.untyped_storage().resize_(0),
    ]
    for change in changes:
        param = torch.nn.Parameter(torch.ones(4, 2))
        source = kind(param, "s/w")
        change(param)
        with pytest.raises(InvalidAppState, match="s/w: expected a tensor that keeps its memory"):
            source.read_into(0, memoryview(bytearray(4)))


def test_sources_say_where_their_bytes_lie() -> None:
    """Of a parameter no view is made before it is read; a conj view is resolved then, with what its elements are by then."""
    param, view = torch.nn.Parameter(torch.ones(4, 2)), torch.ones(3, dtype=torch.complex64).conj()
    plain, resolved = tensors.source_of(param, "p"), tensors.source_of(view, "c")
    assert isinstance(plain, tensors.HostSource)
    assert isinstance(resolved, tensors.HostSource)
    assert (param, param.data_ptr(), 32) == (plain.tensor, plain.data_ptr, plain.nbytes)
    assert plain.bits is plain.bits
    assert (param.data_ptr(), torch.int32) == (plain.bits.data_ptr(), plain.bits.dtype)
    view.fill_(2 + 1j)
    assert [2 + 1j] * 3 == resolved.bits.view(torch.complex64).tolist()


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_device_source_reads_any_part(shape: tuple[int, ...]) -> None:
    """The source for other devices, run here on host memory, gives every aligned part of dense and transposed tensors."""
    for tensor in (torch.randn(shape), torch.randn(shape[::-1]).permute(tuple(range(len(shape)))[::-1])):
        whole, source = raw(tensor), tensors.DeviceSource(tensor, "w")
        assert len(whole) == source.nbytes
        for start in range(0, len(whole), 4):
            for stop in range(start + 4, len(whole) + 1, 4):
                out = bytearray(stop - start)
                source.read_into(start, memoryview(out))
                assert whole[start:stop] == bytes(out)


def test_copy_destination_takes_read_only_parts() -> None:
    """The destination for other devices, run here on host memory, places a part without a warning about read-only memory."""
    live, part = torch.zeros(4, 3), np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), dtype="<u4").reshape(2, 3)
    destination = tensors.CopyDestination(tensors.bits_of(live), torch.int32)
    destination.place((slice(1, 3), slice(0, 3)), part)
    assert destination.memory() is None
    assert torch.equal(torch.arange(6.0).view(2, 3), live[1:3])


def _freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


_REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), UnsupportedValue, "sparse"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), UnsupportedValue, "sparse"),
    "quantized": (_quantized, UnsupportedValue, "int_repr"),
    "nested": (_nested, UnsupportedValue, "nested"),
    "meta": (lambda: torch.zeros(3, device="meta"), InvalidAppState, "to_empty"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, InvalidAppState, "forward"),
    "freed": (_freed, InvalidAppState, "freed"),
    "bits": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), UnsupportedValue, "dtype"),
}


@pytest.mark.parametrize("kind", _REFUSED)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated).*:UserWarning")
def test_what_has_no_plain_bytes_is_refused_by_name(kind: str) -> None:
    """Sparse, quantized, nested, meta, lazy and freed tensors are errors that name the address and what to do."""
    make, error, word = _REFUSED[kind]
    with pytest.raises(error, match=word) as caught:
        keep({"extra": {"bad": make(), "good": torch.zeros(1)}})
    assert "extra/bad" in str(caught.value)


@pytest.mark.parametrize("kind", ["meta", "lazy", "freed"])
def test_load_into_what_has_no_memory_is_refused(kind: str) -> None:
    """A live tensor without memory is an error before anything is filled, not a silent nothing."""
    shape = {"meta": (3,), "lazy": (0,), "freed": (8,)}[kind]
    with pytest.raises(InvalidAppState, match="x: expected a tensor with memory"):
        give(keep({"x": torch.zeros(shape)}), {"x": _REFUSED[kind][0]()})


def test_python_subclass_with_its_own_memory_is_plain() -> None:
    """A subclass that only adds Python behaviour is stored and filled like any tensor."""

    class Named(torch.Tensor):
        pass

    live = torch.zeros(3).as_subclass(Named)
    give(keep({"x": torch.arange(3.0).as_subclass(Named)}), {"x": live})
    assert [0.0, 1.0, 2.0] == live.tolist()


def test_unknown_dtype_names_need_a_newer_release() -> None:
    """A stored dtype that this release does not know is `UnsupportedFormat`, whatever torch has under that name."""
    with pytest.raises(UnsupportedFormat, match="qint8"):
        tensors.torch_dtype("qint8")


@pytest.mark.parametrize(
    ("stored", "live", "expected"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, True),
        (torch.int32, torch.float32, True),
        (torch.float32, torch.int32, False),
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.uint3, False),
        (torch.float64, torch.float16, True),
        (torch.float32, torch.complex64, True),
        (torch.int64, torch.uint8, False),
        (torch.int64, torch.uint64, False),
        (torch.int8, torch.uint8, False),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.uint8, True),
        (torch.int8, torch.bool, False),
        (torch.int64, torch.float32, True),
        (torch.int32, torch.float16, False),
    ],
)
def test_casts_never_lose_a_kind_of_number(stored: torch.dtype, live: torch.dtype, *, expected: bool) -> None:
    """Between floats and upwards is allowed; float to int, complex to real, bit-packed types and smaller ranges are not."""
    assert expected is tensors.can_cast(stored, live)


def test_a_cast_that_would_wrap_is_a_difference() -> None:
    """`cast=True` never changes the value of an integer; the error says why it did not help."""
    with pytest.raises(StateMismatch, match=r"x: dtype \(expected uint8, found int64, whose .* cast=True does not help"):
        give(keep({"x": torch.tensor([300, -1])}), {"x": torch.zeros(2, dtype=torch.uint8)}, cast=True)


@pytest.mark.parametrize("num_dims", [64, 65])
def test_too_many_dims_are_refused_by_name(num_dims: int) -> None:
    """Tensors beyond the limit are named, arrays too; one at the limit goes the whole road."""
    with pytest.raises(UnsupportedValue, match="x: .* more than 63 dims"):
        keep({"x": torch.zeros([1] * num_dims)})
    with pytest.raises(UnsupportedValue, match="a: .* at most 63 dims"):
        keep({"a": np.zeros([20_000] + [1] * 63)})
    live = torch.zeros([1] * 63)
    move({"x": torch.ones([1] * 63)}, {"x": live})
    assert 1 == live.item()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_tensors_inside_of_transforms_are_refused(transform: Callable[[Any], Any]) -> None:
    """They have no memory that could be saved or filled."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedValue, match="s/x: .* torch.func.grad"):
            keep({"s": {"x": x}})
        with pytest.raises(UnsupportedValue, match="s/x: .* torch.func.grad"):
            give(keep({"s": {"x": torch.zeros(3)}}), {"s": {"x": x}})
        return x.sum()

    transform(function)(torch.zeros(2, 3)[0] if transform is torch.func.grad else torch.zeros(2, 3))


def test_inference_tensors_take_a_cast() -> None:
    """What has to be copied in is copied in the mode that the live tensor wants."""
    live = _inference()
    give(keep({"x": torch.ones(2, 3, dtype=torch.bfloat16)}), {"x": live}, cast=True)
    assert live.eq(1).all()


def test_a_default_device_changes_nothing() -> None:
    """New tensors lie on the CPU, whatever device new tensors of the caller would be on."""
    kept, state = keep({"s": {"x": torch.ones(3)}, "d": torch.ones(2)}), {"s": {}, "d": torch.zeros(2, dtype=torch.float64)}
    with torch.device("meta"):
        give(kept, state, cast=True)
    assert ([1, 1, 1], [1, 1]) == (state["s"]["x"].tolist(), state["d"].tolist())

"""Staging: all bytes of a snapshot arrive, as they were at the call, or the snapshot is torn and says so."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from anyshard.adapters.tensors import DeviceSource, bits_of, source_of, torch_dtype
from anyshard.engine import lazy_rows as lazy_rows_module
from anyshard.engine import rows as rows_module
from anyshard.engine import stage as stage_module
from anyshard.engine.arena import Arena, ArenaPool
from anyshard.engine.images import ImageLayout, Images, lay_out_images
from anyshard.engine.stage import Staging, register_pages
from anyshard.engine.words import choose_words
from anyshard.errors import InvalidAppState, TornSnapshot
from anyshard.planning.pack import plan_save
from anyshard.records.captured import MemoryFacts
from anyshard.records.dtypes import DTYPES, find_dtype
from anyshard.records.handles import ArraySource, RangeSource, Source
from anyshard.records.tables import make_tensor_table, whole_shards

from .scene import count_descriptors

MiB = 1 << 20


def go_on() -> None:
    return


@dataclass
class Snapshot:
    """Sources by name, each of which is one row of a plan, and where their bytes go."""

    sources: Mapping[str, Source]
    pool: ArenaPool
    layout: ImageLayout
    images: Images

    def stage(self, *lazy: str) -> Staging:
        """A staging of all, of which those named are lazy."""
        is_lazy = np.array([name in lazy for name in self.sources])
        return Staging(
            self.images, list(self.sources.values()), is_lazy=is_lazy, addresses=[f"model/{name}" for name in self.sources]
        )

    def run(self, *lazy: str) -> dict[str, bytes]:
        """What has arrived after begin and finish."""
        staging = self.stage(*lazy)
        staging.begin()
        staging.finish(go_on)
        return self.found()

    def found(self) -> dict[str, bytes]:
        """The extents in the arena."""
        columns = zip(self.sources, self.layout.row_position.tolist(), self.layout.row_nbytes.tolist(), strict=True)
        return {name: bytes(self.images.arena.memory[start : start + nbytes]) for name, start, nbytes in columns}

    def again(self, sources: Mapping[str, Source]) -> Snapshot:
        """The next snapshot of the same plan in the same arena."""
        self.pool.give_back(self.images.arena)
        return Snapshot(sources, self.pool, self.layout, Images(self.layout, self.pool.take(self.layout.total_nbytes)))


def snapshot(sources: Mapping[str, Source], pool: ArenaPool | None = None) -> Snapshot:
    """A snapshot of rows of bytes, one per source, in one blob."""
    sources = dict(sorted(sources.items()))
    shapes = [(source.nbytes,) for source in sources.values()]
    table = make_tensor_table([f"model/{name}" for name in sources], ["uint8"] * len(shapes), shapes, {})
    layout = lay_out_images(plan_save(whole_shards(table), ["model"], rank=0, max_blob_nbytes=1 << 40))
    pool = pool or ArenaPool()
    return Snapshot(sources, pool, layout, Images(layout, pool.take(layout.total_nbytes)))


def snap(tensors: Mapping[str, torch.Tensor], pool: ArenaPool | None = None) -> Snapshot:
    """A snapshot of tensors."""
    return snapshot({name: source_of(tensor, f"model/{name}") for name, tensor in tensors.items()}, pool)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes to store."""
    return bits_of(tensor).clone(memory_format=torch.contiguous_format).numpy().tobytes()  # NumPy pins what it is given


def patterned(name: str) -> torch.Tensor:
    """A tensor of a dtype with other bits in every element, among them NaNs of many kinds and bools of many values."""
    bits = torch.from_numpy(np.random.default_rng(7).integers(0, 256, 7 * 24 * find_dtype(name).itemsize, dtype=np.uint8))
    return bits.view(torch_dtype(name)).view(7, 24)


def counted(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes as float32, no stretch of which is like another."""
    return torch.from_numpy(
        np.random.default_rng(seed).integers(0, 1 << 32, nbytes // 4, dtype=np.uint32).view(np.float32)
    ).clone()


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(1.5),
    "bool": lambda: torch.tensor([True, False, True]),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conj view": lambda: torch.randn(5, dtype=torch.complex64).conj(),
    "empty": lambda: torch.zeros(3, 0),
    "expanded": lambda: torch.arange(4.0).expand(3, 4),
    "inference": lambda: make_inference(),
    "neg view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "strided": lambda: torch.arange(20.0)[3:19:5],
    "transposed": lambda: torch.randn(7, 5).t(),
}


def make_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0).view(2, 3)


# All bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_foreach", [True, False])
def test_every_dtype_arrives_bit_by_bit(has_foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and transposed tensors of each dtype of the format arrive unchanged, whatever operators torch has."""
    if not has_foreach:
        monkeypatch.setattr(stage_module, "_COPY_ALL", None)
    dense = {name: patterned(name) for name in DTYPES}
    tensors = dense | {f"{name}.t": tensor.t() for name, tensor in dense.items()}
    expected = {name: raw(tensor) for name, tensor in sorted(tensors.items())}
    assert expected == snap(tensors).run()


@pytest.mark.parametrize("is_inference", [False, True])
def test_every_layout_arrives_in_c_order(is_inference: bool) -> None:
    """Views of all kinds, parameters, tensors without elements and those of inference mode, also when called in that."""
    tensors = {name: make() for name, make in LAYOUTS.items()}
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    first = snap(tensors)
    with torch.inference_mode(is_inference):
        found = first.run()
    assert expected == found
    assert expected == first.again(first.sources).run()


def test_what_is_lazy_arrives_as_well() -> None:
    """Rows of a few bytes and of several pieces are copied by finish, and none of them by begin."""
    tensors = {f"t{nbytes}": counted(nbytes, seed=nbytes) for nbytes in (8, 9, 16, 1001, 65_536, 17 * MiB + 4)}
    expected = {name: raw(tensor) for name, tensor in sorted(tensors.items())}
    scene = snap(tensors)
    staging = scene.stage(*tensors)
    staging.begin()
    assert {bytes(len(data)) for data in expected.values()} == set(scene.found().values())
    staging.finish(go_on)
    assert expected == scene.found()
    assert sum(map(len, expected.values())) == staging.lazy_nbytes


def test_the_words_of_a_row_are_within_it() -> None:
    """Whatever lies behind a tensor may change, also where its last bytes begin a new stretch."""
    nbytes = np.array(
        [8, 9, 15, 16, 17, 24, MiB - 8, MiB, MiB + 4, MiB + 8, MiB + 15, MiB + 16, 2 * MiB, 17 * MiB + 4, 17 * MiB + 8]
    )
    places = choose_words(nbytes)
    ends = places.start + 8
    assert (ends <= nbytes[places.row]).all()
    for row in range(len(nbytes)):
        own = ends[places.row == row]
        assert (own.min(), own.max()) == (8, nbytes[row])
        assert max(np.diff(np.sort(own)), default=0) <= MiB


def test_what_cannot_be_lazy_is_copied_at_the_call() -> None:
    """A row that is shorter than a word, not dense or no tensor does not wait."""
    buffer = counted(4096)
    sources: dict[str, Source] = {
        "array": ArraySource(np.arange(100, dtype=np.uint8)),
        "short": source_of(torch.ones(1), "short"),
        "strided": source_of(buffer.view(32, 32).t(), "strided"),
    }
    expected = [read_all(source) for source in sources.values()]
    scene = snapshot(sources)
    staging = scene.stage(*sources)
    staging.begin()
    assert (expected, 0) == (list(scene.found().values()), staging.lazy_nbytes)


def read_all(source: Source) -> bytes:
    data = bytearray(source.nbytes)
    source.read_into(0, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("lazy", [(), ("array", "nested", "odd", "piece", "transposed")])
def test_parts_of_shards_arrive(lazy: Sequence[str]) -> None:
    """Ranges of tensors, of ranges, of what is not dense and of arrays of NumPy arrive, lazily or not."""
    whole = source_of(counted(4096).view(32, 32), "whole")
    sources: dict[str, Source] = {
        "array": RangeSource(ArraySource(np.arange(512, dtype=np.uint16)), 100, 300),
        "nested": RangeSource(RangeSource(whole, 128, 2048), 256, 1024),
        "odd": RangeSource(source_of(patterned("bool"), "odd"), 5, 99),
        "piece": RangeSource(whole, 1024, 2048),
        "transposed": RangeSource(source_of(counted(4096).view(32, 32).t(), "t"), 128, 1024),
    }
    expected = {name: read_all(source) for name, source in sources.items()}
    assert expected == snapshot(sources).run(*lazy)


def test_gaps_are_zeros_after_another_layout() -> None:
    """Between the extents of an image nothing is left of what lay there before."""
    pool = ArenaPool()
    first = snap({"x": counted(256 * 1024)}, pool)
    first.run()
    pool.give_back(first.images.arena)
    second = snap({f"t{n}": torch.full((n,), 255, dtype=torch.uint8) for n in (1, 63, 100, 70_000)}, pool)
    second.run()
    memory = np.frombuffer(second.images.arena.memory, np.uint8)[: second.layout.total_nbytes]
    assert (1, 1 + 63 + 100 + 70_000, 0) == (pool.num_hits, (memory == 255).sum(), ((memory > 0) & (memory < 255)).sum())


def test_views_are_kept_for_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan in the same arena finds its tensors ready, for new values; other dtypes and shapes are not spoilt by that."""
    calls: list[int] = []
    make = stage_module._Views.make_targets
    monkeypatch.setattr(stage_module._Views, "make_targets", lambda *args: (calls.append(1), make(*args))[1])
    first = snap({"x": torch.zeros(4, 5)})
    first.run()
    second = first.again({"x": source_of(torch.ones(4, 5), "x")})
    assert ({"x": raw(torch.ones(4, 5))}, 1) == (second.run(), len(calls))
    for other in (counted(80), counted(80).view(5, 4), counted(80).view(torch.int16).view(4, 10), torch.zeros(1).expand(20)):
        assert {"x": raw(other)} == second.again({"x": source_of(other, "x")}).run()


def test_closing_the_pool_frees_what_snapshots_have_used() -> None:
    """No view of an arena outlives its last snapshot."""
    before = count_descriptors()
    scene = snap({"x": counted(4096), "y": counted(4096), "z": torch.ones(3, dtype=torch.bool)})
    scene.run("y")
    scene.pool.give_back(scene.images.arena)
    scene.pool.close()
    assert (before, 0) == (count_descriptors(), scene.pool.nbytes)


def test_begin_leaves_the_training_as_it_is() -> None:
    """No storage is marked or moved, no counter of versions rises, gradients stay on, no graph is made."""
    parameter = torch.nn.Parameter(counted(4096))
    before = parameter.data_ptr(), parameter._version, parameter.requires_grad, parameter.grad_fn
    snap({"x": parameter, "y": counted(4096)}).run("y")
    assert before == (parameter.data_ptr(), parameter._version, parameter.requires_grad, parameter.grad_fn)
    assert torch.is_grad_enabled()
    parameter.untyped_storage().resize_(0)


def test_a_tensor_of_another_length_than_the_plan_is_refused() -> None:
    """Nothing is broadcast or cut to fit."""
    first = snap({"x": torch.zeros(4)})
    with pytest.raises(ValueError, match="expected a tensor of 16 bytes for this row of the plan, found one of 4"):
        first.again({"x": source_of(torch.zeros(1), "x")}).run()


# Torn --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.data.mul_(2),
        lambda tensor: tensor.numpy().fill(0),
        lambda tensor: tensor[: len(tensor) // 2].zero_(),
        lambda tensor: tensor[len(tensor) // 4 : len(tensor) // 4 + 256 * 1024].zero_(),
        lambda tensor: tensor[:2].zero_(),
        lambda tensor: tensor[-2:].zero_(),
    ],
    ids=["whole", "data", "numpy", "half", "1 MiB", "first", "last"],
)
def test_a_write_before_the_copy_is_found(write: Callable[[torch.Tensor], object]) -> None:
    """Whatever writes, and if it is a MiB in the middle: the snapshot is torn and names the tensor, no other."""
    tensors = {"a": counted(4 * MiB), "b": counted(4 * MiB, seed=1), "c": counted(4 * MiB, seed=2)}
    staging = snap(tensors).stage(*tensors)
    staging.begin()
    write(tensors["b"])
    with pytest.raises(TornSnapshot, match=r"model/b\. Call pending.staged\(\) before") as caught:
        staging.finish(go_on)
    assert ("model/b",) == caught.value.addresses


def test_a_step_in_the_middle_of_the_copy_is_found(gate: threading.Event) -> None:
    """A row of which the first half was copied before a write and the second half after it is torn."""
    tensor, calls, at_half = counted(16 * MiB), iter(range(9)), threading.Event()

    def check() -> None:
        if next(calls) == 1:
            at_half.set()
            assert gate.wait(timeout=30)

    staging = snap({"x": tensor}).stage("x")
    staging.begin()
    caught: list[BaseException] = []
    copier = threading.Thread(target=lambda: caught.append(catch(lambda: staging.finish(check))), name="test-copier")
    copier.start()
    assert at_half.wait(timeout=30)
    tensor.add_(1)
    gate.set()
    copier.join(timeout=30)
    assert [TornSnapshot] == [type(error) for error in caught]


def catch(act: Callable[[], object]) -> BaseException:
    """What a call raises."""
    with pytest.raises(BaseException) as caught:
        act()
    return caught.value


def test_a_write_after_the_copy_changes_nothing() -> None:
    """Once a snapshot has finished, training may do what it likes."""
    tensor = counted(MiB)
    expected, scene = {"x": raw(tensor)}, snap({"x": tensor})
    staging = scene.stage("x")
    staging.begin()
    staging.finish(go_on)
    tensor.add_(1)
    assert expected == scene.found()


@pytest.mark.parametrize("nbytes", [1024, 64 * MiB])
@pytest.mark.parametrize("offset", [0, 256])
@pytest.mark.parametrize("resized", [0, 16])
def test_storage_freed_before_the_copy_is_found(nbytes: int, offset: int, resized: int) -> None:
    """A storage that is freed or shrunk under a snapshot, on the heap or unmapped, is no crash."""
    tensor = torch.zeros(nbytes // 4)
    staging = snap({"x": tensor[offset // 4 :], "y": counted(64)}).stage("x", "y")
    staging.begin()
    tensor.untyped_storage().resize_(resized)
    with pytest.raises(TornSnapshot) as caught:
        staging.finish(go_on)
    assert ("model/x",) == caught.value.addresses


@pytest.mark.parametrize("at", range(1, 6))
def test_storage_freed_while_it_is_copied_is_found(at: int) -> None:
    """Freed between two pieces or between two rows: torn are those that were not copied in full, and all the rest arrives."""
    tensors, calls = {"a": counted(20 * MiB), "b": counted(20 * MiB, seed=1)}, iter(range(9))
    expected, scene = raw(tensors["a"]), snap(tensors)

    def check() -> None:
        if next(calls) == at:
            tensors["b" if at >= 3 else "a"].untyped_storage().resize_(0)

    staging = scene.stage("a", "b")
    staging.begin()
    with pytest.raises(TornSnapshot) as caught:
        staging.finish(check)
    assert ("model/b" if at >= 3 else "model/a",) == caught.value.addresses
    assert at < 3 or expected == scene.found()["a"]


def test_memory_that_goes_between_look_and_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread unmaps after the look is answered by the kernel."""
    tensor = torch.zeros(16 * MiB)
    staging = snap({"x": tensor}).stage("x")
    staging.begin()
    monkeypatch.setattr(lazy_rows_module.LazyRows, "_is_there", lambda self, at: True)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TornSnapshot):
        staging.finish(go_on)


def test_memory_swapped_for_other_memory_is_found() -> None:
    """A tensor that is given other memory with the same values has moved, so its old memory may be anything."""
    parameter = torch.nn.Parameter(counted(4096))
    staging = snap({"x": parameter}).stage("x")
    staging.begin()
    parameter.data = parameter.data.clone()
    with pytest.raises(TornSnapshot):
        staging.finish(go_on)


def test_a_tensor_freed_before_the_call_is_refused() -> None:
    """What was taken apart and freed before it is staged is an error that names it, no crash."""
    tensor = counted(4096)
    scene = snap({"x": tensor})
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InvalidAppState, match="model/x: expected a tensor that keeps its memory"):
        scene.stage().begin()


def test_many_torn_tensors_are_counted() -> None:
    """The message stays short; the error has all addresses."""
    tensors = {f"t{n:02}": counted(64) for n in range(15)}
    staging = snap(tensors).stage(*tensors)
    staging.begin()
    for tensor in tensors.values():
        tensor.zero_()
    with pytest.raises(TornSnapshot, match="model/t09 and 5 more") as caught:
        staging.finish(go_on)
    assert tuple(f"model/{name}" for name in tensors) == caught.value.addresses


# Let go ------------------------------------------------------------------------------------------------------------------


def test_eager_tensors_are_let_go_by_begin_and_lazy_ones_by_finish() -> None:
    """A snapshot keeps nothing of the training alive longer than it has to, and needs no garbage collection."""
    tensors = {"eager": counted(4096), "lazy": counted(4096)}
    scene = snap(tensors)
    staging = scene.stage("lazy")
    refs = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    tensors, scene.sources = {}, {}
    with no_gc():
        staging.begin()
        assert {"eager": False, "lazy": True} == {name: ref() is not None for name, ref in refs.items()}
        staging.finish(go_on)
        assert [None, None] == [ref() for ref in refs.values()]


@contextmanager
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("check", "error"), [(go_on, TornSnapshot), (stop, KeyboardInterrupt)])
def test_a_failed_finish_lets_go_too(check: Callable[[], None], error: type[BaseException]) -> None:
    """Not even the error, kept by a pending save, holds a tensor."""
    tensors = {"x": counted(4096)}
    scene = snap(tensors)
    staging, ref = scene.stage("x"), weakref.ref(tensors["x"])
    staging.begin()
    tensors.pop("x").zero_()
    scene.sources = {}
    with pytest.raises(error) as caught:
        staging.finish(check)
    assert None is ref()
    assert error is caught.type


def test_a_writer_that_the_copy_overtakes_is_found() -> None:
    """A row of which the middle was written before it was copied, and the words that are looked at only after that, is torn."""
    tensor = counted(256 << 10)
    steps = iter([lambda: tensor[1000:2000].zero_(), tensor.zero_])
    staging = snap({"x": tensor}).stage("x")
    staging.begin()
    write = Arena.write

    def write_and_change(arena: Arena, position: int, data: memoryview) -> None:
        next(steps)()
        write(arena, position, data)
        next(steps)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "write", write_and_change)
        with pytest.raises(TornSnapshot, match="model/x"):
            staging.finish(go_on)


# Devices -----------------------------------------------------------------------------------------------------------------


class FakeStream:
    """A device that copies when it is asked for the second time whether it has."""

    def __init__(self, device: torch.device) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_looks = 0

    def copy(self, targets: Sequence[torch.Tensor], bits: Sequence[torch.Tensor]) -> None:
        self._copies = list(zip(targets, bits, strict=True))

    def is_done(self) -> bool:
        self._num_looks += 1
        for target, source in self._copies if self._num_looks > 1 else ():
            target.copy_(source)
        return self._num_looks > 1

    def settle(self) -> None:
        while self._num_looks < 2:
            self.is_done()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes sources of tensors on a device: one that the CPU plays."""
    monkeypatch.setattr(stage_module, "_SideStream", FakeStream)
    monkeypatch.setattr(rows_module, "list_host", lambda tensors: [False] * len(tensors))
    return lambda tensors: snapshot({name: DeviceSource(tensor, name) for name, tensor in tensors.items()})


def test_tensors_on_a_device_arrive(device: Any) -> None:
    """Eager ones have arrived when begin returns, lazy ones when finish does; dense or not, of all dtypes."""
    tensors = {f"{when}.{name}": patterned(name) for name in DTYPES for when in ("eager", "lazy")}
    tensors |= {f"eager.{name}": make() for name, make in LAYOUTS.items()} | {"lazy.transposed": torch.randn(3, 4).t()}
    expected = {name: raw(tensor) for name, tensor in sorted(tensors.items())}
    scene = device(tensors)
    staging = scene.stage(*(name for name in tensors if name.startswith("lazy")))
    staging.begin()
    assert [] == [name for name, data in scene.found().items() if name.startswith("eager") and data != expected[name]]
    staging.finish(go_on)
    assert expected == scene.found()


def test_a_write_on_a_device_before_the_copy_is_found(device: Any) -> None:
    """Samples are taken on the device at the call and compared with what has arrived, by dtype and row."""
    tensors = {"a": counted(MiB), "b": counted(MiB, seed=1), "c": patterned("complex128"), "d": patterned("complex128").clone()}
    staging = device(tensors).stage(*tensors)
    staging.begin()
    tensors["b"][1000:200_000] = 0
    tensors["c"].zero_()
    with pytest.raises(TornSnapshot) as caught:
        staging.finish(go_on)
    assert ("model/b", "model/c") == caught.value.addresses


def test_a_device_has_ended_its_copies_when_a_snapshot_fails(device: Any) -> None:
    """What `finish` raises it raises once nothing is on its way into the arena, which others may get then."""
    tensors = {"a": counted(MiB)}
    scene = device(tensors)
    staging = scene.stage("a")
    staging.begin()
    with pytest.raises(KeyboardInterrupt):
        staging.finish(stop)
    assert {"a": raw(tensors["a"])} == scene.found()


def test_a_capture_of_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies would become part of the graph and be done at each replay."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidAppState, match="found that one is being captured"):
        snap({"x": torch.zeros(1)}).stage().begin()


@pytest.mark.parametrize(("is_used", "answer", "expected"), [(False, 0, []), (True, 0, ["+", "-"]), (True, 2, ["+"])])
def test_pages_are_pinned_where_cuda_is_used(
    is_used: bool, answer: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arenas are pinned once and unpinned before they go; a process without CUDA does not begin to use it."""
    calls: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            calls.append("+")
            return answer

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
            calls.append("-")
            return 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    pool = ArenaPool(register=register_pages)
    pool.give_back(pool.take(4096))
    pool.close()
    assert expected == calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("lazy", [(), ("a", "b")])
def test_tensors_on_cuda_arrive(lazy: Sequence[str]) -> None:
    """As above, on a real device with pinned pages, from a stream that is not the default one."""
    torch.cuda.init()
    pool = ArenaPool(register=register_pages)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensors = {"a": counted(64 * MiB).cuda(), "b": patterned("bfloat16").cuda(), "c": counted(4096).cuda().view(32, 32).t()}
        expected = {name: raw(tensor.cpu()) for name, tensor in tensors.items()}
        scene = snap(tensors, pool)
        assert expected == scene.run(*lazy)
        second = scene.again(scene.sources)
        staging = second.stage(*lazy)
        staging.begin()
        tensors["c"].add_(1)  # in the order of the stream this is behind the copies or, of lazy rows, not looked at
        staging.finish(go_on)
        assert expected == second.found()
    pool.close()


@pytest.mark.parametrize("length", [1, 3, 16, 17])
def test_rows_that_are_known_are_not_asked(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ones arrive as well as others, whose tensors nobody asks where they lie."""
    tensors = [torch.arange(length, dtype=torch.int32) + number for number in range(5)]
    shot = snap({f"t{number}": tensor for number, tensor in enumerate(tensors)})
    address = np.array([tensor.data_ptr() for tensor in tensors])
    known = MemoryFacts(address, *np.ones((2, len(tensors)), dtype=np.bool_))
    asked: list[object] = []
    monkeypatch.setattr(rows_module, "list_host", lambda unsure: [asked.append(each) is None for each in unsure])
    staging = Staging(shot.images, list(shot.sources.values()), is_lazy=np.zeros(5, bool), addresses=[], known=known)
    staging.begin()
    assert [*map(raw, tensors)] == list(shot.found().values())
    assert [] == asked

"""Cases of memory, of even work, and of what ranks tell each other. Each test is named after its row in cases.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import anyshard
from anyshard.coord.torch_dist import TorchKeyValueStore
from anyshard.testing.fill import full_bytes
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import take_step
from anyshard.testing.world import Worlds
from tests.cases.jobs import bits, filled, shard

pytestmark = pytest.mark.slow

MIB = 1 << 20
NAMES = [f"w{i:02}" for i in range(20)]
LOADING = anyshard.LoadOptions(byte_budget=MIB, block_nbytes=MIB // 4, threads=2)
SAVING = anyshard.SaveOptions(byte_budget=MIB, block_nbytes=MIB // 4, threads=2)


def _read_memory(name: str) -> int:
    """A line of this process's memory in bytes: VmRSS now, VmHWM at most."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found[1]) * 1024


@contextmanager
def measuring() -> Iterator[list[int]]:
    """By how many bytes this process has grown at most within the block."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
    before, grown = _read_memory("VmRSS"), list[int]()
    yield grown
    grown.append(_read_memory("VmHWM") - before)


def load_from_one_rank(place: str) -> tuple[int, dict[str, bytes]]:
    """Rank 0 saves 20 tensors of 1 MiB; all load the shards of one, then of all. Growth at the second load, and one tensor."""
    mesh = make_mesh(("dp", 4))
    if dist.get_rank() == 0:
        anyshard.save(place, {"model": {name: filled(name, 512, 512) for name in NAMES}}, group=[0])
    dist.barrier()
    live: dict[str, torch.Tensor] = {name: shard(torch.zeros(512, 512), mesh, Shard(0)) for name in NAMES}
    anyshard.load(place, {"model": live}, options=LOADING, only=["model/w00"])  # what any first load imports does not count
    with measuring() as grown:
        anyshard.load(place, {"model": live}, options=LOADING)
    return grown[0], full_bytes({"w07": live["w07"]})


def test_b027_shards_are_loaded_without_the_whole(worlds: Worlds, tmp_path: Path) -> None:
    """A full dict that one rank saved is loaded sharded: no rank grows by more than two of its twenty tensors."""
    for grown, found in worlds(4).run(load_from_one_rank, str(tmp_path / "a")):
        assert {"w07": bits(filled("w07", 512, 512))} == found
        assert grown <= 2 * MIB


def load_a_trained_job(place: str) -> tuple[int, int]:
    """Save and load a job with AdamW in the state that it is in; the growth at the load, and the bytes of the job."""
    mesh = make_mesh(("dp", 2))
    model = nn.ParameterDict({f"p{i}": nn.Parameter(shard(torch.ones(1024, 1024), mesh, Shard(0))) for i in range(4)})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    take_step(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    anyshard.save(place, state, options=SAVING)
    anyshard.load(place, state, options=LOADING)
    with measuring() as grown:
        report = anyshard.load(place, state, options=LOADING)
    return grown[0], report.nbytes


def test_b029_load_stays_near_the_steady_state(worlds: Worlds, tmp_path: Path) -> None:
    """A load of weights and both moments fills what is there: a rank grows by less than a fifth of what it holds."""
    for grown, nbytes in worlds(2).run(load_a_trained_job, str(tmp_path / "a")):
        assert 24 * MIB <= nbytes
        assert grown <= nbytes // 5


def save_equal_tensors(place: str, num: int, num_replicas: int) -> int:
    """Bytes that this rank writes of equal tensors of 1 MiB, on 4 ranks in a mesh of replicas and shards."""
    mesh = make_mesh(("replicate", num_replicas), ("shard", 4 // num_replicas))
    state = {f"w{i}": shard(filled(f"w{i}", 512, 512), mesh, Replicate(), Shard(0)) for i in range(num)}
    return anyshard.save(place, {"model": state}).written_nbytes


@pytest.mark.parametrize(("num", "num_replicas"), [(8, 2), (6, 4)], ids=["2 x 2", "replicated"])
def test_b031_b032_replicas_share_the_work(worlds: Worlds, tmp_path: Path, num: int, num_replicas: int) -> None:
    """Each of 4 ranks writes as much as the others within one tensor, in one file, and all together one model."""
    written = worlds(4).run(save_equal_tensors, str(tmp_path / "a"), num, num_replicas)
    assert max(written) - min(written) <= MIB
    assert num * MIB <= sum(written) <= num * MIB + 4 * 8192
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert [0, 1, 2, 3] == [blob.rank for blob in checkpoint.manifest.blobs]
        assert num * MIB == sum(checkpoint[f"model/w{i}"].numpy().nbytes for i in range(num))


@contextmanager
def counting() -> Iterator[list[int]]:
    """The length of each message that this rank sends through the job's key-value store within the block."""
    sent: list[int] = []

    def watch(send: Callable[[TorchKeyValueStore, str, bytes], object]) -> Callable[[TorchKeyValueStore, str, bytes], object]:
        def sending(store: TorchKeyValueStore, key: str, value: bytes) -> object:
            sent.append(len(value))
            return send(store, key, value)

        return sending

    with pytest.MonkeyPatch.context() as monkeypatch:
        for verb in (TorchKeyValueStore.set, TorchKeyValueStore.set_if_absent):
            monkeypatch.setattr(TorchKeyValueStore, verb.__name__, watch(verb))
        yield sent


def save_counting(place: str) -> tuple[int, int]:
    """Bytes sent through the key-value store, and collectives called, in a save of 4 MiB of sharded weights and moments."""
    mesh = make_mesh(("dp", 4))
    model = nn.ParameterDict({f"p{i}": nn.Parameter(shard(torch.ones(512, 512), mesh, Shard(0))) for i in range(4)})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    take_step(model, optimizer)
    with counting() as sent, CommDebugMode() as collectives:
        anyshard.save(place, {"model": model, "optimizer": optimizer})
    return sum(sent), collectives.get_total_counts()


def test_b034_no_tensor_data_crosses_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """A save of 12 MiB on 4 ranks calls no collective and sends a few KiB between them."""
    for nbytes, num_collectives in worlds(4).run(save_counting, str(tmp_path / "a")):
        assert (0, True) == (num_collectives, nbytes < 32 << 10), nbytes


STRUCTURES: Sequence[dict[str, list[int]]] = [
    *[{"a": [8, 4], "b": [6]}] * 3,
    {"a": [8, 5], "b": [6]},
    {"a": [8, 5], "b": [6], "c": [2]},
    {"a": [8, 5], "c": [2]},
]


def save_structures(place: str) -> list[tuple[bool, int]]:
    """Save one structure after the other; whether each had a plan, and the bytes that this rank sent."""
    told = []
    for step, shapes in enumerate(STRUCTURES):
        state = {name: shard(filled(name, *shape), make_mesh(("dp", 4)), Shard(0)) for name, shape in shapes.items()}
        with counting() as sent:
            report = anyshard.save(f"{place}/step_{step}", {"model": state})
        told.append((report.plan_was_cached, sum(sent)))
    return told


def test_b039_unchanged_structures_are_planned_once(worlds: Worlds, tmp_path: Path) -> None:
    """Later saves of a structure exchange next to nothing and give the same index; each change of it is planned afresh."""
    for told in worlds(4).run(save_structures, str(tmp_path)):
        assert [False, True, True, False, False, False] == [was_cached for was_cached, _ in told]
        assert max(told[1][1], told[2][1]) < min(1024, told[0][1])
    found = [anyshard.open(tmp_path / f"step_{step}") for step in range(len(STRUCTURES))]
    assert 1 == len({checkpoint.manifest.index.digest for checkpoint in found[:3] if checkpoint.manifest.index})
    for checkpoint, shapes in zip(found, STRUCTURES, strict=True):
        assert {f"model/{name}": tuple(shape) for name, shape in shapes.items()} == {
            at: checkpoint[at].shape for at in checkpoint
        }

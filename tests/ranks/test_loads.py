"""Loads of several ranks: what each of them opens, what is judged together, and how a failure ends on all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import anyshard
from anyshard import checkpoint, loading
from anyshard.coord.agreement import Agreement
from anyshard.storage.local import LocalStore
from anyshard.storage.wrappers import CountingStore, Verb
from anyshard.stored_tensor import StoredTensor
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import fill_training
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow


class Patched:
    """Attributes of an object that are others for a while: the processes of a world live on."""

    def __init__(self, target: Any, **attributes: object) -> None:
        self._target = target
        self._new = attributes
        self._old = {name: getattr(target, name) for name in attributes}

    def __enter__(self) -> None:
        self._set(self._new)

    def __exit__(self, *_: object) -> None:
        self._set(self._old)

    def _set(self, attributes: dict[str, object]) -> None:
        for name, value in attributes.items():
            setattr(self._target, name, value)


# What is opened --------------------------------------------------------------------------------------------------------


def make_sharded() -> dict[str, Any]:
    model = nn.Linear(8, 16, bias=False)
    fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fill_training(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def save_sharded(place: str) -> None:
    anyshard.save(place, make_sharded())


def count_opened(place: str) -> int:
    store = CountingStore(LocalStore(place))
    anyshard.load(store, make_sharded())
    return store.count(Verb.OPEN_BLOB).calls


def test_a_rank_opens_what_it_wants(worlds: Worlds, tmp_path: Path) -> None:
    """Of two sections the values, which rank 0 has, and the blobs with its own shards; not those of all ranks (review B9)."""
    place = str(tmp_path / "step_1")
    worlds(4).run(save_sharded, place)
    assert [2, 4, 4, 4] == worlds(4).run(count_opened, place)
    assert [4, 6] == worlds(2).run(count_opened, place)


def load_with_a_long_index(place: str) -> tuple[int, list[float]]:
    """How often a rank reads the index, if it is not told."""
    state = {"model": {"w": torch.full((3,), 7.0)}}
    anyshard.save(place, state)
    state["model"]["w"].zero_()
    store = CountingStore(LocalStore(place))
    with Patched(checkpoint, _MAX_TOLD_NBYTES=10):
        anyshard.load(store, state)
    return store.count(Verb.READ).calls, state["model"]["w"].tolist()


def test_a_long_index_is_read_by_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    """The manifest is told, so that all load one checkpoint; the index would be a burden on the key-value store (review B10)."""
    (of_coordinator, values), *others = worlds(3).run(load_with_a_long_index, str(tmp_path / "step_1"))
    assert of_coordinator > 1  # it looks for the newest manifest
    assert [(1, [7.0] * 3)] * 2 == others
    assert [7.0] * 3 == values


# What is judged together -----------------------------------------------------------------------------------------------


class Extra(nn.Module):
    """A module with state of its own making at its root."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


class Plain(nn.Module):
    """The same without."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def load_without_extra_state(place: str, with_it: list[int], options: dict[str, Any]) -> tuple[object, ...]:
    """Save with extra state, load into modules that have it on some ranks only: warnings, or differences."""
    anyshard.save(place, {"model": Extra()})
    model = Extra() if dist.get_rank() in with_it else Plain()
    try:
        report = anyshard.load(place, {"model": model}, options=anyshard.LoadOptions(**options))
    except anyshard.StateMismatch as error:
        return ("refused", "model/_extra_state: unexpected" in str(error))
    return report.warnings, report.unexpected


PASSED = (("model/_extra_state: the module takes no such extra state; it was passed over",), ())


@pytest.mark.parametrize(
    ("with_it", "options", "expected"),
    [
        ([], {"strict": False, "strict_extra_state": True}, ("refused", True)),
        ([], {"strict_extra_state": False}, PASSED),
        ([], {"strict": False, "strict_extra_state": False}, PASSED),
        ([1], {"strict_extra_state": True}, ((), ())),
        ([1], {"strict_extra_state": False}, ((), ())),
    ],
)
def test_extra_state_of_the_root(
    worlds: Worlds, tmp_path: Path, with_it: list[int], options: dict[str, Any], expected: tuple[object, ...]
) -> None:
    """What no rank takes is judged as on one rank, however strict the rest of the load is (review C15)."""
    place = str(tmp_path / "step_1")
    assert [expected] * 2 == worlds(2).run(load_without_extra_state, place, with_it, options)


def load_part(place: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Save four tensors, load two of them on each rank."""
    anyshard.save(place, {"m": {name: torch.ones(2) for name in "abcd"}})
    own = "ab" if dist.get_rank() else "bc"
    try:
        report = anyshard.load(place, {"m": {name: torch.zeros(2) for name in own}}, options=anyshard.LoadOptions(**options))
    except anyshard.StateMismatch as error:
        return tuple(line.split(":")[0].strip() for line in str(error).splitlines() if "unexpected (" in line)
    return report.unexpected


@pytest.mark.parametrize("strict", [True, False])
def test_what_no_rank_takes(worlds: Worlds, tmp_path: Path, *, strict: bool) -> None:
    """It is named on all ranks, as a difference or in the report."""
    assert [("m/d",)] * 2 == worlds(2).run(load_part, str(tmp_path / "step_1"), {"strict": strict})


def compare_ties(place: str) -> tuple[int, list[int]]:
    """Load two names into one tensor that is sharded along the last dim: the largest part read of it, and what came."""
    whole = torch.arange(400, dtype=torch.int32).reshape(20, 20)
    anyshard.save(place, {"m": {"a": whole, "b": whole.clone()}})
    mesh, bits, sizes = make_mesh(("dp", dist.get_world_size())), StoredTensor.bits, []
    live = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)], src_data_rank=None)

    def read(tensor: StoredTensor, *box: Any) -> Any:
        found = bits(tensor, *box)
        sizes.append(found.size)
        return found

    with Patched(StoredTensor, bits=read), Patched(loading, _COMPARED_ELEMENTS=32):
        anyshard.load(place, {"m": {"a": live, "b": live}})
    return max(sizes), live.to_local()[3].tolist()


def test_ties_are_compared_in_parts(worlds: Worlds, tmp_path: Path) -> None:
    """Also those whose shards are columns: never more than a part at a time is in memory."""
    found = worlds(2).run(compare_ties, str(tmp_path / "step_1"))
    assert [(30, list(range(60, 70))), (30, list(range(70, 80)))] == found


# How a failure ends ----------------------------------------------------------------------------------------------------


def fail_between(place: str) -> tuple[object, ...]:
    """Rank 1 fails when it has heard that it may fill; rank 2 hears of that failure only, not that others fill."""
    state = {"model": {"w": torch.ones(4)}}
    anyshard.save(place, state)
    state["model"]["w"].zero_()
    rank, hear = dist.get_rank(), Agreement.hear

    def hear_badly(agreement: Agreement, phase: str) -> bytes:
        if phase == "fill" and rank == 2:
            while True:
                agreement.check()
                threading.Event().wait(0.01)
        told = hear(agreement, phase)
        if phase == "fill" and rank == 1:
            raise RuntimeError("rank 1 gives up")
        return told

    with Patched(Agreement, hear=hear_badly):
        try:
            anyshard.load(place, state)
        except anyshard.LoadInterrupted as error:
            return list(error.failures), error.addresses, "Nothing has changed on this rank" in str(error)  # type: ignore[attr-defined]
    return ("loaded",)


def test_a_failure_while_others_fill_is_an_interruption_on_all(worlds: Worlds, tmp_path: Path) -> None:
    """A rank that has not begun says so, and names whose failure it was, as all do (review C12)."""
    of_first, *others = worlds(3).run(fail_between, str(tmp_path / "step_1"))
    assert [([1], (), True)] * 2 == others
    assert [1] == of_first[0]

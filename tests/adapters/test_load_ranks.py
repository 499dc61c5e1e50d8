"""A load on many ranks: each fills its own regions, whatever the layout of the save was; what is compared is the whole."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from anyshard.adapters.target import LoadTarget
from anyshard.adapters.tensors import array_bits, bits_of, local_tensor
from anyshard.errors import InvalidAppState, Mismatch, StateMismatch
from anyshard.records.captured import StoredRun
from anyshard.testing.fill import Fill, fill
from anyshard.testing.layouts import LAYOUTS, Training, make_mesh
from anyshard.testing.training import fill_training, take_step, training_state
from anyshard.testing.world import Worlds
from tests.adapters.fake_ranks import on_each_rank
from tests.adapters.roundtrip import Kept, Part, give, keep, plan, take, unite


def build(name: str) -> Training:
    """A model and optimizer in a layout, on the rank that it is now."""
    make_mesh.cache_clear()  # a mesh of the rank before would tell this one the wrong coordinate
    return LAYOUTS[name].build()


def app_state(training: Training) -> dict[str, object]:
    return {"model": training[0], "optimizer": training[1]}


def take_here(state: Mapping[str, object]) -> Part:
    return take(state, rank=dist.get_rank(), world_size=dist.get_world_size())


def give_here(kept: Kept, state: Mapping[str, object], **options: Any) -> LoadTarget:
    return give(kept, state, rank=dist.get_rank(), world_size=dist.get_world_size(), **options)


def local_bytes(tensor: torch.Tensor) -> bytes:
    return array_bits(bits_of(local_tensor(tensor, "x")).contiguous().numpy()).tobytes()


def local_state(training: Training) -> dict[str, tuple[torch.Size, bytes]]:
    """Logical shape and bytes on this rank of every tensor."""
    return {address: (tensor.shape, local_bytes(tensor)) for address, tensor in training_state(*training).items()}


@functools.cache
def train_layout(name: str) -> tuple[Kept, list[dict[str, tuple[torch.Size, bytes]]]]:
    """The checkpoint of a filled state, and what each rank has of it."""

    def act() -> tuple[Part, dict[str, tuple[torch.Size, bytes]]]:
        training = build(name)
        fill_training(*training)
        return take_here(app_state(training)), local_state(training)

    parts, states = zip(*on_each_rank(LAYOUTS[name].size, act), strict=True)
    return unite(parts), list(states)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "is_fresh"), [("plain", True), ("fsdp3 x tp2", False)])
@pytest.mark.parametrize("live", LAYOUTS)
def test_every_rank_has_what_it_would_have_if_it_had_been_trained_there(saved: str, live: str, *, is_fresh: bool) -> None:
    """Tensors on each rank are, byte for byte, those of a state that was filled in place, in a fresh optimizer too."""
    kept, expected = train_layout(saved)[0], train_layout(live)[1]

    def act() -> dict[str, tuple[torch.Size, bytes]]:
        training = build(live)
        if not is_fresh:
            fill_training(*training, seed="other ", num_steps=3)
        target = give_here(kept, app_state(training))
        assert ((), ()) == (target.missing, target.surplus)
        return local_state(training)

    assert expected == on_each_rank(LAYOUTS[live].size, act)


@pytest.mark.parametrize("live", ["ddp2", "fsdp2", "tp2"])
def test_next_steps_are_bitwise_equal(live: str) -> None:
    """A fresh optimizer goes on exactly where the saved one was, groups and all."""
    kept, _ = train_layout("fsdp2 x tp2")

    def act() -> None:
        expected, found = build(live), build(live)
        fill_training(*expected)
        for group in found[1].param_groups:
            group["lr"] = group["weight_decay"] = 0.5
        give_here(kept, app_state(found))
        for training in (expected, found):
            take_step(*training, seed="next ")
        assert local_state(expected) == local_state(found)

    on_each_rank(LAYOUTS[live].size, act)


def shard(shape: Sequence[int], *placements: Any, mesh: DeviceMesh | None = None, dtype: Any = torch.float32) -> DTensor:
    """A filled tensor, sharded along its first dim unless placements are given."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.zeros(*shape, dtype=dtype), mesh, placements or [Shard(0)], src_data_rank=None)
    fill(tensor, "live")
    return tensor


def whole(shape: Sequence[int], name: str = "stored", dtype: Any = torch.float32) -> torch.Tensor:
    tensor = torch.zeros(*shape, dtype=dtype)
    fill(tensor, name)
    return tensor


STRIDED = [
    ((4,), (24, 3), [_StridedShard(0, split_factor=2)]),
    ((2, 2), (7, 5), [_StridedShard(0, split_factor=2), Shard(1)]),
    ((2, 2), (3, 8), [_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=1)]),
]


@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), STRIDED, ids=str)
def test_several_regions_of_one_tensor_are_filled_each_by_itself(mesh_shape: Any, shape: Any, placements: Any) -> None:
    """Regions of one rank are rows of their own, ordered by offsets within the order of addresses; casts work the same way."""
    kept = keep({"a": whole((2,)), "s": {"w": whole(shape), "z": whole(shape)}})

    def act() -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        expected = shard(shape, *placements, mesh=mesh)
        fill(expected, "stored")
        live = {name: shard(shape, *placements, mesh=mesh, dtype=torch.float64) for name in "zw"}
        target = give_here(kept, {"a": torch.zeros(2), "s": live}, cast=True)
        assert [local_bytes(expected.double())] * 2 == [local_bytes(tensor) for tensor in live.values()]
        rows = [(int(tensor), target.wanted.region(row)[0]) for row, tensor in enumerate(target.wanted.tensor)]
        assert sorted(rows) == rows
        assert ["a", "s/w", "s/z"] == list(dict.fromkeys(target.names))

    on_each_rank(4, act)


@pytest.mark.parametrize("shape", [(4, 4), (8, 4), (6, 4, 1), (4, 6)], ids=str)
def test_other_shapes_are_the_same_difference_on_every_rank(shape: tuple[int, ...]) -> None:
    """What is compared is the whole, so that ranks that hold nothing of the tensor see the difference too (B002)."""
    kept = keep({"w": whole((6, 4))})

    def act() -> tuple[Mismatch, str, str, str]:
        live = shard(shape, mesh=DeviceMesh("cpu", [0, 1]))
        before = local_bytes(live)
        with pytest.raises(StateMismatch) as caught:
            give_here(kept, {"w": live}, strict=False)
        assert before == local_bytes(live)
        (difference,) = caught.value.differences
        return difference.kind, difference.address, difference.expected, difference.found

    assert [(Mismatch.SHAPE, "w", str(shape), "(6, 4)")] * 3 == on_each_rank(3, act)


def test_other_dtypes_are_differences_unless_cast() -> None:
    """A DTensor takes another dtype only on demand, and then the number of each element."""
    kept = keep({"w": torch.arange(20.0).reshape(5, 4)})

    def act() -> list[float]:
        live = shard((5, 4), dtype=torch.bfloat16)
        with pytest.raises(StateMismatch, match=r"w: dtype \(expected bfloat16, found float32\)"):
            give_here(kept, {"w": live})
        give_here(kept, {"w": live}, cast=True)
        return list(live.to_local()[:, 0].tolist())

    assert [[0.0, 4.0, 8.0], [12.0, 16.0]] == on_each_rank(2, act)


def test_ranks_without_a_part_want_nothing_and_find_everything() -> None:
    """More ranks than rows, no elements at all, or outside of the mesh: no row, or an empty one, and no address is missing."""
    kept = keep({"s": {"few": whole((1, 2)), "none": whole((0, 2)), "out": whole((2, 2))}})

    def act() -> tuple[str, ...]:
        live = {"few": shard((1, 2)), "none": shard((0, 2)), "out": shard((2, 2), mesh=DeviceMesh("cpu", [0]))}
        target = give_here(kept, {"s": live})
        assert len(target.destinations) == len(target.wanted) == len(target.names)
        assert ((), (), ()) == (target.missing, target.unexpected, target.surplus)
        return target.names

    assert [("s/few", "s/none", "s/out"), ("s/none",), ("s/none",)] == on_each_rank(3, act)


def test_a_rank_outside_the_mesh_makes_state_of_its_own_kind() -> None:
    """Missing state of a DTensor parameter is a DTensor on every rank, as large as what the rank holds of the parameter."""
    plain = nn.Linear(2, 5, bias=False)
    optimizer = torch.optim.AdamW(plain.parameters())
    fill_training(plain, optimizer)
    kept = keep({"m": plain, "o": optimizer})

    def act() -> tuple[torch.Size, torch.Size]:
        model = nn.Linear(2, 5, bias=False)
        model.weight = nn.Parameter(shard((5, 2), mesh=DeviceMesh("cpu", [0, 1])))
        live = torch.optim.AdamW(model.parameters())
        give_here(kept, {"m": model, "o": live})
        made = live.state[model.weight]["exp_avg"]
        assert (DTensor, model.weight.placements) == (type(made), made.placements)
        return made.shape, made.to_local().shape

    assert [((5, 2), (3, 2)), ((5, 2), (2, 2)), ((5, 2), (0,))] == on_each_rank(3, act)


RUNS: dict[str, tuple[tuple[int, ...], list[Any], list[tuple[tuple[int, ...], int, int]]]] = {
    "rows": ((2,), [Shard(0)], [((0, 1), 0, 18), ((0, 1), 18, 30)]),
    "columns": ((2,), [Shard(1)], [((1, 0), 0, 15), ((1, 0), 15, 30)]),
    "whole": ((2,), [Replicate()], [((0, 1), 0, 30)] * 2),
    "boxes": ((1, 2), [Shard(0), Shard(1)], [((1, 0), 0, 15), ((1, 0), 15, 30)]),
    "narrower rows": ((2, 2), [Shard(0), Shard(1)], [((1, 0), 0, 15), ((1, 0), 15, 30), ((0, 1), 18, 30), ((0, 1), 18, 30)]),
}


@pytest.mark.parametrize("case", RUNS)
def test_ties_are_compared_where_this_rank_holds_them(case: str) -> None:
    """Two stored tensors for one DTensor: each rank compares the thinnest slab around its region, all together the whole."""
    mesh_shape, placements, expected = RUNS[case]
    kept = keep({"s": {"a": whole((5, 6)), "b": whole((5, 6))}})

    def act() -> tuple[StoredRun, StoredRun]:
        live = shard((5, 6), *placements, mesh=init_device_mesh("cpu", mesh_shape))
        (tie,) = give_here(kept, {"s": {"a": live, "b": live}}).ties
        return tie

    found = on_each_rank(len(expected), act)
    assert [(StoredRun("s/a", *run), StoredRun("s/b", *run)) for run in expected] == found


def test_the_same_part_under_two_objects_is_filled_once() -> None:
    """Two DTensors over one local tensor are one; one that lies there otherwise, or a plain tensor, is refused by both names."""
    kept = keep({"s": {"a": whole((4, 2)), "b": whole((4, 2)), "c": whole((2, 2))}})

    def act() -> None:
        live = shard((4, 2))
        same = DTensor.from_local(live.to_local(), live.device_mesh, [Shard(0)], run_check=False)
        assert ("s/a",) == give_here(kept, {"s": {"a": live, "b": same}}).names
        with pytest.raises(InvalidAppState, match=r"s/a and s/c: .* overlap; .*exclude="):
            plan(kept, {"s": {"a": live, "c": live.to_local()}}, world_size=2)

    on_each_rank(2, act)


def test_autograd_sees_that_a_dtensor_was_filled() -> None:
    """A backward over what stood there before fails, as it does for plain tensors."""
    kept = keep({"w": whole((4, 2))})

    def act() -> None:
        live, weight = shard((4, 2)), shard((4, 2)).requires_grad_()
        product = (weight * live).to_local().sum()
        give_here(kept, {"w": live})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()  # type: ignore[no-untyped-call]

    on_each_rank(2, act)


def test_a_number_fills_a_dtensor_of_an_option() -> None:
    """A learning rate that is a DTensor takes a stored number on every rank."""
    saved = nn.Linear(2, 2)
    kept = keep({"m": saved, "o": torch.optim.SGD(saved.parameters(), lr=0.5)})

    def act() -> float:
        live = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(live.parameters(), lr=0.1)
        rate = optimizer.param_groups[0]["lr"] = distribute_tensor(
            torch.tensor(0.1), init_device_mesh("cpu", (2,)), src_data_rank=None
        )
        give_here(kept, {"m": live, "o": optimizer})
        assert rate is optimizer.param_groups[0]["lr"]
        return float(rate.to_local())

    assert [0.5, 0.5] == on_each_rank(2, act)


def test_what_this_rank_lacks_is_left_to_all_ranks_to_judge() -> None:
    """On one rank a surplus address and an idle glob are judged at once, on several they are listed and nothing else."""
    module = nn.Linear(2, 2)
    kept = keep({"m": module, "o": torch.optim.SGD(module.parameters()), "v": {"a": whole((2,)), "b": 1}})
    live = nn.Linear(2, 2, bias=False)
    state = {"m": live, "o": torch.optim.SGD(live.parameters()), "v": {"a": torch.zeros(2)}}
    with pytest.raises(StateMismatch) as caught:
        plan(kept, state)
    surplus = ("m/bias", "o/state/bias", "v/b")
    assert [(Mismatch.UNEXPECTED, address) for address in surplus] == [
        (each.kind, each.address) for each in caught.value.differences
    ]
    target = plan(kept, state, world_size=2, only=["m/**", "o/**", "v/**", "w/*"], exclude=["u"])
    assert (surplus, ("w/*",), ("u",)) == (target.surplus, target.unmatched, target.unmatched_exclude)
    assert ((), ()) == (target.unexpected, target.warnings)
    assert ((), surplus) == ((own := plan(kept, state, strict=False)).surplus, own.unexpected)


class Extra(nn.Module):
    """A module with state of its own making."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


def test_extra_state_that_this_rank_does_not_take_may_be_taken_by_another() -> None:
    """One rank alone would warn of it; of several none does, and it is told apart from other surplus."""
    kept = keep({"m": nn.ModuleDict({"a": Extra(), "b": nn.Linear(1, 1)})})
    live = {"m": nn.ModuleDict({"b": nn.Linear(1, 1)})}
    assert 1 == len(plan(kept, live).warnings)
    found = plan(kept, live, world_size=2)
    assert ((), (), ("m/a._extra_state",)) == (found.warnings, found.surplus, found.surplus_extra_state)


class Stage(nn.Module):
    """Some of the layers of a model, under the names that they have in the whole."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(2, 2, bias=layer > 0) for layer in layers})


def make_stage(*layers: int) -> Training:
    """A stage with weights in the first group and biases in the second, which may be empty."""
    model = Stage(*layers)
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.ndim == ndim], "lr": ndim / 8} for ndim in (2, 1)]
    return model, torch.optim.AdamW(groups)


def keep_stages(*stages: Training) -> Kept:
    for stage in stages:
        fill_training(*stage)
    parts = [take(app_state(stage), rank=rank, world_size=len(stages)) for rank, stage in enumerate(stages)]
    return unite(parts)


def test_stages_load_into_the_whole_and_the_whole_into_stages() -> None:
    """Groups go by the parameters that they hold; a stage takes what it has, and what it lacks is no difference of its own."""
    split = [[0], [1, 2], [3]]
    layers = [layer for stage in split for layer in stage]
    live = make_stage(*layers)
    for group in live[1].param_groups:
        group["lr"] = 9.0
    give(keep_stages(*(make_stage(*stage) for stage in split)), app_state(live))
    expected = make_stage(*layers)
    fill_training(*expected)
    assert local_state(expected) == local_state(live)
    assert [0.25, 0.125] == [group["lr"] for group in live[1].param_groups]
    for rank, stage in enumerate(split):
        part = make_stage(*stage)
        target = give(keep_stages(expected), app_state(part), rank=rank, world_size=len(split))
        assert local_state(part).items() <= local_state(live).items()
        lacked = {name for name, _ in live[0].named_parameters()} - {name for name, _ in part[0].named_parameters()}
        assert {f"{start}/{name}" for name in lacked for start in ("model", "optimizer/state")} == set(target.surplus)


def test_an_empty_group_of_a_stage_finds_its_options() -> None:
    """Loaded into the same stages, a group without parameters has the options that it had."""
    split = [[0], [1]]
    stages = [make_stage(*stage) for stage in split]
    stages[0][1].param_groups[1]["lr"] = 0.75
    kept = keep_stages(*stages)
    found = []
    for rank, stage in enumerate(split):
        live = make_stage(*stage)
        give(kept, app_state(live), rank=rank, world_size=2)
        found.append([group["lr"] for group in live[1].param_groups])
    assert [[0.25, 0.75], [0.25, 0.125]] == found


class Rows(torch.optim.Optimizer):
    """Keeps, beside each parameter, a sum per row of what this rank has of it, and a list of more of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                rows = local_tensor(param, "param").detach().sum(-1)
                self.state[param] = {"rows": rows, "more": [rows + 1, 3], "step": torch.tensor(1.0)}


def make_rows(num_rows: int, *placements: Any, seed: float = 1, steps: bool = True) -> dict[str, Any]:
    """An app state with one sharded parameter whose optimizer is of that kind."""
    module = nn.Module()
    values = torch.arange(num_rows * 2.0).reshape(num_rows, 2) * seed
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module.w = nn.Parameter(distribute_tensor(values, mesh, placements or [Shard(0)], src_data_rank=None))
    optimizer = Rows(module.parameters())
    if steps:
        optimizer.step()
    return {"m": module, "o": optimizer}


@pytest.mark.parametrize("steps", [True, False])
def test_state_of_a_shard_comes_back_onto_an_equal_shard(*, steps: bool) -> None:
    """Live or made anew, nested or not; a rank without a shard has none to load."""
    kept = unite(on_each_rank(3, lambda: take_here(make_rows(2))))

    def act() -> tuple[list[float], Any]:
        live = make_rows(2, seed=5, steps=steps)
        give_here(kept, live)
        entry = live["o"].state[live["m"].w]
        rows = entry["rows"].tolist() if "rows" in entry else []
        return rows, [entry["more"][0].tolist(), entry["more"][1]] if rows else None

    assert [([1.0], [[2.0], 3]), ([5.0], [[6.0], 3]), ([], None)] == on_each_rank(3, act)


@pytest.mark.parametrize("placements", [[Shard(1)], [Replicate()]], ids=str)
def test_state_of_a_shard_is_refused_on_another_shard(placements: list[Any]) -> None:
    """The difference names the parameter and the way out, which works; the parameter itself loads under any layout."""
    kept = unite(on_each_rank(2, lambda: take_here(make_rows(4))))

    def act() -> None:
        live = make_rows(4, *placements, seed=5, steps=False)
        with pytest.raises(StateMismatch, match="o/state/w/rows: kind .*shard by shard under another layout.*exclude=") as caught:
            give_here(kept, live)
        assert ["o/state/w/rows", "o/state/w/more"] == [each.address for each in caught.value.differences]
        give_here(kept, live, exclude=["o/state/**"])
        assert live["m"].w.to_local().max() <= 7

    on_each_rank(2, act)


@pytest.mark.parametrize("steps", [True, False])
def test_state_of_the_whole_is_refused_on_a_shard(*, steps: bool) -> None:
    """What a single rank kept for all rows is not what a rank needs for its own, even where shapes agree."""
    (part,) = on_each_rank(1, lambda: take_here(make_rows(4)))
    kept = unite([part])

    def act() -> None:
        live = make_rows(4, Shard(1), steps=steps)
        with pytest.raises(StateMismatch, match="o/state/w/rows: kind .*state of the whole parameter.*exclude="):
            give_here(kept, live)

    on_each_rank(2, act)


def load_after_forward() -> tuple[bool, list[bytes], list[bytes]]:
    """Whether FSDP2 showed whole parameters before a load; the output after it, and the one of a plain model."""
    model, plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for name, param in plain.named_parameters():
        fill(param, name, kind=Fill.FINITE)
    fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    with torch.no_grad():
        model(torch.ones(1, 4))
        is_whole = not isinstance(model[0].weight, DTensor)
        give_here(keep({"m": plain}), {"m": model})
        return is_whole, [local_bytes(model(torch.ones(1, 4)))], [local_bytes(plain(torch.ones(1, 4)))]


@pytest.mark.slow
def test_a_load_may_come_after_an_eval_forward(worlds: Worlds) -> None:
    """FSDP2 shows whole parameters then, which are thrown away; it is the sharded ones that are filled."""
    for is_whole, found, expected in worlds(2).run(load_after_forward):
        assert is_whole
        assert expected == found

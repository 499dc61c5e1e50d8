"""Per-rank values: every rank gets back what has its key, whatever else has changed, or hears why it cannot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from anyshard import PerRank, RNGState
from anyshard.adapters.capture import capture
from anyshard.adapters.per_rank import encode_key, explain_missing_key, find_key
from anyshard.adapters.target import plan_load
from anyshard.errors import CheckpointDamaged, InvalidAppState, Mismatch, StateMismatch, UnsupportedValue
from anyshard.options import LoadOptions
from anyshard.records.captured import Stored
from anyshard.records.tables import make_tensor_table
from anyshard.records.values import PerRankMark, TensorMark, encode_value
from anyshard.testing.fill import fill
from tests.adapters.fake_ranks import on_each_rank
from tests.adapters.roundtrip import REGISTRY, Kept, give, keep, plan, take, unite

NOTHING = make_tensor_table((), [], [], {})


class Loader:
    """A data loader as others write them: it must not be asked for a state at load."""

    def __init__(self, position: int, buffer: torch.Tensor | None = None) -> None:
        self.state: dict[str, Any] = {"position": position, "buffer": buffer}

    def state_dict(self) -> dict[str, Any]:
        assert self.state["position"] >= 0, "asked for its state"
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Sharded(Loader):
    """A stateful with a sharded tensor in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": replicated()}


def replicated() -> DTensor:
    return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])


def keep_on_ranks(states: list[Mapping[str, object]]) -> Kept:
    """A checkpoint of a group that has one app state per rank."""
    return unite([take(state, rank=rank, world_size=len(states)) for rank, state in enumerate(states)])


def differences(kept: Kept, state: Mapping[str, object], **options: Any) -> list[tuple[Mismatch, str]]:
    with pytest.raises(StateMismatch) as caught:
        plan(kept, state, **options)
    return [(difference.kind, difference.address) for difference in caught.value.differences]


def test_every_rank_gets_back_what_has_its_key() -> None:
    """Under another number of ranks and in another order too; the loader itself is asked for nothing."""
    kept = keep_on_ranks([{"loader": PerRank(Loader(position), key=["dp", position])} for position in range(3)])
    for rank, key in enumerate((2, 0)):
        live = Loader(-1)
        give(kept, {"loader": PerRank(live, key=["dp", key])}, rank=rank, world_size=2)
        assert {"position": key, "buffer": None} == live.state


def test_without_a_key_each_rank_gets_its_own() -> None:
    """The same number of ranks and the same mesh are the same ranks; nobody has to say so."""
    kept = keep_on_ranks([{"n": PerRank(rank)} for rank in range(2)])
    wrappers = [PerRank(None), PerRank(None)]
    for rank, wrapper in enumerate(wrappers):
        give(kept, {"n": wrapper}, rank=rank, world_size=2)
    assert [0, 1] == [wrapper.value for wrapper in wrappers]


def test_one_process_is_a_group_of_one() -> None:
    """The same state, saved and loaded where there are no ranks."""
    wrapper = PerRank({"a": 0, "b": []})
    content = wrapper.value
    give(keep({"x": {"y": [PerRank({"a": 1, "b": [2, 3]})]}}), {"x": {"y": [wrapper]}})
    assert {"a": 1, "b": [2, 3]} == wrapper.value
    assert content is wrapper.value


def test_tensors_have_addresses_of_their_rank_and_are_filled_in_place() -> None:
    """No rank's tensor meets another's, and large arrays and bytes go the same way."""

    def make(number: int) -> dict[str, Any]:
        tensor = torch.empty(3, 2)
        fill(tensor, f"t{number}")
        return {
            "t": tensor,
            "n": np.full(20_000, number),
            "b": bytes([number]) * 70_000,
        }

    kept = keep_on_ranks([{"loader": PerRank(make(rank))} for rank in range(2)])
    assert [f"loader/{name}/~r{rank}" for name in "bnt" for rank in range(2)] == list(kept.tensors.addresses)
    live = PerRank(make(9))
    tensor, array = live.value["t"], live.value["n"]
    give(kept, {"loader": live}, rank=1, world_size=2)
    assert torch.equal(make(1)["t"].view(torch.int32), tensor.view(torch.int32))
    assert (20_000, 1, make(1)["b"]) == (len(array), array.max(), live.value["b"])
    assert live.value["t"] is tensor
    assert live.value["n"] is array


def test_a_top_level_tensor_is_one_too() -> None:
    """The reserved component is all that stands behind the section."""
    kept = keep_on_ranks([{"x": PerRank(torch.full((2,), float(rank)))} for rank in range(2)])
    live = torch.zeros(2)
    give(kept, {"x": PerRank(live)}, rank=1, world_size=2)
    assert ("x/~r0", "x/~r1") == kept.tensors.addresses
    assert [1.0, 1.0] == live.tolist()


def test_a_state_with_tensors_comes_back_to_a_stateful() -> None:
    """Tensors in it are made anew, and handed over under the keys that they had."""
    kept = keep_on_ranks([{"loader": PerRank(Loader(rank, torch.full((2,), float(rank))), key=rank)} for rank in range(2)])
    live = Loader(-1)
    give(kept, {"loader": PerRank(live, key=1)})
    assert [1.0, 1.0] == live.state["buffer"].tolist()


def test_ranks_with_equal_keys_are_replicas() -> None:
    """Of several with one key any will do, for they have equal values."""
    kept = keep_on_ranks([{"n": PerRank(rank // 2, key=rank // 2)} for rank in range(4)])
    assert [0, 2] == sorted(kept.per_rank["n"].values())


def test_what_is_own_is_not_tied_to_what_all_share() -> None:
    """One tensor in both places is stored in both: its other ranks have another one."""
    shared = torch.ones(2)
    captured = capture({"s": {"a": shared, "own": PerRank(shared), "z": shared}}, registry=REGISTRY, rank=3, world_size=4)
    stored = {captured.shards.tensors.addresses[row] for row in captured.shards.tensor}
    assert {"s/a", "s/own/~r3"} == stored
    assert {"a": TensorMark("s/a", "tensor"), "own": PerRankMark("s/own"), "z": TensorMark("s/z", "tensor")} == captured.trees[
        "s"
    ]


def test_selection_goes_by_live_addresses() -> None:
    """Globs need not know of ranks."""
    kept = keep_on_ranks([{"x": PerRank({"a": torch.ones(1), "b": torch.ones(1)})}])
    live = {"a": torch.zeros(1), "b": torch.zeros(1)}
    give(kept, {"x": PerRank(live)}, only=["x/b"])
    assert [0.0, 1.0] == [live["a"].item(), live["b"].item()]


# Keys ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"strict": False}])
def test_another_number_of_ranks_is_refused(options: dict[str, Any]) -> None:
    """Strict or not: a wrong value is worse than none, and the error says what to do."""
    kept = keep_on_ranks([{"a": 1, "x": {"n": PerRank(rank)}} for rank in range(2)])
    with pytest.raises(StateMismatch) as caught:
        plan(kept, {"a": 0, "x": {"n": PerRank(7)}}, rank=1, world_size=4, **options)
    [found] = caught.value.differences
    assert (Mismatch.RANK, "x/n", "that of rank 1 of 4") == (found.kind, found.address, found.expected)
    advice = "save it with a key= that does not depend on these, or leave it out with exclude=['x/n']"
    assert found.found.startswith("those of rank 0 of 2, rank 1 of 2: it was saved by another number of ranks")
    assert found.found.endswith(advice)


def test_a_new_key_keeps_its_value_if_the_load_is_not_strict() -> None:
    """More ranks than at the save: the third one is told that nothing of its own is stored, even if that is all of a section."""
    kept = keep_on_ranks([{"x": {"n": PerRank(rank, key=rank)}} for rank in range(2)])
    state = {"x": {"n": PerRank(7, key=2)}}
    assert [(Mismatch.RANK, "x/n")] == differences(kept, state)
    assert ("x/n",) == give(kept, state, strict=False, rank=2, world_size=3).missing
    assert 7 == state["x"]["n"].value


def test_what_does_not_fit_can_be_left_out() -> None:
    """The advice of the error works, and the live value stays."""
    kept = keep_on_ranks([{"a": 1, "x": {"n": PerRank(rank), "m": PerRank(torch.ones(1))}} for rank in range(2)])
    state: dict[str, Any] = {"a": 0, "x": {"n": PerRank(7), "m": PerRank(torch.zeros(1))}}
    give(kept, state, rank=1, world_size=4, exclude=["x/n", "x/m"])
    assert (1, 7, 0.0) == (state["a"], state["x"]["n"].value, state["x"]["m"].value.item())


def test_a_key_that_is_not_stored_is_named_beside_those_that_are() -> None:
    """The user sees both, and a key is asked for where there is none."""
    kept = keep_on_ranks([{"n": PerRank(rank, key=f"dp{rank}")} for rank in range(6)])
    with pytest.raises(StateMismatch, match="that of key 'dp9', found those of key 'dp0', .* and 2 more: give anyshard.PerRank"):
        plan(kept, {"n": PerRank(0, key="dp9")})
    with pytest.raises(StateMismatch, match="that of rank 0 of 6, found those of key 'dp0'"):
        plan(kept, {"n": PerRank(0)}, world_size=6)


@pytest.mark.parametrize("key", [OrderedDict(a=1), 2**40_000], ids=["ordered", "monstrous"])
def test_a_key_that_cannot_be_shown_is_good_enough(key: object) -> None:
    """It is found again, and the error for another one does without it."""
    kept, wrapper = keep({"n": PerRank(1, key=key)}), PerRank(0, key=key)
    give(kept, {"n": wrapper})
    assert 1 == wrapper.value
    with pytest.raises(StateMismatch, match="that of key 'x', found those of a key that cannot be shown"):
        plan(kept, {"n": PerRank(0, key="x")})


@pytest.mark.parametrize("facts", [["rank", 1, 2, [5, [[1]]]], ["rank"], 5, {}])
def test_stored_keys_may_be_anything(facts: object) -> None:
    """Those of a checkpoint made by hand are shown, or not, and never followed."""
    keys = {"n": {encode_value(facts, address="key", registry=REGISTRY): 0, b"": 1}}
    stored = Stored(NOTHING, {"n": PerRankMark("n")}, ("n",), keys, lambda rank, section: {})
    with pytest.raises(StateMismatch, match="a key that cannot be shown"):
        plan_load({"n": PerRank(0)}, stored, options=LoadOptions(), registry=REGISTRY, checkpoint="kept")


def test_another_mesh_is_refused_though_the_number_of_ranks_is_the_same() -> None:
    """Rank r of another layout reads other data."""

    def take_key(**axes: int) -> bytes:
        def take_on_rank() -> bytes:
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            sharded = distribute_tensor(torch.ones(4), mesh, [Replicate()] * mesh.ndim)
            return capture({"w": {"w": sharded}, "n": PerRank(1)}, registry=REGISTRY, world_size=4).per_rank["n"].key

        return on_each_rank(4, take_on_rank)[0]

    key = take_key(dp=2, tp=2)
    assert key != take_key(dp=4)
    shown = explain_missing_key(key, [take_key(dp=4)], address="n", registry=REGISTRY)
    assert "that of rank 0 of 4 on a mesh of dp=2, tp=2" == shown[0]
    assert shown[1].startswith(
        "those of rank 0 of 4 on a mesh of dp=4: it was saved by another number of ranks or on another mesh"
    )
    assert encode_key(PerRank(1), rank=0, world_size=4, mesh={"tp": 2, "dp": 2}, registry=REGISTRY) == key


def test_without_a_mesh_only_the_ranks_are_compared() -> None:
    """Loaded beside no model, what was saved beside a sharded one finds its rank; under another mesh it does not."""

    def key(rank: int, *, of: int = 144, given: object = None, **mesh: int) -> bytes:
        return encode_key(PerRank(0, key=given), rank=rank, world_size=of, mesh=mesh, registry=REGISTRY)

    stored = [key(rank, dp=144) for rank in range(3)]
    assert stored[1] == find_key(key(1), stored, has_mesh=False)
    assert stored[1] == find_key(key(1, dp=144), stored, has_mesh=True)
    assert stored[1] == find_key(stored[1], stored, has_mesh=False)
    others = [key(1, tp=144), key(1, of=3), key(3), key(1, given=1), key(1, given=[])]
    assert [None] * 5 == [find_key(other, stored, has_mesh=other == others[0]) for other in others]
    assert find_key(key(1), [*stored, key(1, tp=144)], has_mesh=False) is None


def test_a_key_is_what_its_value_is() -> None:
    """Order of sets and dicts makes no other key, the type does; rank and key are never taken for each other."""

    def key(given: object) -> bytes:
        return encode_key(PerRank(0, key=given), rank=0, world_size=1, mesh={}, registry=REGISTRY)

    assert key({"a": {1, 2}, "b": 0}) == key({"b": 0, "a": {2, 1}})
    assert 4 == len({key(given) for given in (1, True, "1", None)})


def test_a_key_that_is_no_plain_value_is_refused() -> None:
    """It has to be the same in the next process."""
    with pytest.raises(UnsupportedValue, match="key of anyshard.PerRank: expected a type that can be stored exactly"):
        keep({"n": PerRank(0, key=object())})


# Refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (PerRank(1), "PerRank"),
        ({"a": [PerRank(1)]}, "PerRank"),
        (nn.Linear(1, 1), "Linear"),
        ([nn.Linear(1, 1)], "Linear"),
        ({"a": torch.compile(nn.Linear(1, 1), backend="eager")}, "Linear"),
        (torch.optim.SGD([torch.zeros(1)]), "SGD"),
    ],
)
def test_what_all_ranks_share_is_refused(value: object, found: str) -> None:
    """On save and on load alike, by the address."""
    for act in (lambda: keep({"x": {"y": PerRank(value)}}), lambda: plan(keep({"x": 1}), {"x": {"y": PerRank(value)}})):
        with pytest.raises(InvalidAppState, match=f"x/y: expected in anyshard.PerRank what .* found {found};"):
            act()


def test_sharded_tensors_are_refused() -> None:
    """In the app state, and in what a stateful gives."""

    def act() -> None:
        with pytest.raises(InvalidAppState, match="^x: expected in anyshard.PerRank what .* found DTensor;"):
            keep({"x": PerRank([replicated()])})
        with pytest.raises(UnsupportedValue, match="^x: .* found a DTensor in a state dict;"):
            keep({"x": PerRank(Sharded(0))})

    on_each_rank(1, act)


@pytest.mark.parametrize(
    ("saved", "live", "kind"),
    [
        ({"n": 1}, {"n": PerRank(1)}, Mismatch.KIND),
        ({"n": PerRank(1)}, {"n": 1}, Mismatch.KIND),
        ({"n": PerRank(1)}, {"n": Loader(-1)}, Mismatch.KIND),
        ({"n": PerRank(torch.ones(1))}, {"n": torch.ones(1)}, Mismatch.KIND),
        ({"n": PerRank({})}, {"n": nn.Linear(1, 1)}, Mismatch.KIND),
        ({"n": {"a": [PerRank(1)]}}, {"n": {"a": [1]}}, Mismatch.KIND),
        ({"n": {"a": [PerRank(1)]}}, {"n": Loader(-1)}, Mismatch.KIND),
        ({"m": 1}, {"n": PerRank(1)}, Mismatch.MISSING),
    ],
)
def test_per_rank_on_one_side_only_is_a_difference(saved: Any, live: Any, kind: Mismatch) -> None:
    """Neither is taken for the other, and no mark ever gets into a live value."""
    assert [(kind, "n")] == differences(keep(saved), live)


def test_one_that_is_not_stored_is_missing() -> None:
    """Beside others, and passed over if the load is not strict."""
    kept = keep({"x": {"a": 1, "b": PerRank(2)}})
    state: dict[str, Any] = {"x": {"a": 0, "b": PerRank(0), "c": PerRank(5)}}
    assert [(Mismatch.MISSING, "x/c")] == differences(kept, state)
    give(kept, state, strict=False)
    assert (2, 5) == (state["x"]["b"].value, state["x"]["c"].value)


def test_a_mark_of_another_checkpoint_is_no_value() -> None:
    """Values read offline and saved again would point to nothing."""
    with pytest.raises(UnsupportedValue, match="x/a: expected data, found the mark of a per-rank value of another checkpoint"):
        keep({"x": {"a": PerRankMark("loader")}})


def test_a_tree_that_its_rank_lacks_is_damage() -> None:
    """Keys may name a rank whose values have no such address."""
    [own] = keep({"n": PerRank(1)}).own
    stored = Stored(NOTHING, {"n": PerRankMark("n")}, ("n",), {"n": {own["n"][0]: 5}}, lambda rank, section: {})
    with pytest.raises(CheckpointDamaged, match="^n: expected a tree among the values of rank 5, found none"):
        plan_load({"n": PerRank(0)}, stored, options=LoadOptions(), registry=REGISTRY, checkpoint="kept")


def test_the_wrapper_shows_itself() -> None:
    """A log of the app state can be read."""
    assert "PerRank(3, key='dp0')" == repr(PerRank(3, key="dp0"))
    assert "RNGState" in repr(PerRank(RNGState()))

"""Plain nested state: tensors are filled in place, values replaced, containers and key types kept."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from anyshard.adapters.survey import survey
from anyshard.errors import InvalidAppState, LimitExceeded, Mismatch, StateMismatch, UnsupportedValue
from anyshard.records.values import Unregistered
from tests.adapters.roundtrip import REGISTRY, give, keep


class Point(NamedTuple):
    """A named tuple as users write them."""

    x: Any
    y: Any


def test_tensors_at_any_depth_are_filled_in_place() -> None:
    """Lists, tuples, dicts and named tuples keep their tensors; positions and keys make the address."""
    kept = keep({"s": {"a": [torch.ones(2), (torch.ones(1), 5)], 3: Point(torch.ones(3), "y")}})
    live = {"s": {"a": [torch.zeros(2), (torch.zeros(1), 0)], 3: Point(torch.zeros(3), "")}}
    tensors = [live["s"]["a"][0], live["s"]["a"][1][0], live["s"][3].x]
    assert ("s/a/0", "s/a/1/0", "s/~i3/0") == kept.tensors.addresses
    give(kept, live)
    assert [2.0, 1.0, 3.0] == [tensor.sum().item() for tensor in tensors]
    assert tensors[1] is live["s"]["a"][1][0]
    assert (5, "y") == (live["s"]["a"][1][1], live["s"][3].y)
    assert isinstance(live["s"][3], Point)


def test_autograd_sees_that_a_tensor_was_filled() -> None:
    """The version counter rises once for each filled tensor, so that a backward over the old content fails."""
    live, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    product = (weight * live).sum()
    version = live._version
    give(keep({"x": torch.zeros(2)}), {"x": live})
    assert version + 1 == live._version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_container_without_tensors_is_replaced_whole() -> None:
    """No comparison key by key: a list of losses loads into an empty one, and an empty dict takes what was stored."""
    state: dict[str, Any] = {"extra": {}, "losses": []}
    extra, losses = state["extra"], state["losses"]
    target = give(keep({"extra": {"tokens": 123, 4: None}, "losses": [0.5] * 100}), state)
    assert {"tokens": 123, 4: None} == state["extra"]
    assert [0.5] * 100 == state["losses"]
    assert extra is state["extra"]
    assert losses is state["losses"]
    assert ("extra", "losses") == target.replaced_values


def test_stored_keys_that_are_gone_disappear() -> None:
    """Replaced whole means that nothing of the old content stays."""
    state = {"extra": {"old": 1, "both": {"x": 1}}}
    inner = state["extra"]["both"]
    give(keep({"extra": {"both": {"y": 2}}}), state)
    assert {"extra": {"both": {"y": 2}}} == state
    assert inner is state["extra"]["both"]


_MUTABLE: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "deque": lambda items: deque(items, maxlen=5),
    "set": set,
    "bytearray": bytearray,
    "dict": dict.fromkeys,
    "OrderedDict": lambda items: OrderedDict.fromkeys(items, 1),
    "defaultdict": lambda items: defaultdict(int, dict.fromkeys(items, 1)),
    "Counter": Counter,
    "SimpleNamespace": lambda items: SimpleNamespace(items=list(items)),
    "Namespace": lambda items: Namespace(items=list(items)),
}


@pytest.mark.parametrize("kind", _MUTABLE)
def test_what_can_change_keeps_its_identity(kind: str) -> None:
    """Every mutable container takes its stored content in place, at the top and below, even in a read-only app state."""
    top, deep = _MUTABLE[kind]([3, 1, 2]), _MUTABLE[kind]([7, 8, 9])
    kept = keep({"top": _MUTABLE[kind]([1, 2, 5]), "x": {"deep": _MUTABLE[kind]([4, 4, 6])}})
    state = MappingProxyType({"top": top, "x": {"deep": deep}})
    give(kept, state)
    assert (top, deep) == (_MUTABLE[kind]([1, 2, 5]), _MUTABLE[kind]([4, 4, 6]))
    assert state["x"]["deep"] is deep


@pytest.mark.parametrize(("stored", "live"), [(deque([1], maxlen=2), deque(maxlen=3)), (bytearray(b"ab"), bytearray(b"a"))])
def test_what_cannot_take_the_form_is_replaced(stored: Any, live: Any) -> None:
    """The limit of a deque is fixed, and bytes that may be exported have a fixed length: a new object stands there."""
    state = {"v": live}
    give(keep({"v": stored}), state)
    assert (stored, getattr(stored, "maxlen", None)) == (state["v"], getattr(state["v"], "maxlen", None))
    with pytest.raises(InvalidAppState, match="v: expected an app state in which values can be replaced"):
        give(keep({"v": stored}), MappingProxyType({"v": live}))


def test_one_container_held_twice_takes_one_content() -> None:
    """Two names of one live dict must not end with the content of the last one only."""
    shared = {"v": 0}
    state = {"extra": {"a": shared, "b": shared}}
    give(keep({"extra": {"a": {"v": 1}, "b": {"v": 2}}}), state)
    assert {"extra": {"a": {"v": 1}, "b": {"v": 2}}} == state


def test_values_beside_tensors_are_replaced_in_their_parent() -> None:
    """A number beside a tensor is a leaf of its own and listed in the report."""
    state: dict[str, Any] = {"s": {"t": torch.zeros(1), "n": 1, "name": None}}
    target = give(keep({"s": {"t": torch.ones(1), "n": 2, "name": "run"}}), state)
    assert {"t": torch.ones(1), "n": 2, "name": "run"} == state["s"]
    assert ("s/n", "s/name") == target.replaced_values


def test_live_value_without_tensors_takes_stored_tensors() -> None:
    """A placeholder takes the stored subtree; its tensors are newly made on the CPU."""
    state: dict[str, Any] = {"ema": None, "s": {"t": torch.zeros(1), "later": {}}}
    target = give(keep({"ema": {"w": torch.ones(2)}, "s": {"t": torch.ones(1), "later": {"u": torch.ones(3)}}}), state)
    assert torch.equal(torch.ones(2), state["ema"]["w"])
    assert torch.equal(torch.ones(3), state["s"]["later"]["u"])
    assert {"ema/w", "s/later/u"} == set(target.created)


def test_tied_leaves_taken_whole_are_one_tensor_again() -> None:
    """A tie is recorded and comes back as a tie."""
    weight = torch.ones(2)
    kept, state = keep({"s": {"b": weight, "aa": weight, "c": weight.clone()}}), dict[str, Any](s=None)
    give(kept, state)
    assert {"s/aa", "s/c"} == set(kept.data)
    assert state["s"]["aa"] is state["s"]["b"]
    assert state["s"]["aa"] is not state["s"]["c"]


@pytest.mark.parametrize("size", [4, 20_000])
def test_arrays_that_fit_are_filled(size: int) -> None:
    """An existing array of equal shape and dtype is filled, large (an extent) or small (a value), nested or not."""
    state = {"top": np.zeros(size), "extra": {"deep": [np.zeros(size)], "n": 0}}
    top, deep = state["top"], state["extra"]["deep"][0]
    kept = keep({"top": np.arange(float(size)), "extra": {"deep": [np.arange(float(size)) + 1], "n": 1}})
    assert (2 if size > 8192 else 0) == len(kept.data)
    give(kept, state)
    assert np.array_equal(np.arange(float(size)), top)
    assert np.array_equal(np.arange(float(size)) + 1, deep)
    assert top is state["top"]
    assert deep is state["extra"]["deep"][0]


@pytest.mark.parametrize("live", [None, np.zeros(3), np.zeros(20_000, np.float32), np.broadcast_to(0.0, 20_000)])
def test_arrays_that_do_not_fit_are_replaced(live: object) -> None:
    """Another shape, another dtype or read-only memory: a new array stands there."""
    state = {"a": live}
    give(keep({"a": np.arange(20_000.0)}), state)
    assert np.array_equal(np.arange(20_000.0), state["a"])


def test_large_arrays_of_any_layout() -> None:
    """Fortran order is stored as dense elements."""
    array = np.asfortranarray(np.arange(20_000.0).reshape(100, 200)).T
    state: dict[str, Any] = {"a": None}
    give(keep({"a": array}), state)
    assert np.array_equal(array, state["a"])


@pytest.mark.parametrize(
    "array", [np.array(["x" * 9] * 9000), np.zeros(9000, dtype="M8[s]"), np.zeros(9000, dtype=[("a", "f8")])]
)
def test_arrays_of_other_dtypes_are_refused(array: Any) -> None:
    """Text, dates and structures have no place in the table of dtypes."""
    with pytest.raises(UnsupportedValue, match="extra/a"):
        keep({"extra": {"a": array}})


@pytest.mark.parametrize("size", [4, 20_000])
def test_arrays_in_foreign_byte_order_are_refused(size: int) -> None:
    """Large or small, they would come back in native byte order, which is another dtype."""
    with pytest.raises(UnsupportedValue, match="extra/a: .* native byte order"):
        keep({"extra": {"a": np.zeros(size, dtype=">f4")}})


def test_large_byte_strings_are_extents() -> None:
    """They do not weigh on the values and come back as bytes."""
    kept, state = keep({"blob": {"b": bytes(range(256)) * 300}}), {"blob": {"b": b""}}
    give(kept, state)
    assert ("blob/b",) == kept.tensors.addresses
    assert bytes(range(256)) * 300 == state["blob"]["b"]


def test_random_state_of_all_libraries() -> None:
    """Python's, NumPy's and torch's random states give the same numbers after a load; a live generator keeps its identity."""
    generator, rng = torch.Generator().manual_seed(7), np.random.default_rng(7)
    kept = keep({"g": generator, "r": {"py": random.Random(7).getstate(), "np": rng.bit_generator.state, "n": {"g": generator}}})
    expected = torch.rand(3, generator=generator).tolist(), rng.random(3).tolist(), random.Random(7).random()
    live, deep = torch.Generator(), torch.Generator()
    state: dict[str, Any] = {"g": live, "r": {"py": None, "np": None, "n": {"g": deep}}}
    give(kept, state)
    rng.bit_generator.state = state["r"]["np"]
    python = random.Random()
    python.setstate(state["r"]["py"])
    assert expected == (torch.rand(3, generator=live).tolist(), rng.random(3).tolist(), python.random())
    assert expected[0] == torch.rand(3, generator=deep).tolist()
    assert live is state["g"]


def test_torch_values_round_trip() -> None:
    """dtypes, sizes, devices and generators are values with names of their own."""
    values = [torch.float8_e5m2, torch.Size([2, 3]), torch.device("cuda:1"), torch.Generator().manual_seed(3)]
    state: dict[str, Any] = {"v": None}
    give(keep({"v": values}), state)
    assert values[:3] == state["v"][:3]
    assert [torch.dtype, torch.Size, torch.device] == [type(value) for value in state["v"][:3]]
    assert torch.equal(values[3].get_state(), state["v"][3].get_state())


def test_keys_that_print_alike_are_kept_apart() -> None:
    """`1`, `"1"`, None and a tuple are four leaves with four addresses."""
    keys = (1, "1", None, (1, "1"))
    state = {"s": {key: torch.zeros(1) for key in keys}}
    give(keep({"s": {key: torch.full((1,), float(number)) for number, key in enumerate(keys)}}), state)
    assert [0.0, 1.0, 2.0, 3.0] == [tensor.item() for tensor in state["s"].values()]


def test_differences_name_every_address() -> None:
    """All differences come in one error, and nothing was changed."""
    state = {"s": {"shape": torch.zeros(2), "dtype": torch.zeros(2), "gone": torch.zeros(1), "kind": torch.zeros(1)}}
    kept = keep({"s": {"shape": torch.ones(3), "dtype": torch.ones(2).half(), "new": torch.ones(1), "kind": 4}})
    with pytest.raises(StateMismatch) as caught:
        give(kept, state)
    expected = {
        (Mismatch.SHAPE, "s/shape", "(2,)", "(3,)"),
        (Mismatch.DTYPE, "s/dtype", "float32", "float16"),
        (Mismatch.KIND, "s/kind", "a tensor", "a stored int"),
        (Mismatch.MISSING, "s/gone", "in the checkpoint", "not stored"),
        (Mismatch.UNEXPECTED, "s/new", "in the app state", "only in the checkpoint"),
    }
    assert expected == {(d.kind, d.address, d.expected, d.found) for d in caught.value.differences}
    assert not any(tensor.any() for tensor in state["s"].values())


def test_list_with_tensors_against_a_dict_is_a_difference() -> None:
    """A sequence with tensors cannot be filled from a mapping."""
    with pytest.raises(StateMismatch, match="s: kind"):
        give(keep({"s": {"0": torch.zeros(1)}}), {"s": [torch.zeros(1)]})


def test_values_need_an_app_state_that_can_change() -> None:
    """A read-only mapping may hold tensors, but no value that would have to be replaced in it."""
    kept = keep({"t": torch.ones(1), "d": {"a": 1}, "n": 1})
    give(kept, MappingProxyType({"t": torch.zeros(1), "d": {}}))
    with pytest.raises(InvalidAppState, match="n: expected an app state in which values can be replaced"):
        give(kept, MappingProxyType({"n": 0}))


def test_views_are_saved_as_tensors_of_their_own() -> None:
    """Slices of one buffer, and a tensor beside a view of its half, are separate and correct (B068)."""
    flat = torch.arange(6.0)
    kept = keep({"s": {"low": flat[:3], "high": flat[3:], "whole": flat}})
    assert [-1, -1, -1] == kept.tensors.alias_of.tolist()
    assert flat[3:].numpy().tobytes() == kept.data["s/high"]


def test_deques_and_ordered_dicts_keep_their_type() -> None:
    """The containers that hold tensors come back with their true types."""
    state: dict[str, Any] = {"s": None}
    give(keep({"s": OrderedDict(q=deque([torch.ones(1), 2], maxlen=5))}), state)
    assert (OrderedDict, 5) == (type(state["s"]), state["s"]["q"].maxlen)


def test_shared_lists_are_looked_over_once() -> None:
    """A list that is held on many paths is no list of many lists to the survey."""
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared, shared]
    assert survey({"s": shared}, REGISTRY).holders == set()


@pytest.mark.parametrize("depth", [100, 5000])
@pytest.mark.parametrize("leaf", [1, torch.zeros(1), nn.Linear(1, 1)], ids=["value", "tensor", "module"])
def test_deep_nesting_is_refused(depth: int, leaf: Any) -> None:
    """Deeper than values may be stored is an error with the address, not one of Python's stack; a load replaces a value."""
    deep = leaf
    for _ in range(depth):
        deep = [deep]
    with pytest.raises(LimitExceeded, match="s/0/0/.* nested containers"):
        keep({"s": deep})
    state = {"s": deep}
    if leaf == 1:
        give(keep({"s": 1}), state)
        assert 1 == state["s"]
    elif isinstance(leaf, nn.Module):
        with pytest.raises(LimitExceeded, match="s/0/0/.* nested containers"):
            give(keep({"s": [1]}), state)
    else:
        with pytest.raises(StateMismatch, match="s: kind"):
            give(keep({"s": 1}), state)


@pytest.mark.parametrize("holder", ["value", "module"])
def test_container_that_contains_itself_is_refused(holder: str) -> None:
    """A cycle ends with an error that names the address."""
    cycle: list[Any] = [torch.zeros(1) if holder == "value" else {"m": torch.nn.Linear(1, 1)}]
    cycle.append(cycle)
    with pytest.raises((UnsupportedValue, InvalidAppState), match="s/1.*contains itself"):
        keep({"s": cycle})


def test_keys_that_no_address_can_hold_are_fine_without_tensors() -> None:
    """A mapping with path keys is one value, on both sides."""
    state: dict[str, Any] = {"files": {Path("a"): [1]}}
    give(keep({"files": {Path("b"): [2]}}), state)
    assert {Path("b"): [2]} == state["files"]


def test_top_level_names_must_be_text() -> None:
    """Sections are named by strings."""
    with pytest.raises(InvalidAppState, match="found 3"):
        keep({3: torch.zeros(1)})  # type: ignore[dict-item]


class _TwoParts(torch.Tensor):
    """A tensor subclass that can be taken apart and does nothing else."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape)  # type: ignore[attr-defined]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["qdata", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_b072_flattened_subclasses_are_stored_by_their_parts() -> None:
    """Inner tensors are saved through the flatten protocol and filled in place into a live subclass."""
    live = _TwoParts(torch.zeros(4, dtype=torch.int8), torch.zeros(1))
    kept = keep({"s": {"w": _TwoParts(torch.arange(4, dtype=torch.int8), torch.ones(1))}})
    give(kept, {"s": {"w": live}})
    assert ("s/w/qdata", "s/w/scale") == kept.tensors.addresses
    assert ([0, 1, 2, 3], [1.0]) == (live.qdata.tolist(), live.scale.tolist())
    with pytest.raises(StateMismatch, match="s/w: kind"):
        give(keep({"s": {"w": torch.zeros(4)}}), {"s": {"w": live}})


def test_unregistered_values_are_reported() -> None:
    """A type that nobody registered here comes as a record, never silently."""
    stored = Unregistered("mine", {"a": 1}, b"\x92\xa4mine\x81\xa1a\x01")
    state: dict[str, Any] = {"s": {"v": None}}
    target = give(keep({"s": {"v": stored}}), state)
    assert stored == state["s"]["v"]
    assert ["s: holds a value of a type that is not registered" in warning for warning in target.warnings] == [True]


@pytest.mark.parametrize("stored", [[torch.ones(2)], (torch.ones(2),), deque([torch.ones(2)])])
@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_sequences_stand_for_each_other(stored: Any, kind: Callable[[Any], Any]) -> None:
    """Tensors in lists, tuples and deques go by position, so each loads from each."""
    tensor = torch.zeros(2)
    give(keep({"s": stored}), {"s": kind([tensor])})
    assert [1.0, 1.0] == tensor.tolist()


@pytest.mark.parametrize(("stored", "live"), [({"0": torch.ones(2)}, deque), (deque([torch.ones(2)]), lambda t: {"0": t[0]})])
def test_mapping_and_deque_do_not_stand_for_each_other(stored: Any, live: Callable[[Any], Any]) -> None:
    """A key that looks like a position is none."""
    with pytest.raises(StateMismatch, match="s: kind"):
        give(keep({"s": stored}), {"s": live([torch.zeros(2)])})

"""The cache of captures: gives what `capture` gives, whatever has changed meanwhile, and takes the quick way if nothing has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from anyshard.adapters.capture import capture
from anyshard.adapters.capture_cache import CaptureCache
from anyshard.adapters.per_rank import PerRank
from anyshard.adapters.random_state import RNGState
from anyshard.agreed_plan import describe_structure
from anyshard.errors import AnyshardError
from anyshard.records.captured import Captured
from anyshard.records.handles import Source
from anyshard.records.section_values import SectionValues, encode_section
from anyshard.testing.layouts import LAYOUTS, make_mesh
from anyshard.testing.training import fill_training
from anyshard.testing.world import Worlds
from tests.adapters.fake_ranks import as_rank
from tests.adapters.roundtrip import REGISTRY
from tests.adapters.test_capture_ranks import make_net
from tests.adapters.test_modules import WRAPPINGS, Block


class Net(nn.Module):
    """Tied parameters, buffers of both kinds, a missing one, a wrapped child, a parametrized one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.inner = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
        self.turned = parametrizations.orthogonal(nn.Linear(2, 2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("missing", None)


class Loader:
    """A stateful that counts how often it is asked, with a tensor that is a new one each time."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.size = 2

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        self.num_asked += 1
        return {"order": torch.arange(self.size), "position": self.num_asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""


@dataclass
class Scene:
    """An app state with all kinds of things in it."""

    model: Net = field(default_factory=Net)
    loader: Loader = field(default_factory=Loader)

    def __post_init__(self) -> None:
        self.other = nn.Linear(2, 1)
        self.optim = torch.optim.AdamW(
            [{"params": [*self.model.parameters()]}, {"params": [*self.other.parameters()], "lr": 0.1}]
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optim, 1)
        self.step()
        self.app: dict[str, Any] = {
            "model": self.model,
            "parts": {
                "other": self.other,
                "loader": self.loader,
                "note": "text",
                "tensors": [torch.ones(2), {"a": torch.ones(1)}],
            },
            "optim": self.optim,
            "scheduler": self.scheduler,
            "plain": {"w": torch.ones(2), "history": [1], "deep": {"x": torch.ones(3), "y": torch.ones(0)}},
            "own": PerRank({"seen": torch.ones(2), "n": 1}),
            "rng": RNGState(),
            "epoch": 1,
        }

    def step(self) -> None:
        """Take a step of the optimizer."""
        for group in self.optim.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        self.optim.step()
        self.optim.zero_grad()

    def state_of(self, param: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter."""
        state: dict[str, Any] = self.optim.state[param]
        return state


def read(source: Source) -> bytes:
    """All bytes of a source."""
    data = bytearray(source.nbytes)
    if data:
        source.read_into(0, memoryview(data))
    return bytes(data)


def encode_trees(captured: Captured, *, quickly: bool) -> dict[str, bytes]:
    """The payload of each section."""
    constants = captured.constants if quickly else None
    return {
        name: encode_section(SectionValues(tree), section=name, registry=REGISTRY, constants=constants)
        for name, tree in captured.trees.items()
    }


def list_facts(captured: Captured) -> dict[str, Any]:
    """All that a capture says, with the bytes of its sources and the order of its trees."""
    table, tensors = captured.shards, captured.shards.tensors
    columns = (tensors.shapes, tensors.ndims, tensors.alias_of, table.tensor, table.offsets, table.lengths)
    rest = {
        each.name: getattr(captured, each.name)
        for each in fields(captured)
        if each.name not in ("shards", "sources", "trees", "per_rank", "constants", "memory")
    }
    own = {address: (part.key, repr(part.tree)) for address, part in captured.per_rank.items()}
    return {
        "names": (tensors.addresses, tensors.dtypes),
        "columns": [column.tolist() for column in columns],
        "bytes": list(map(read, captured.sources)),
        "trees": encode_trees(captured, quickly=False),
        "own": own,
        **rest,
    }


def attempt(act: Callable[[], Captured]) -> object:
    """What a capture says, or the error that it ends with."""
    try:
        return list_facts(act())
    except AnyshardError as error:
        return type(error), str(error)


def check_same(cache: CaptureCache, app: dict[str, Any], *, loader: Loader | None = None, world_size: int = 1) -> None:
    """Whether the cache gives what the slow way gives of the same moment."""
    asked = loader.num_asked if loader else 0
    expected = attempt(lambda: capture(app, registry=REGISTRY, world_size=world_size))
    if loader:
        loader.num_asked = asked
    assert expected == attempt(lambda: cache.capture(app, registry=REGISTRY, world_size=world_size))
    assert loader is None or loader.num_asked <= asked + 1


def start(app: dict[str, Any]) -> CaptureCache:
    """A cache that has a record of an app state, as one hit shows."""
    cache = CaptureCache()
    first, second = (cache.capture(app, registry=REGISTRY) for _ in range(2))
    assert (1, True) == (cache.num_hits, first.shards is second.shards)
    return cache


def _set(target: Any, name: str, value: object) -> None:
    setattr(target, name, value)


def _grow(scene: Scene) -> None:
    scene.loader.size += 1


def _drop_state(scene: Scene) -> None:
    del scene.optim.state[scene.other.bias]


def _retie(scene: Scene) -> None:
    scene.model.head.weight = nn.Parameter(torch.ones(3, 2))


def _rename(scene: Scene) -> None:
    scene.model.inner2 = scene.model.inner
    del scene.model.inner


def _swap_buffer_kind(scene: Scene) -> None:
    scene.model._non_persistent_buffers_set.clear()


def _move(scene: Scene) -> None:
    scene.model.turned.extra = scene.model.__dict__["_parameters"].setdefault("p", nn.Parameter(torch.ones(1)))


def _hook(scene: Scene) -> None:
    scene.model.embed._register_state_dict_hook(lambda _, state, prefix, __: state.update({f"{prefix}more": torch.ones(1)}))


def _pre_hook(scene: Scene) -> None:
    scene.model.embed.register_state_dict_pre_hook(lambda module, *_: _set(module, "weight", nn.Parameter(torch.zeros(3, 2))))


def _extra_state(scene: Scene) -> None:
    scene.model.embed.__class__ = type("Extra", (nn.Embedding,), {"get_extra_state": lambda _: {"n": 1}})


def _own_method(scene: Scene) -> None:
    def save(self: nn.Module, destination: dict[str, Any], prefix: str, _: object) -> None:
        destination[f"{prefix}weight"] = self.weight * 2

    scene.other._save_to_state_dict = MethodType(save, scene.other)


def _share_memory(scene: Scene) -> None:
    scene.app["plain"]["w"].data = scene.app["plain"]["deep"]["x"].data[:2]


def _free(scene: Scene) -> None:
    scene.model.mean.untyped_storage().resize_(0)


SAME: dict[str, Callable[[Scene], object]] = {
    "nothing": lambda _: None,
    "a step": lambda s: s.step(),
    "learning rates": lambda s: s.scheduler.step(),
    "an option more": lambda s: s.optim.param_groups[0].update(more=[1, {"two": 2}]),
    "values in plain dicts": lambda s: s.app["plain"].update(history=[1, 2, {"three": 3}]),
    "values at the top": lambda s: s.app.update(epoch=2),
    "values of any type": lambda s: s.app.update(epoch={"now": "a dict"}),
    "a non-persistent buffer": lambda s: _set(s.model, "cache", torch.ones(5)),
    "a value in a container of objects": lambda s: s.app["parts"].update(note=[1, 2]),
    "an equal container": lambda s: s.app.update(plain={**s.app["plain"]}),
    "values per rank": lambda s: s.app["own"].value.update(n=2),
    "a tensor per rank": lambda s: s.app["own"].value.update(seen=torch.zeros(2)),
    "another wrapper": lambda s: s.app.update(model=torch.compile(s.model, backend="eager")),
    "the same state again": lambda s: s.state_of(s.other.bias).update(step=s.state_of(s.other.bias)["step"]),
}

CHANGED: dict[str, Callable[[Scene], object]] = {
    "a parameter replaced": lambda s: _set(s.other, "bias", nn.Parameter(torch.ones(1))),
    "a parameter added": lambda s: s.other.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a parameter removed": lambda s: s.other.register_parameter("bias", None),
    "a buffer replaced": lambda s: _set(s.model, "mean", torch.ones(2)),
    "a buffer that was missing": lambda s: _set(s.model, "missing", torch.ones(2)),
    "a non-persistent buffer gone": lambda s: _set(s.model, "cache", None),
    "a buffer that became persistent": _swap_buffer_kind,
    "a child added": lambda s: s.model.add_module("new", nn.Linear(1, 1)),
    "a child replaced": lambda s: _set(s.model, "turned", nn.Linear(2, 2)),
    "a child removed": lambda s: s.model.__delattr__("turned"),
    "a child set to None": lambda s: _set(s.model, "turned", None),
    "a child renamed": _rename,
    "a parameter in two places": _move,
    "a tie broken": _retie,
    "a tie made": lambda s: _set(s.model.inner[0], "weight", s.model.turned.parametrizations.weight.original),
    "memory of a parameter": lambda s: _set(s.other.weight, "data", torch.zeros(1, 2)),
    "shape of a parameter": lambda s: _set(s.other.weight, "data", torch.zeros(2, 1)),
    "strides of a parameter": lambda s: _set(s.model.embed.weight, "data", torch.zeros(2, 3).t()),
    "dtype of a parameter": lambda s: s.other.to(torch.bfloat16),
    "shared memory": _share_memory,
    "an expanded tensor": lambda s: _set(s.app["plain"]["w"], "data", torch.zeros(1).expand(2)),
    "freed memory": _free,
    "meta memory": lambda s: s.other.to_empty(device="meta"),
    "a hook": _hook,
    "a hook before": _pre_hook,
    "extra state": _extra_state,
    "a method of the module's own": _own_method,
    "state replaced": lambda s: s.state_of(s.other.bias).update(exp_avg=torch.ones(1)),
    "state added": lambda s: s.state_of(s.other.bias).update(more=torch.ones(1)),
    "state removed": lambda s: s.state_of(s.other.bias).pop("exp_avg"),
    "state of another type": lambda s: s.state_of(s.other.bias).update(step=3),
    "state of a parameter gone": _drop_state,
    "state of no parameter": lambda s: s.optim.state.update(note={"a": 1}),
    "state of a stranger": lambda s: s.optim.state.update({torch.ones(1): {}}),
    "no state": lambda s: s.optim.state.clear(),
    "a parameter in another group": lambda s: s.optim.param_groups[1]["params"].append(s.optim.param_groups[0]["params"].pop()),
    "a group more": lambda s: s.optim.add_param_group({"params": []}),
    "a hook of the optimizer": lambda s: s.optim.register_state_dict_post_hook(lambda *_: None),
    "another optimizer": lambda s: s.app.update(optim=torch.optim.SGD([*s.model.parameters(), *s.other.parameters()])),
    "several optimizers": lambda s: s.app.update(optim=[s.optim, torch.optim.SGD([nn.Parameter(torch.ones(1))])]),
    "another module": lambda s: s.app.update(model=Net()),
    "several modules": lambda s: s.app.update(model=[s.model, nn.Conv1d(1, 1, 1)]),
    "a tensor in a dict replaced": lambda s: s.app["plain"].update(w=torch.ones(2)),
    "a tensor where a value was": lambda s: s.app["plain"]["history"].append(torch.ones(2)),
    "a value where a tensor was": lambda s: s.app["plain"].update(w=1),
    "another order": lambda s: s.app["plain"].update(w=s.app["plain"].pop("w")),
    "a key of another type": lambda s: s.app["plain"].update({1: torch.ones(1)}),
    "a key that is no address": lambda s: s.app["plain"]["history"].append({frozenset(): 1}),
    "another container": lambda s: s.app["parts"].update(tensors=tuple(s.app["parts"]["tensors"])),
    "an object in a plain dict": lambda s: s.app["plain"].update(history=nn.Linear(1, 1)),
    "an object in place of a value": lambda s: s.app.update(epoch=nn.Linear(1, 1)),
    "a cycle": lambda s: s.app["plain"]["history"].append(s.app["plain"]["history"]),
    "a section more": lambda s: s.app.update(more=1),
    "a state that grows": _grow,
    "a state that is tied": lambda s: _set(s.loader, "state_dict", lambda: {"order": s.model.mean}),
    "a module per rank": lambda s: _set(s.app["own"], "value", nn.Linear(1, 1)),
    "a large value": lambda s: s.app["plain"].update(history=bytes(1 << 16)),
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_in_values_alone_is_taken_anew_the_quick_way(change: str) -> None:
    """The next capture is a hit, and says what the slow way says."""
    scene = Scene()
    cache = start(scene.app)
    SAME[change](scene)
    check_same(cache, scene.app, loader=scene.loader)
    assert cache.num_hits == 2


@pytest.mark.parametrize("change", CHANGED)
def test_what_changes_otherwise_is_taken_the_slow_way(change: str) -> None:
    """The next capture is no hit, and says what the slow way says, errors too; statefuls are not asked twice."""
    scene = Scene()
    cache = start(scene.app)
    CHANGED[change](scene)
    check_same(cache, scene.app, loader=scene.loader)
    assert cache.num_hits == 1
    check_same(cache, scene.app, loader=scene.loader)


@settings(max_examples=15, deadline=None)
@given(changes=st.lists(st.sampled_from(sorted({**SAME, **CHANGED})), max_size=5))
def test_any_changes_one_after_another(changes: list[str]) -> None:
    """After each of them the cache gives what the slow way gives."""
    scene = Scene()
    cache = start(scene.app)
    for change in changes:
        with suppress(Exception):  # some cannot be made after others, or only in part
            {**SAME, **CHANGED}[change](scene)
        check_same(cache, scene.app, loader=scene.loader)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrapped_modules_are_taken_the_quick_way(wrapping: str) -> None:
    """Compiled, parallel and checkpointed modules and children have records."""
    app = {"model": WRAPPINGS[wrapping](Block())}
    check_same(start(app), app)


def test_each_of_several_app_states_has_its_record() -> None:
    """App states that are saved in turns hit all the time, four of them."""
    apps: list[dict[str, object]] = [{name: nn.Linear(1, 1)} for name in "abcd"]
    cache = CaptureCache()
    for app in apps * 3:
        cache.capture(app, registry=REGISTRY)
    assert cache.num_hits == 8


def test_plain_values_in_the_state_of_an_optimizer_are_taken_anew() -> None:
    """Steps that are numbers, as older optimizers have them, are those of each save."""
    scene, cache = Scene(), CaptureCache()
    for state in scene.optim.state.values():
        state["step"] = 1
    cache.capture(scene.app, registry=REGISTRY)
    for state in scene.optim.state.values():
        state["step"] += 1
    check_same(cache, scene.app, loader=scene.loader)
    assert cache.num_hits == 1


def test_warns_of_an_optimizer_without_state_each_time() -> None:
    """The count in the warning is that of the moment."""
    model, cache = nn.Linear(1, 1), CaptureCache()
    app = {"model": model, "optim": torch.optim.SGD(model.parameters())}
    cache.capture(app, registry=REGISTRY)
    check_same(cache, app)
    model.bias.requires_grad_(False)
    check_same(cache, app)
    assert cache.num_hits == 1


def test_large_arrays_and_odd_containers_are_taken_anew() -> None:
    """What has no record of its own takes part in the quick way."""
    odd = {"array": torch.zeros(1 << 14).numpy(), "w": torch.ones(2)}
    app, cache = {"model": nn.Linear(1, 1), "odd": odd}, CaptureCache()
    cache.capture(app, registry=REGISTRY)
    odd["array"] = odd["array"] + 1
    check_same(cache, app)
    assert cache.num_hits == 1


def test_holds_nothing_alive() -> None:
    """Once the user has dropped an app state, modules and tensors of it are gone, and their ids mean nothing any more."""
    scene, cache = Scene(), CaptureCache()
    cache.capture(scene.app, registry=REGISTRY)
    cache.capture(scene.app, registry=REGISTRY)
    tensors = [*scene.model.parameters(), *scene.model.buffers(), *scene.other.parameters(), scene.app["plain"]["w"]]
    tensors += [value for state in scene.optim.state.values() for value in state.values()]
    dead = [weakref.ref(item) for item in (*tensors, *scene.model.modules(), scene.optim, scene.loader)]
    del scene, tensors
    gc.collect()
    assert [None] * len(dead) == [ref() for ref in dead]
    again = Scene()
    check_same(cache, again.app, loader=again.loader)
    assert cache.num_hits == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_kept_of_trees_says_the_same(world_size: int) -> None:
    """Structures, their fingerprints and payloads are those that are made without what was kept, while values change."""
    scene, cache = Scene(), CaptureCache()
    for _ in range(3):
        captured = cache.capture(scene.app, registry=REGISTRY)
        plain = Captured(
            **{each.name: getattr(captured, each.name) for each in fields(captured) if each.name not in ("constants", "memory")}
        )
        expected, found = (describe_structure(each, REGISTRY, world_size=world_size) for each in (plain, captured))
        assert [(name, list(parts.items())) for name, parts in expected.parts.parts.items()] == [
            (name, list(parts.items())) for name, parts in found.parts.parts.items()
        ]
        marks = {"world_size": world_size, "max_blob_nbytes": 1 << 30}
        assert expected.fingerprint(**marks) == found.fingerprint(**marks)
        assert encode_trees(captured, quickly=False) == encode_trees(captured, quickly=True)
        scene.scheduler.step()
        scene.app["plain"]["history"] = {"other": {}, "paths": 1} if scene.app["plain"]["history"] == [1] else {}
    assert cache.num_hits == 2


@pytest.mark.parametrize("name", ["fsdp3", "hsdp2x2", "tp2", "fsdp2 x tp2", "ep2 x fsdp2"])
def test_layouts_are_taken_the_quick_way(name: str) -> None:
    """DTensors of every kind, also those of which a rank has several regions or none, and their state."""
    with as_rank(1, LAYOUTS[name].size):
        make_mesh.cache_clear()
        model, optimizer = LAYOUTS[name].build()
        fill_training(model, optimizer)
        app, cache = {"model": model, "optim": optimizer}, CaptureCache()
        cache.capture(app, registry=REGISTRY, world_size=LAYOUTS[name].size)
        check_same(cache, app, world_size=LAYOUTS[name].size)
        assert cache.num_hits == 1
        weight = dict(model.named_parameters())["experts"]
        weight.to_local().untyped_storage().resize_(0)
        check_same(cache, app, world_size=LAYOUTS[name].size)
        assert cache.num_hits == 1


def test_a_learning_rate_that_is_a_tensor_is_taken_anew() -> None:
    """It may be another tensor each time, and the same one in all groups."""
    model = nn.Linear(2, 1)
    optim = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=torch.tensor(0.1), foreach=False)
    app = {"model": model, "optim": optim}
    cache = start(app)
    for group in optim.param_groups:
        group["lr"] = torch.tensor(0.2)
    check_same(cache, app)  # tied no more
    check_same(cache, app)
    assert cache.num_hits == 2


def test_sharded_state_of_another_stateful_is_taken_anew() -> None:
    """An average of a sharded model is one, as its own state dict gives it."""
    with as_rank(1, 2):
        make_mesh.cache_clear()
        model, _ = LAYOUTS["fsdp2"].build()
        loader = Loader()
        loader.state_dict = lambda: {name: param.detach().clone() for name, param in model.named_parameters()}  # type: ignore[method-assign]
        app, cache = {"model": model, "average": loader}, CaptureCache()
        cache.capture(app, registry=REGISTRY, world_size=2)
        check_same(cache, app, world_size=2)
        assert cache.num_hits == 1


def test_does_not_keep_torch_from_exchanging_tensors() -> None:
    """A sharded module can be converted between two saves, which torch does by swapping its parameters in place."""
    with as_rank(0, 2):
        make_mesh.cache_clear()
        model, _ = LAYOUTS["fsdp2"].build()
        cache = CaptureCache()
        cache.capture({"model": model}, registry=REGISTRY, world_size=2)
        model.to(torch.float64)
        check_same(cache, {"model": model}, world_size=2)
        assert cache.num_hits == 0


def capture_unsharded(reshard: bool) -> tuple[list[int], bool, bool]:
    """Hits before and after a forward pass, whether that left parameters unsharded, and whether both captures are the same."""
    model, optimizer = make_net(reshard=reshard)
    app, cache = {"model": model, "optim": optimizer}, CaptureCache()
    before = cache.capture(app, registry=REGISTRY, world_size=2)
    expected, hits = list_facts(before), [cache.num_hits]
    model(torch.ones(2, 6))
    is_whole = any(type(param) is nn.Parameter for param in model.parameters())
    found = cache.capture(app, registry=REGISTRY, world_size=2)
    return [*hits, cache.num_hits], is_whole, found.shards is before.shards and expected == list_facts(found)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
def test_an_unsharded_model_is_taken_the_quick_way(worlds: Worlds, *, reshard: bool) -> None:
    """After a forward pass of FSDP2 its hook puts the shards back, which are the tensors that were there before."""
    assert [([0, 1], True, True)] * 2 == worlds(2).run(capture_unsharded, reshard)

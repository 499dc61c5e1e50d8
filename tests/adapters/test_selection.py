"""Strict and partial loads: what is asked for, what is missing, what is left alone, and what would silently do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anyshard.errors import InvalidAppState, Mismatch, StateMismatch
from tests.adapters.roundtrip import give, keep, plan


def _layers(num: int, *, fill: float = 0.0) -> nn.Sequential:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num)))
    for param in module.parameters():
        nn.init.constant_(param, fill)
    return module


def _differences(error: StateMismatch) -> set[tuple[Mismatch, str]]:
    return {(difference.kind, difference.address) for difference in error.differences}


@pytest.mark.parametrize(
    ("num", "kind", "addresses"),
    [(3, Mismatch.MISSING, ("m/2.weight", "m/2.bias")), (1, Mismatch.UNEXPECTED, ("m/1.weight", "m/1.bias"))],
)
def test_strict_load_names_every_missing_and_unexpected_address(num: int, kind: Mismatch, addresses: tuple[str, ...]) -> None:
    """Two layers into three and into one: both are errors if strict, lists in the report if not (B108)."""
    kept, live = keep({"m": _layers(2, fill=1.0)}), _layers(num)
    with pytest.raises(StateMismatch) as caught:
        give(kept, {"m": live})
    assert {(kind, address) for address in addresses} == _differences(caught.value)
    assert not any(param.any() for param in live.parameters())
    target = give(kept, {"m": live}, strict=False)
    assert set(addresses) == set(target.missing if kind is Mismatch.MISSING else target.unexpected)
    assert live[0].weight.eq(1).all()
    assert not live[num - 1].weight.any() or num == 1


def test_sections_not_asked_for_are_only_listed() -> None:
    """A model loads alone from a full checkpoint (P1)."""
    target = give(keep({"m": _layers(1), "opt": {"state": 1}, "extra": 3}), {"m": _layers(1)})
    assert ("opt", "extra") == target.not_asked_for
    assert () == target.unexpected


def test_section_that_is_not_stored_is_named_so() -> None:
    """The error says that the optimizer is not stored and what is; without strict it stays as it is (B111)."""
    module = _layers(1)
    state = {"m": module, "opt": torch.optim.SGD(module.parameters(), lr=0.1)}
    kept = keep({"m": _layers(1), "extra": 3})
    with pytest.raises(StateMismatch, match=r"opt: missing .*found opt not stored \(stored: m, extra\)"):
        give(kept, state)
    assert ("opt",) == give(kept, state, strict=False).missing


@pytest.mark.parametrize("live", [{"m": _layers(1)}, {"t": {"a": torch.zeros(1)}}, {"other": torch.zeros(1)}])
def test_nothing_in_common_is_an_error_even_if_not_strict(live: Any) -> None:
    """Renamed keys, or a misspelt section alone, must not pass as a load (B110)."""
    kept = keep({"m": {"renamed.weight": torch.ones(2, 2)}, "t": {"b": torch.ones(1)}})
    with pytest.raises(StateMismatch, match="expected an address that the checkpoint has too, found none of"):
        give(kept, live, strict=False)


def test_only_loads_what_its_globs_match() -> None:
    """All else stays, is not missing, and sections without a match need not be stored."""
    live = _layers(2)
    state = {"m": live, "opt": torch.optim.SGD(live.parameters(), lr=0.1), "n": 1}
    target = give(keep({"m": _layers(3, fill=1.0), "n": 2}), state, only=("m/0.*",))
    assert [True, True, False, False] == [bool(param.any()) for param in live.parameters()]
    assert ((), (), 1) == (target.missing, target.unexpected, state["n"])


def test_exclude_leaves_alone_what_its_globs_match() -> None:
    """Excluded addresses are neither loaded nor missing nor unexpected, whatever their shape."""
    live = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5))
    target = give(keep({"m": _layers(3, fill=1.0)}), {"m": live}, exclude=("m/[12].*",))
    assert live[0].weight.eq(1).all()
    assert ((), ()) == (target.missing, target.unexpected)
    assert 2 == len(target.destinations)


@pytest.mark.parametrize("glob", ["extra", "extra/*", "extra/**", "**"])
def test_glob_for_all_below_a_value_covers_the_value(glob: str) -> None:
    """What is loaded as one is selected by its address, or by a glob that would match anything below it."""
    state = {"extra": {"a": 1}, "m": _layers(1)}
    kept = keep({"extra": {"a": 2}, "m": _layers(1)})
    give(kept, state, exclude=(glob,))
    assert {"a": 1} == state["extra"]
    give(kept, state, only=(glob,))
    assert {"a": 2} == state["extra"]


def test_globs_without_a_match_are_not_silent() -> None:
    """For `only` they are an error, for `exclude` a line in the report."""
    kept = keep({"m": _layers(1), "extra": {"a": 2}})
    with pytest.raises(StateMismatch, match="model/"):
        give(kept, {"m": _layers(1)}, only=("m/**", "model/**"), strict=False)
    target = give(kept, {"m": _layers(1), "extra": {"a": 1}}, exclude=("extra/a", "m/0.weight"))
    assert ("exclude='extra/a' matched no address",) == target.warnings


def test_cast_converts_on_the_way_in() -> None:
    """float32 into bfloat16 is an error unless asked for; shapes never bend."""
    source, live = _layers(1, fill=1.00390625), _layers(1).bfloat16()
    with pytest.raises(StateMismatch, match=r"m/0.bias: dtype \(expected bfloat16, found float32\)"):
        give(keep({"m": source}), {"m": live})
    give(keep({"m": source}), {"m": live}, cast=True)
    assert torch.equal(source[0].weight.bfloat16(), live[0].weight)
    with pytest.raises(StateMismatch, match="dtype"):
        give(keep({"x": torch.ones(2)}), {"x": torch.zeros(2, dtype=torch.int32)}, cast=True)


def test_planning_changes_nothing() -> None:
    """Until the fill, tensors, values, optimizer state and options are as they were."""
    saved, live = _layers(1, fill=1.0), _layers(1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9) for module, lr in ((saved, 0.5), (live, 0.1))]
    for param in saved.parameters():
        param.grad = torch.ones_like(param)
    optimizers[0].step()
    state = {"m": live, "opt": optimizers[1], "n": {"a": 1}}
    plan(keep({"m": saved, "opt": optimizers[0], "n": {"a": 2}}), state)
    assert not any(param.any() for param in live.parameters())
    assert (0, 0.1, {"a": 1}) == (len(optimizers[1].state), optimizers[1].param_groups[0]["lr"], state["n"])


class _Loader:
    """A stateful whose `state_dict` must not be called at load."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if self.state is None:
            pytest.fail("a load asked for the state of a live stateful")
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_stateful_takes_the_stored_state_whole() -> None:
    """Its own `state_dict` is never asked for at load, and strictness ends at its name (T10)."""
    live = _Loader(None)
    target = give(keep({"loader": _Loader({"epoch": 3, "buffer": torch.arange(4), "order": (1, 2)})}), {"loader": live})
    assert (3, [0, 1, 2, 3], (1, 2)) == (live.state["epoch"], live.state["buffer"].tolist(), live.state["order"])
    assert ("loader/buffer",) == target.created


def test_stateful_may_be_excluded() -> None:
    """An excluded stateful is not touched."""
    live = _Loader(None)
    give(keep({"loader": _Loader({"a": 1}), "n": 1}), {"loader": live, "n": 0}, exclude=("loader",))
    assert live.state is None


def test_grad_scaler_and_schedulers_are_statefuls() -> None:
    """They come back through their own methods."""
    module = _layers(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    make = lambda: (torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]), torch.amp.GradScaler("cpu", init_scale=8.0))  # noqa: E731
    (scheduler, scaler), (live_scheduler, live_scaler) = make(), make()
    optimizer.step()
    scheduler.step()
    live_scaler.update(new_scale=2.0) if live_scaler._scale is not None else None
    give(keep({"sched": [scheduler], "scaler": scaler}), {"sched": [live_scheduler], "scaler": live_scaler})
    assert scheduler.state_dict() == live_scheduler.state_dict()
    assert scaler.state_dict() == live_scaler.state_dict()


def test_statefuls_come_after_optimizers_and_values() -> None:
    """A stateful may look at the optimizer and at values when it takes its state: they are set by then."""
    module, fresh = _layers(1), _layers(1)
    saved, live = torch.optim.SGD(module.parameters(), lr=0.5), torch.optim.SGD(fresh.parameters(), lr=0.1)
    seen = []

    class Watcher(_Loader):
        def load_state_dict(self, state: Any) -> None:
            seen.append((state, live.param_groups[0]["lr"], app_state["n"]))

    app_state = {"a": Watcher(None), "m": fresh, "opt": live, "n": 0}
    give(keep({"a": _Loader(7), "m": module, "opt": saved, "n": 3}), app_state)
    assert [(7, 0.5, 3)] == seen


def test_live_meta_tensor_is_refused_before_anything_changes() -> None:
    """The check comes in the planning: the tensor filled before it is untouched."""
    first = torch.zeros(2)
    with pytest.raises(InvalidAppState, match="s/b: .*to_empty"):
        give(keep({"s": {"a": torch.ones(2), "b": torch.ones(2)}}), {"s": {"a": first, "b": torch.zeros(2, device="meta")}})
    assert not first.any()


def test_zero_size_and_empty_states_load() -> None:
    """Nothing to store is still a checkpoint: empty app states, zero-size tensors and modules without tensors (B078)."""
    assert () == keep({}).tensors.addresses
    state = {"z": {"a": torch.zeros(0, 4), "b": torch.zeros(3, 0)}, "m": nn.ReLU(), "e": {}}
    kept = keep(state)
    target = give(kept, state)
    assert [(0, 4), (3, 0)] == [kept.tensors.shape(row) for row in range(2)]
    assert ("z/a", "z/b") == target.names


@pytest.mark.parametrize("glob", ["extra/?", "extra/[!a]", "extra/[*]", "extra/[!a]*", "extra/?*", "extra/a*"])
def test_glob_for_some_below_a_value_does_not_cover_the_value(glob: str) -> None:
    """Only a star that stands for any name covers a value that is loaded as one; the report says that the glob did nothing."""
    state = {"extra": {"a": 1}}
    target = give(keep({"extra": {"a": 2}}), state, exclude=(glob,))
    assert {"a": 2} == state["extra"]
    assert (f"exclude={glob!r} matched no address",) == target.warnings

"""Optimizers at load: the next step is the one that would have come, in a fresh process as in the old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anyshard.errors import Mismatch, StateMismatch
from tests.adapters.roundtrip import give, keep
from tests.adapters.test_optimizers import step
from tests.cases.training import move

Pair = tuple[nn.Module, torch.optim.Optimizer]

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "ASGD": lambda params: torch.optim.ASGD(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.ndim == 2]),
}


def _pair(name: str, *, dtype: torch.dtype = torch.float32) -> Pair:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    return module, _OPTIMIZERS[name](list(module.parameters()))


def _app(pair: Pair) -> dict[str, object]:
    return {"model": pair[0], "opt": pair[1]}


def _assert_equal_steps(one: Pair, other: Pair, *, num: int = 2) -> None:
    for seed in range(50, 50 + num):
        for module, optimizer in (one, other):
            step(module, optimizer, seed=seed)
        for left, right in zip(one[0].parameters(), other[0].parameters(), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("name", _OPTIMIZERS)
@pytest.mark.parametrize("num_live_steps", [0, 2])
def test_next_steps_are_bitwise_equal(name: str, num_live_steps: int) -> None:
    """A fresh optimizer, and one that has gone elsewhere, go on exactly where the saved one was."""
    saved, live = _pair(name), _pair(name)
    for seed in range(3):
        step(*saved, seed=seed)
    for seed in range(num_live_steps):
        step(*live, seed=seed + 20)
    give(keep(_app(saved)), _app(live))
    _assert_equal_steps(saved, live)


def test_lbfgs_lists_change_their_length() -> None:
    """Nested lists of tensors are made anew where the live ones have another length."""

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        for _ in range(num):
            optimizer.step(closure)

    pairs = []
    for num in (3, 1, 0):
        torch.manual_seed(0)
        module = nn.Linear(2, 2)
        pairs.append((module, torch.optim.LBFGS(module.parameters(), max_iter=2)))
        train(*pairs[-1], num)
    kept = keep(_app(pairs[0]))
    train(*pairs[0], 1)
    for pair in pairs[1:]:
        give(kept, _app(pair))
        train(*pair, 1)
        assert torch.equal(pairs[0][0].weight, pair[0].weight)


def test_moments_keep_their_own_dtype() -> None:
    """float32 moments of bfloat16 parameters come back as float32, bit by bit (torch's own load casts them)."""
    saved, live = _pair("AdamW", dtype=torch.bfloat16), _pair("AdamW", dtype=torch.bfloat16)
    weight, live_weight = saved[0][0].weight, live[0][0].weight
    saved[1].state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.full((3, 4), 1.000123)}
    give(keep(_app(saved)), _app(live))
    created = live[1].state[live_weight]["exp_avg"]
    assert (torch.float32, False) == (created.dtype, created.requires_grad)
    assert torch.equal(saved[1].state[weight]["exp_avg"], created)


def test_new_state_lies_as_the_parameter_does() -> None:
    """Missing state of the parameter's shape takes its memory layout; a 0-d parameter's step is still a counter."""
    module, live = (
        nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
    )
    saved = (module, torch.optim.Adam(module.parameters()))
    step(*saved)
    fresh = (live, torch.optim.Adam(live.parameters()))
    target = give(keep(_app(saved)), _app(fresh))
    assert live.weight.stride() == fresh[1].state[live.weight]["exp_avg"].stride()
    assert 6 == len(target.created)
    _assert_equal_steps(saved, fresh)


def test_live_state_is_filled_in_place() -> None:
    """Identity of state tensors holds: compiled optimizers and views go on seeing them."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    step(*saved)
    step(*live)
    moment = live[1].state[live[0][0].weight]["exp_avg"]
    target = give(keep(_app(saved)), _app(live))
    assert moment is live[1].state[live[0][0].weight]["exp_avg"]
    assert torch.equal(saved[1].state[saved[0][0].weight]["exp_avg"], moment)
    assert () == target.created


def test_idle_parameter_stays_without_state() -> None:
    """A parameter that never had a gradient has no state after the load, and the next save has the same keys (B018)."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    saved[0][1].requires_grad_(requires_grad=False)
    step(*saved)
    kept = keep(_app(saved))
    give(kept, _app(live))
    assert kept.tensors.addresses == keep(_app(live)).tensors.addresses
    assert 2 == len(live[1].state)


def test_state_that_was_not_there_yet_is_removed() -> None:
    """Rolling back to a checkpoint before the first step is no error: the parameters were known, their state was empty."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    kept = keep(_app(saved))
    step(*live)
    give(kept, _app(live))
    assert 0 == len(live[1].state)
    _assert_equal_steps(saved, live)


def test_entry_that_the_checkpoint_lacks_is_missing() -> None:
    """A live optimizer with amsgrad needs more than Adam stored: an error if strict, else what is there stays."""
    saved, live = _pair("AdamW"), _pair("Adam")
    step(*saved)
    step(*live)
    kept = keep(_app(saved))
    with pytest.raises(StateMismatch) as caught:
        give(kept, _app(live))
    assert {Mismatch.MISSING} == {difference.kind for difference in caught.value.differences}
    assert "opt/state/0.bias/max_exp_avg_sq" in {difference.address for difference in caught.value.differences}
    target = give(kept, _app(live), strict=False)
    assert "opt/state/0.bias/max_exp_avg_sq" in target.missing
    assert "max_exp_avg_sq" in live[1].state[live[0][0].bias]


@pytest.mark.parametrize("key", ["fused", "foreach", "capturable", "differentiable"])
def test_flags_of_the_implementation_stay(key: str) -> None:
    """They belong to the live job; all other options come from the checkpoint, also ones that only it has."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    saved[1].param_groups[0].update({key: "stored", "lr": 0.25, "initial_lr": 0.5})
    live[1].param_groups[0].update({key: "live", "mine": 1})
    options = live[1].param_groups[0]
    give(keep(_app(saved)), _app(live))
    assert ("live", 0.25, 0.5, 1) == tuple(options[name] for name in (key, "lr", "initial_lr", "mine"))


@pytest.mark.parametrize(
    ("stored", "live"), [(0.5, torch.tensor(0.1)), (torch.tensor(0.5), 0.1), (torch.tensor(0.5), torch.tensor(0.1))]
)
def test_numbers_and_tensors_stand_for_each_other_in_options(stored: Any, live: Any) -> None:
    """The live kind stays: a tensor is filled in place, a number is read from the stored tensor."""
    pairs = _pair("AdamW"), _pair("AdamW")
    for pair, lr in zip(pairs, (stored, live), strict=True):
        pair[1].param_groups[0].update(lr=lr, foreach=False)
    give(keep(_app(pairs[0])), _app(pairs[1]))
    lr = pairs[1][1].param_groups[0]["lr"]
    assert 0.5 == lr
    assert type(live) is type(lr)
    assert isinstance(lr, float) or lr is live


@pytest.mark.parametrize(
    ("stored", "live", "expected"),
    [
        (torch.tensor(0.25), 1, 0.25),
        (torch.tensor(2.0), 1, 2),
        (torch.tensor(3), 0.5, 3.0),
        (torch.tensor(float("inf")), 1, float("inf")),
        (torch.tensor(1 + 2j), 1.0, 1 + 2j),
    ],
    ids=str,
)
def test_no_number_is_cut_to_the_live_kind(stored: torch.Tensor, live: float, expected: Any) -> None:
    """A number keeps its kind where the stored one fits, else the stored number stands there as it is."""
    saved, other = _pair("SGD"), _pair("SGD")
    saved[1].param_groups[0]["tag"], other[1].param_groups[0]["tag"] = stored, live
    give(keep(_app(saved)), _app(other))
    found = other[1].param_groups[0]["tag"]
    assert (expected, type(expected)) == (found, type(found))


@pytest.mark.parametrize(
    ("stored", "live"), [(0.25, torch.tensor(1)), (300, torch.tensor(1, dtype=torch.uint8)), (2**80, torch.tensor(1))], ids=str
)
def test_numbers_that_no_live_tensor_can_hold_are_differences(stored: float, live: torch.Tensor) -> None:
    """A float for an integer tensor, and an integer beyond its range, are found before anything changes."""
    saved, other = _pair("SGD"), _pair("SGD")
    saved[1].param_groups[0]["lr"], other[1].param_groups[0]["lr"] = stored, live
    with pytest.raises(StateMismatch, match=f"opt/param_groups/0.bias/lr: dtype .*found the {type(stored).__name__} {stored}"):
        give(keep(_app(saved)), _app(other))
    assert 1 == live.item()


def test_adam_into_adamw_stays_adamw() -> None:
    """What makes an AdamW of an Adam belongs to the live optimizer; the report says that it differs."""
    saved, live = _pair("Adam"), _pair("AdamW")
    step(*saved)
    target = give(keep(_app(saved)), _app(live))
    assert live[1].param_groups[0]["decoupled_weight_decay"] is True
    expected = "opt/param_groups/0.bias/decoupled_weight_decay: stays True as in the live optimizer, False was stored"
    assert (expected,) == target.warnings


def test_another_class_of_optimizer_is_reported() -> None:
    """Options that only one side knows are named for both, also in a fresh optimizer."""
    saved, live = _pair("Adam"), _pair("SGD momentum")
    step(*saved)
    (warning,) = give(keep(_app(saved)), _app(live)).warnings
    assert "opt: the options of the live SGD (dampening, lr, maximize, momentum" in warning
    assert "amsgrad, betas, eps" in warning


def test_options_of_schedulers_and_users_are_no_sign_of_another_class() -> None:
    """What schedulers and the user put into groups on both sides is silent; a name that only the checkpoint has is not."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    torch.optim.lr_scheduler.OneCycleLR(saved[1], max_lr=0.1, total_steps=5)
    saved[1].param_groups[0]["tag"] = live[1].param_groups[0]["tag"] = "mine"
    assert () == give(keep(_app(saved)), _app(live)).warnings
    saved[1].param_groups[0]["lars"] = 1
    (warning,) = give(keep(_app(saved)), _app(live)).warnings
    assert "lars" in warning


def test_state_of_the_caller_in_inference_mode_can_train() -> None:
    """State that is made in a load under inference mode is normal state: the next steps work."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    step(*saved)
    kept = keep(_app(saved))
    with torch.inference_mode():
        give(kept, _app(live))
    _assert_equal_steps(saved, live)


@pytest.mark.parametrize("name", ["AdamW", "AdamW tensor lr"])
def test_state_made_under_a_default_device_is_where_it_belongs(name: str) -> None:
    """The default device of the caller does not decide where counters and moments go."""
    saved, live = _pair(name), _pair(name)
    step(*saved)
    kept = keep(_app(saved))
    with torch.device("meta"):
        give(kept, _app(live))
    _assert_equal_steps(saved, live)


def test_absent_state_is_taken_whole_or_not_at_all() -> None:
    """Half an entry would fail in the next step: the missing parts are named. One that is there may be filled in part."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    step(*saved)
    kept = keep(_app(saved))
    with pytest.raises(StateMismatch, match=r"opt/state/0.bias: missing .*step, exp_avg_sq not selected"):
        give(kept, _app(live), only=["opt/state/**/exp_avg"])
    assert 0 == len(live[1].state)
    step(*live, seed=9)
    give(kept, _app(live), only=["opt/state/**/exp_avg"])
    _, left, right = live[0], saved[1].state[saved[0][0].bias], live[1].state[live[0][0].bias]
    assert torch.equal(left["exp_avg"], right["exp_avg"])
    assert not torch.equal(left["exp_avg_sq"], right["exp_avg_sq"])


def _grouped(*splits: list[str], **options: list[Any]) -> Pair:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = dict(module.named_parameters())
    groups = [
        {"params": [params[name] for name in names], **{key: values[position] for key, values in options.items()}}
        for position, names in enumerate(splits)
    ]
    return module, torch.optim.AdamW(groups)


_W, _B = ["0.weight", "1.weight"], ["0.bias", "1.bias"]


def _rates(pair: Pair) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in pair[1].param_groups]


def test_groups_match_by_parameters_not_by_position() -> None:
    """Groups in another order, and parameters in another order within them, take the options of their own group (B106)."""
    saved = _grouped(_W, _B, lr=[0.1, 0.2], weight_decay=[0.5, 0.0])
    live = _grouped(_B[::-1], _W[::-1], lr=[0.7, 0.8], weight_decay=[0.9, 0.9])
    step(*saved)
    give(keep(_app(saved)), _app(live))
    assert [(0.2, 0.0), (0.1, 0.5)] == _rates(live)
    _assert_equal_steps(saved, live)


def test_groups_may_be_split_and_merged_if_options_are_equal() -> None:
    """One stored group feeds two live ones, and two equal ones feed one."""
    whole, parts = _grouped(_W + _B, lr=[0.3], weight_decay=[0.1]), _grouped(_W, _B, lr=[0.1, 0.1], weight_decay=[0.2, 0.2])
    give(keep(_app(whole)), _app(parts))
    assert [(0.3, 0.1)] * 2 == _rates(parts)
    whole[1].param_groups[0]["lr"] = 9.0
    give(keep(_app(parts)), _app(whole))
    assert [(0.3, 0.1)] == _rates(whole)


def test_merging_groups_with_different_options_is_refused() -> None:
    """Which learning rate would hold? The error names both parameters, both groups and the options; never less than an error."""
    saved, live = _grouped(_W, _B, lr=[0.1, 0.2], weight_decay=[0.5, 0.0]), _grouped(_W + _B)
    with pytest.raises(StateMismatch, match="group of 0.bias and .* of 0.weight, with different lr, weight_decay") as caught:
        give(keep(_app(saved)), _app(live), strict=False)
    assert [Mismatch.GROUP] == [difference.kind for difference in caught.value.differences]


_SHARED_RATE = torch.tensor(0.5)


@pytest.mark.parametrize(
    "values",
    [
        [np.arange(3), np.arange(3)],
        [float("nan"), float("nan")],
        [_SHARED_RATE, _SHARED_RATE],
        [torch.tensor(0.5), torch.tensor(0.5)],
        [[torch.tensor(0.5), {"a": 1}], [torch.tensor(0.5), {"a": 1}]],
    ],
    ids=["arrays", "nan", "one tensor", "equal tensors", "nested"],
)
def test_groups_merge_if_their_stored_options_are_equal(values: list[Any]) -> None:
    """Options are compared as they are stored: arrays and NaN by their bytes, tensors too."""
    saved, live = _grouped(_W, _B), _grouped([*_W, *_B])
    for group, value in zip(saved[1].param_groups, values, strict=True):
        group["tag"] = value
    move(_app(saved), _app(live))
    assert str(values[0]) == str(live[1].param_groups[0]["tag"])


@pytest.mark.parametrize("values", [[1, 1.0], [torch.tensor(0.5), torch.tensor(0.25)], [np.arange(3), np.arange(4)]], ids=str)
def test_groups_with_other_options_do_not_merge(values: list[Any]) -> None:
    """A tensor of other bytes, a number of another type: an error, unless the option is left out."""
    saved, live = _grouped(_W, _B), _grouped([*_W, *_B])
    for group, value in zip(saved[1].param_groups, values, strict=True):
        group["tag"] = value
    with pytest.raises(StateMismatch, match="opt/param_groups/0.bias.*: (tie|group)"):
        move(_app(saved), _app(live))
    move(_app(saved), _app(live), exclude=["opt/param_groups/0.bias/tag"])
    assert "tag" not in live[1].param_groups[0]


def test_empty_groups_match_by_position_then_among_the_empty() -> None:
    """A group without parameters keeps all its options and its place (B058), if need be among such groups."""
    saved, live = _grouped([], _W + _B, [], lr=[0.1, 0.2, 0.3]), _grouped(_W + _B, [], [], lr=[0.9, 0.9, 0.9])
    give(keep(_app(saved)), _app(live))
    assert [0.2, 0.1, 0.3] == [group["lr"] for group in live[1].param_groups]
    step(*live)
    again = _grouped([], [], _W + _B, lr=[0.9, 0.9, 0.9])
    give(keep(_app(saved)), _app(again))
    assert [0.1, 0.3, 0.2] == [group["lr"] for group in again[1].param_groups]


def test_list_of_optimizers_loads_into_one_and_back() -> None:
    """Parts of one thing: how many optimizers there are is no business of the checkpoint."""
    module = nn.Linear(2, 2)
    parts = [torch.optim.AdamW([module.weight]), torch.optim.AdamW([module.bias])]
    for part in parts:
        step(module, part)
    whole = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(whole.parameters())
    kept = keep({"model": module, "opt": parts})
    give(kept, {"model": whole, "opt": optimizer})
    assert torch.equal(parts[1].state[module.bias]["exp_avg"], optimizer.state[whole.bias]["exp_avg"])
    give(keep({"model": whole, "opt": optimizer}), {"model": module, "opt": parts})


def test_parameters_on_one_side_only_are_differences() -> None:
    """A parameter that the stored optimizer lacks is missing, one that the live optimizer lacks is unexpected."""
    saved, live = _grouped(_W), _grouped(["0.weight", "0.bias"])
    step(*saved)
    kept = keep(_app(saved))
    with pytest.raises(StateMismatch) as caught:
        give(kept, _app(live))
    expected = {(Mismatch.MISSING, "opt/state/0.bias"), (Mismatch.UNEXPECTED, "opt/state/1.weight")}
    assert expected == {(difference.kind, difference.address) for difference in caught.value.differences}
    target = give(kept, _app(live), strict=False)
    assert (("opt/state/0.bias",), ("opt/state/1.weight",)) == (target.missing, target.unexpected)
    assert 1 == len(live[1].state)


def test_moments_may_be_left_out() -> None:
    """`exclude` on the state keeps moments fresh while options come from the checkpoint; single options too."""
    saved, live = _pair("AdamW"), _pair("AdamW")
    step(*saved)
    saved[1].param_groups[0].update(lr=0.25, eps=0.5)
    give(keep(_app(saved)), _app(live), exclude=("opt/state/**", "opt/param_groups/*/eps"))
    assert 0 == len(live[1].state)
    assert (0.25, 1e-8) == (live[1].param_groups[0]["lr"], live[1].param_groups[0]["eps"])


def test_other_state_is_kept_by_name() -> None:
    """State under a name of its own, not of a parameter, is stored and comes back."""
    saved, live = _pair("SGD"), _pair("SGD")
    saved[1].state["calls"] = {"n": 3, "t": torch.ones(2)}  # type: ignore[index]
    give(keep(_app(saved)), _app(live))
    other: Any = live[1].state["calls"]  # type: ignore[index]
    assert 3 == other["n"]
    assert torch.equal(torch.ones(2), other["t"])


def test_shapes_and_dtypes_of_live_state_must_agree() -> None:
    """A moment of another dtype is an error, as for any tensor; nothing was changed."""
    saved, live = _pair("SGD momentum"), _pair("SGD momentum")
    step(*saved)
    step(*live)
    entry = live[1].state[live[0][0].weight]
    entry["momentum_buffer"] = entry["momentum_buffer"].double()
    with pytest.raises(StateMismatch, match="opt/state/0.weight/momentum_buffer: dtype"):
        give(keep(_app(saved)), _app(live))
    give(keep(_app(saved)), _app(live), cast=True)
    assert torch.equal(saved[1].state[saved[0][0].weight]["momentum_buffer"].double(), entry["momentum_buffer"])


@pytest.mark.parametrize("stored", [3, {"state": {}}, {"state": {}, "param_groups": {"w": {"params": [0]}}}])
def test_what_is_no_optimizer_state_is_a_difference_of_kind(stored: object) -> None:
    """A state dict by number, as torch makes it, is not taken for one by name."""
    module, optimizer = _pair("SGD")
    with pytest.raises(StateMismatch, match="opt: kind"):
        give(keep({"model": module, "opt": stored}), {"model": module, "opt": optimizer})


def test_scheduler_and_optimizer_agree_after_the_load() -> None:
    """The learning rate of the groups and of the scheduler are those of the saved step, and so are the next ones (B062)."""
    pairs = []
    for _ in range(2):
        module, optimizer = _pair("AdamW")
        pairs.append(((module, optimizer), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 10))))
    (saved, scheduler), (live, live_scheduler) = pairs
    for seed in range(3):
        step(*saved, seed=seed)
        scheduler.step()
    give(keep({**_app(saved), "sched": scheduler}), {**_app(live), "sched": live_scheduler})
    assert scheduler.get_last_lr() == live_scheduler.get_last_lr() == [group["lr"] for group in live[1].param_groups]
    for seed in range(5):
        _assert_equal_steps(saved, live, num=seed and 1)
        scheduler.step()
        live_scheduler.step()
    assert scheduler.state_dict() == live_scheduler.state_dict()


def test_accelerated_optimizer_is_the_one_inside() -> None:
    """Accelerate's wrapper is an optimizer with methods of its own; what counts is the optimizer that it wraps."""

    class AcceleratedOptimizer(torch.optim.Optimizer):
        __module__ = "accelerate.optimizer"
        __qualname__ = "AcceleratedOptimizer"

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> Any:
            pytest.fail("the wrapper was asked for its state")

    saved, live = _pair("AdamW"), _pair("AdamW")
    step(*saved)
    give(
        keep({"model": saved[0], "opt": AcceleratedOptimizer(saved[1])}), {"model": live[0], "opt": AcceleratedOptimizer(live[1])}
    )
    _assert_equal_steps(saved, live)


def test_hooks_of_load_state_dict_are_reported() -> None:
    """torch's `load_state_dict` is not called, so a hook on it would be silent."""
    saved, live = _pair("SGD"), _pair("SGD")
    live[1].register_load_state_dict_post_hook(lambda optimizer: None)
    target = give(keep(_app(saved)), _app(live))
    assert ["opt: the hooks" in warning for warning in target.warnings] == [True]


def test_a_disabled_scaler_is_no_state_for_an_enabled_one() -> None:
    """What the scaler would refuse after the fill is found before it; the other way round it loads."""
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    live = nn.Linear(1, 1)
    before = live.weight.detach().clone()
    with pytest.raises(StateMismatch, match="scaler: kind .*enabled GradScaler"):
        give(keep({"m": nn.Linear(1, 1), "scaler": off}), {"m": live, "scaler": on})
    assert torch.equal(before, live.weight)
    give(keep({"m": nn.Linear(1, 1), "scaler": on}), {"m": live, "scaler": off})


@pytest.mark.parametrize(("owner", "expected"), [(0, [{"k": 1}, {}]), (1, [{}, {"k": 1}]), (None, [{"k": 1}, {}])])
def test_other_state_goes_to_the_optimizer_that_has_it(owner: int | None, expected: list[dict[str, int]]) -> None:
    """Of several optimizers under one name; the first takes what none has."""
    saved, live = [_pair("SGD") for _ in range(2)], [_pair("SGD") for _ in range(2)]
    saved[1][1].state["k"] = 1  # type: ignore[index]
    if owner is not None:
        live[owner][1].state["k"] = 0  # type: ignore[index]
    one, other = ({"a": pairs[0][0], "b": pairs[1][0], "o": [pair[1] for pair in pairs]} for pairs in (saved, live))
    give(keep(one), other)
    assert expected == [dict(optimizer.state) for _, optimizer in live]


def test_other_state_that_is_not_stored_is_missing() -> None:
    """An error if strict, else left alone, or left out by a glob."""
    kept, live = keep(_app(_pair("SGD"))), _pair("SGD")
    live[1].state["k"] = 1  # type: ignore[index]
    with pytest.raises(StateMismatch) as caught:
        give(kept, _app(live))
    assert [(Mismatch.MISSING, "opt/other/k")] == [(each.kind, each.address) for each in caught.value.differences]
    assert ("opt/other/k",) == give(kept, _app(live), strict=False).missing
    assert () == give(kept, _app(live), exclude=("opt/other/*",)).missing
    assert {"k": 1} == dict(live[1].state)


def test_missing_state_is_listed_in_the_order_of_the_live_optimizer() -> None:
    """The error does not depend on how strings are hashed."""
    saved, live = _pair("SGD momentum"), _pair("SGD momentum")
    for pair in (saved, live):
        step(*pair, seed=0)
    names = [f"k{position}" for position in range(20)]
    live[1].state[live[0].get_parameter("0.weight")].update(dict.fromkeys(names, 0))
    missing = give(keep(_app(saved)), _app(live), strict=False).missing
    assert tuple(f"opt/state/0.weight/{name}" for name in names) == missing

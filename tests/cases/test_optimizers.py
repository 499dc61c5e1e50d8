"""Cases of optimizers, groups, schedulers and values. Each test is named after its row in cases.md."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anyshard
from anyshard.errors import InvalidAppState, UnsupportedValue
from tests.cases.training import move, save, step


def test_b018_idle_parameters_stay_without_state() -> None:
    """A layer that never had a gradient loads into a fresh optimizer, and a save after the load has the same addresses."""

    def make() -> dict[str, Any]:
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
        return {"model": model, "opt": torch.optim.AdamW(model.parameters())}

    saved, live = make(), make()
    for seed in range(2):
        step(saved["model"]["used"], saved["opt"], seed=seed)
    store = save(saved)
    anyshard.load(store, live)
    assert live["model"]["idle"].weight not in live["opt"].state
    with anyshard.open(store) as first, anyshard.open(save(live)) as second:
        assert first.addresses() == second.addresses()


def test_b056_gradients_at_the_time_of_saving_do_not_matter() -> None:
    """Moments and step are saved although gradients are set."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    saved, live = (torch.optim.Adam(model.parameters()) for model in models)
    step(models[0], saved)
    assert models[0].weight.grad is not None
    move({"model": models[0], "opt": saved}, {"model": models[1], "opt": live})
    expected, found = saved.state[models[0].weight], live.state[models[1].weight]
    assert {"step", "exp_avg", "exp_avg_sq"} == found.keys()
    assert [] == [key for key in expected if not torch.equal(expected[key], found[key])]


def test_b058_empty_group_keeps_its_options() -> None:
    """Both groups keep all options and their order, and the next step works."""

    def make(*, lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2, bias=False)
        groups = [{"params": [model.weight], "lr": lr}, {"params": [], "lr": 2 * lr, "weight_decay": 3 * lr}]
        return {"model": model, "opt": torch.optim.AdamW(groups)}

    saved, live = make(lr=0.1), make(lr=0.7)
    step(saved["model"], saved["opt"])
    move(saved, live)
    without_params = [{key: value for key, value in group.items() if key != "params"} for group in saved["opt"].param_groups]
    assert without_params == [{key: v for key, v in group.items() if key != "params"} for group in live["opt"].param_groups]
    step(live["model"], live["opt"])


def test_b060_no_pretended_step() -> None:
    """Plain SGD has no state to create; weights, gradients and schedules are as they were after save and load."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer)
    state = {"model": model, "opt": optimizer, "sched": scheduler}
    before = [tensor.clone() for param in model.parameters() for tensor in (param, param.grad) if tensor is not None]
    move(state, state)
    after = [tensor for param in model.parameters() for tensor in (param, param.grad) if tensor is not None]
    assert [True] * 4 == [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert (0, 0.1, 0) == (len(optimizer.state), optimizer.param_groups[0]["lr"], scheduler.last_epoch)


def test_b062_learning_rate_and_scheduler_agree() -> None:
    """The rate of the group and of the scheduler are equal after the load, and five steps equal the unbroken run."""

    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 10))
        return {"model": model, "opt": optimizer, "sched": schedule}

    def train(job: dict[str, Any], seeds: range) -> None:
        for seed in seeds:
            step(job["model"], job["opt"], seed=seed)
            job["sched"].step()

    unbroken, resumed = make(), make()
    train(unbroken, range(3))
    move(unbroken, resumed)
    assert resumed["sched"].get_last_lr() == [resumed["opt"].param_groups[0]["lr"]] == [pytest.approx(0.04)]
    train(unbroken, range(3, 8))
    train(resumed, range(3, 8))
    assert torch.equal(unbroken["model"].weight, resumed["model"].weight)


class GroupStepSGD(torch.optim.SGD):
    """Counts steps in the group, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", ["tensor", "int", "group", "bfloat16"])
def test_b063_step_counters_of_every_kind(kind: str) -> None:
    """Counter and moments come back equal in value and kind, and the next update is bitwise equal."""

    def make() -> dict[str, Any]:
        model = nn.Linear(3, 3).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
        make_optimizer = GroupStepSGD if kind == "group" else torch.optim.Adam
        return {"model": model, "opt": make_optimizer(model.parameters(), lr=0.1)}

    saved, live = make(), make()
    for seed in range(3):
        step(saved["model"], saved["opt"], seed=seed)
    if kind == "int":
        for entry in saved["opt"].state.values():
            entry["step"] = 3
    move(saved, live)
    entries = [job["opt"].state.get(job["model"].weight, job["opt"].param_groups[0]) for job in (saved, live)]
    assert (3, type(entries[0]["step"])) == (entries[1]["step"], type(entries[1]["step"]))
    if kind == "int":
        return  # torch's own Adam steps with tensors only
    for job in (saved, live):
        step(job["model"], job["opt"], seed=9)
    assert torch.equal(saved["model"].weight, live["model"].weight)


def test_b065_one_optimizer_per_parameter() -> None:
    """A dict of optimizers comes back under stable names."""

    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "opt": {name: torch.optim.AdamW([param]) for name, param in model.named_parameters()}}

    saved, live = make(), make()
    step(saved["model"], *saved["opt"].values())
    move(saved, live)
    for seed in (1, 2):
        for job in (saved, live):
            step(job["model"], *job["opt"].values(), seed=seed)
    assert torch.equal(saved["model"].weight, live["model"].weight)


def _make_parts(num_parts: int) -> dict[str, Any]:
    parts = [nn.ModuleDict({f"layer{i}": nn.Linear(2, 2) for i in range(k, 4, num_parts)}) for k in range(num_parts)]
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for n, p in part.named_parameters() if n.endswith("weight")], "lr": 0.1},
                {"params": [p for n, p in part.named_parameters() if n.endswith("bias")], "lr": 0.2, "weight_decay": 0.0},
            ]
        )
        for part in parts
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    return {"model": parts, "opt": optimizers, "sched": schedulers[0]}


def _train_parts(job: dict[str, Any], seed: int) -> None:
    names = sorted(name for part in job["model"] for name, _ in part.named_parameters())
    params = {name: param for part in job["model"] for name, param in part.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        params[name].grad = torch.randn(params[name].shape, generator=generator)
    for optimizer in job["opt"]:
        optimizer.step()


@pytest.mark.parametrize(("num_saved", "num_live"), [(2, 2), (2, 1), (1, 4), (4, 2)])
def test_b097_b101_model_parts_each_with_an_optimizer(num_saved: int, num_live: int) -> None:
    """All parts come back however many there were, with the learning rates of both kinds of groups, and train on equally."""
    saved, live = _make_parts(num_saved), _make_parts(num_live)
    _train_parts(saved, 0)
    for optimizer in saved["opt"]:
        optimizer.param_groups[0]["lr"] = 0.05
    move(saved, live)
    assert [[0.05, 0.2]] * num_live == [[group["lr"] for group in optimizer.param_groups] for optimizer in live["opt"]]
    for seed in (1, 2):
        _train_parts(saved, seed)
        _train_parts(live, seed)
    expected = {name: param for part in saved["model"] for name, param in part.named_parameters()}
    for part in live["model"]:
        assert [] == [name for name, param in part.named_parameters() if not torch.equal(expected[name], param)]


def test_b097_parts_with_clashing_names_are_refused() -> None:
    """Two parts that call their layers alike cannot be one model."""
    with pytest.raises(InvalidAppState, match="positions 0 and 1"):
        save({"model": [nn.Linear(1, 1), nn.Linear(1, 1)]})


def test_b106_groups_in_another_order() -> None:
    """Two groups in shuffled order take their own options and moments."""

    def make(*, reverse: bool) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        named = sorted(model.named_parameters(), reverse=reverse)
        decayed = {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.5, "lr": 0.01 if reverse else 0.1}
        plain = {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.02 if reverse else 0.2}
        return {"model": model, "opt": torch.optim.AdamW([plain, decayed] if reverse else [decayed, plain])}

    saved, live = make(reverse=False), make(reverse=True)
    step(saved["model"], saved["opt"])
    move(saved, live)
    assert [(0.2, 0.0), (0.1, 0.5)] == [(group["lr"], group["weight_decay"]) for group in live["opt"].param_groups]
    for job in (saved, live):
        step(job["model"], job["opt"], seed=5)
    for one, other in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
        assert torch.equal(one, other)


_READ_WITHOUT_TORCH = """
import sys
import anyshard
with anyshard.open(sys.argv[1]) as checkpoint:
    values = checkpoint.values("trainer")
assert "torch" not in sys.modules
print(values["run"], values["step"], values["losses"])
"""


@pytest.mark.slow
def test_b138_trainer_state_is_readable_without_torch(tmp_path: Path) -> None:
    """Ints, strings, lists and random states are stored without pickle; a scalar is read by a process without torch."""
    rng = np.random.default_rng(3)
    trainer = {"run": "r1", "step": 1 << 70, "losses": [0.5, 0.25], "py": random.getstate(), "np": rng.bit_generator.state}
    live: dict[str, Any] = {"trainer": {}}
    anyshard.save(tmp_path / "step_1", {"trainer": trainer})
    anyshard.load(tmp_path / "step_1", live)
    assert trainer == live["trainer"]
    command = [sys.executable, "-c", _READ_WITHOUT_TORCH, str(tmp_path / "step_1")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"r1 {1 << 70} [0.5, 0.25]\n" == found


def test_b138_unknown_types_are_refused_with_their_path() -> None:
    """An object that would have needed pickle is an error at save that names its address."""
    with pytest.raises(UnsupportedValue) as caught:
        save({"trainer": {"callbacks": [1, object()]}})
    assert "trainer/callbacks/1" == caught.value.address

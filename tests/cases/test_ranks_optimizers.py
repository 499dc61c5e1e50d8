"""Cases of optimizers and of wrapped names on several ranks. Each test is named after its row in cases.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import anyshard
from anyshard.testing.fill import assert_same_bytes, fill, full_bytes
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import fill_training, training_state
from anyshard.testing.world import Worlds
from tests.cases.jobs import Job, bits, error_of, filled, look_at

pytestmark = pytest.mark.slow


def make_adam() -> Job:
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=make_mesh(("dp", 2)))
    return model, torch.optim.Adam(model.parameters(), foreach=False)


def save_and_load_with_gradients(place: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A state that is saved while gradients are set, and what a fresh job loads."""
    (model, optimizer), (live, live_optimizer) = make_adam(), make_adam()
    fill_training(model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    anyshard.save(place, {"model": model, "optimizer": optimizer})
    anyshard.load(place, {"model": live, "optimizer": live_optimizer})
    model.weight.grad = None
    return look_at(model, optimizer), look_at(live, live_optimizer)


def test_b056_gradients_do_not_matter_under_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    """Step and both moments of a parameter that one of two ranks holds come back although gradients were set."""
    for expected, found in worlds(2).run(save_and_load_with_gradients, str(tmp_path / "a")):
        assert {f"optimizer/state/weight/{name}" for name in ("step", "exp_avg", "exp_avg_sq")} < expected.keys()
        assert_same_bytes(expected, found)


def make_many(size: int) -> dict[str, Any]:
    """A layer, sharded if there are several ranks, with an optimizer for each parameter."""
    model = nn.Linear(3, 5)
    if size > 1:
        fully_shard(model, mesh=make_mesh(("dp", size)))
    return {"model": model, "opt": {name: torch.optim.AdamW([param], foreach=False) for name, param in model.named_parameters()}}


def look_at_many(job: dict[str, Any]) -> dict[str, bytes]:
    """All tensors of all optimizers as wholes."""
    found: dict[str, torch.Tensor] = {}
    for name, optimizer in job["opt"].items():
        found |= {f"{name}: {address}": tensor for address, tensor in training_state(job["model"], optimizer).items()}
    return full_bytes(found)


def save_many(place: str) -> dict[str, bytes]:
    job = make_many(2)
    for optimizer in job["opt"].values():
        fill_training(job["model"], optimizer)
    anyshard.save(place, job)
    return look_at_many(job)


def load_many(place: str, size: int) -> dict[str, bytes]:
    job = make_many(size)
    anyshard.load(place, job)
    return look_at_many(job)


def test_b065_one_optimizer_per_parameter_on_two_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """A dict of optimizers comes back under stable names, on two ranks and on one."""
    expected = worlds(2).run(save_many, str(tmp_path / "a"))[0]
    assert_same_bytes(expected, worlds(2).run(load_many, str(tmp_path / "a"), 2)[0])
    assert_same_bytes(expected, load_many(str(tmp_path / "a"), 1))
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert {"opt/weight/state/weight/exp_avg", "opt/bias/state/bias/exp_avg"} <= set(checkpoint)


def make_factored(num_columns: int) -> Job:
    """An optimizer that keeps a vector for each rank's shard of a parameter."""
    model = fully_shard(nn.Linear(num_columns, 6, bias=False), mesh=make_mesh(("dp", dist.get_world_size())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"rows": torch.zeros(model.weight.to_local().shape[0])}
    return model, optimizer


def save_factored(place: str) -> None:
    model, optimizer = make_factored(4)
    fill(model.weight, "weight")
    fill(optimizer.state[model.weight]["rows"], f"rows {dist.get_rank()}")
    anyshard.save(place, {"model": model, "optimizer": optimizer})


def load_factored(place: str) -> tuple[bytes, bytes]:
    """This rank's vector as it should be and is."""
    model, optimizer = make_factored(4)
    anyshard.load(place, {"model": model, "optimizer": optimizer})
    return bits(filled(f"rows {dist.get_rank()}", 3)), bits(optimizer.state[model.weight]["rows"])


def load_factored_elsewhere(place: str) -> tuple[str, str]:
    model, optimizer = make_factored(4)
    return error_of(lambda: anyshard.load(place, {"model": model, "optimizer": optimizer}))


def test_b072_state_of_a_shard_stays_with_its_shard(worlds: Worlds, tmp_path: Path) -> None:
    """State whose shape is not its parameter's comes back on the same shards; on others it is refused, as not reshardable."""
    worlds(2).run(save_factored, str(tmp_path / "a"))
    for expected, found in worlds(2).run(load_factored, str(tmp_path / "a")):
        assert expected == found
    for name, message in worlds(3).run(load_factored_elsewhere, str(tmp_path / "a")):
        assert ("StateMismatch", True) == (name, "optimizer/state/weight/rows" in message), message


def make_block() -> nn.Module:
    """A block with a submodule to wrap."""
    block = nn.Sequential()
    block.add_module("attn", nn.Linear(2, 4))
    block.add_module("out", nn.Linear(4, 2))
    return block


def make_wrapped() -> Job:
    """The block with its attention under activation checkpointing, and FSDP2 around all."""
    block = make_block()
    block.attn = checkpoint_wrapper(block.attn)
    fully_shard(block, mesh=make_mesh(("dp", 2)))
    return block, torch.optim.AdamW(block.parameters(), foreach=False)


def save_wrapped(place: str) -> dict[str, bytes]:
    model, optimizer = make_wrapped()
    fill_training(model, optimizer)
    anyshard.save(place, {"model": model, "optimizer": optimizer})
    return look_at(model, optimizer)


def load_wrapped(place: str) -> dict[str, bytes]:
    model, optimizer = make_wrapped()
    anyshard.load(place, {"model": model, "optimizer": optimizer})
    return look_at(model, optimizer)


def test_b102_wrapped_submodule_under_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    """A wrapped submodule under FSDP2 loads into the plain model and back, with no wrapper's name in any address."""
    expected = worlds(2).run(save_wrapped, str(tmp_path / "a"))[0]
    plain = make_block()
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False)
    anyshard.load(tmp_path / "a", {"model": plain, "optimizer": optimizer})
    assert {"model/attn.weight"} == {name for name in expected if name.startswith("model/attn.w")}
    anyshard.save(tmp_path / "b", {"model": plain, "optimizer": optimizer})
    assert_same_bytes(expected, look_at(plain, optimizer))
    assert_same_bytes(expected, worlds(2).run(load_wrapped, str(tmp_path / "b"))[0])

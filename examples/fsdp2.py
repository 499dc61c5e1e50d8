"""A job on several ranks with FSDP2: it saves beside the training, keeps few steps, and takes SIGTERM for one last save.

    .venv/bin/torchrun --standalone --nproc-per-node 2 examples/fsdp2.py runs/fsdp2                    # 300 steps
    .venv/bin/torchrun --standalone --nproc-per-node 4 examples/fsdp2.py runs/fsdp2 --steps 600        # goes on, on other ranks

Send it SIGTERM, or kill it: started again, on as many ranks as you like, it goes on from the last good step. After SIGTERM that
is the step that it was at, else the last one that was due. Here all is on CPUs, so that it runs everywhere; on GPUs take the
backend "nccl" and a mesh of "cuda".
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anyshard

KEEP = anyshard.KeepLast(3) | anyshard.KeepBest("loss", 1) | anyshard.WeightsOnly(anyshard.KeepEvery(100))
EVERY = anyshard.EverySteps(20) | anyshard.EveryMinutes(10)
PREEMPTION = anyshard.Preemption(deadline_s=25)  # torchrun kills 30 s after it has got a SIGTERM


def make_app_state() -> dict[str, Any]:
    """A fresh model, spread over all ranks, its optimizer, and the random state, with which dropout and data go on."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())  # each rank its own data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer, "random": anyshard.RNGState()}


def train_step(app_state: dict[str, Any]) -> float:
    """One step of the optimizer on random data; the mean loss of all ranks."""
    data = torch.randn(32, 64)
    loss = (app_state["model"](data) - data.sum(1, keepdim=True)).square().mean()
    app_state["optimizer"].zero_grad()
    loss.backward()
    app_state["optimizer"].step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def tell(text: str) -> None:
    """Print it, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(place: str, num_steps: int) -> None:
    """Go on from the newest good step of the run in `place`, or begin, up to `num_steps` or until the job is to be stopped."""
    app_state = make_app_state()
    with anyshard.Run(place, keep=KEEP, every=EVERY, preemption=PREEMPTION) as run:
        report = run.restore_or_init(app_state)
        first = 1 if report is None else report.next_step
        tell(f"going on after step {first - 1}" if report else "a new run")
        for step in range(first, num_steps + 1):
            loss = train_step(app_state)
            run.end_step(step, app_state, metrics={"loss": loss})
            if step % 10 == 0:
                tell(f"step {step}: loss {loss:.4f}")
            if run.should_stop:
                tell(f"told to stop: step {step} is saved")
                break
    if dist.get_rank() == 0:
        print("kept:", *(f"step_{one.step}" + " (weights)" * bool(one.dropped) for one in run.steps()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", help="directory or URL of the run")
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    train(chosen.place, chosen.steps)
    dist.destroy_process_group()

"""One step of several roles: an actor and a critic, each in a world of its own, and a driver that publishes what both have saved.

    .venv/bin/python examples/roles.py runs/roles                          # 30 steps, a checkpoint every 10
    .venv/bin/python examples/roles.py runs/other --critic-dies-at 20      # no step 20; start it again, and it goes on

The driver starts two worlds of two ranks each (as Ray, or two torchruns would). No world knows the other: each saves its part of
a step, its rank 0 tells the driver which attempt that was, and the driver publishes the step once it has heard of all. A step
that is not published does not exist: after a death all go on from the last one that was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anyshard

ROLES = ("actor", "critic")
NUM_RANKS, NUM_STEPS, EVERY = 2, 30, 10
WIDTHS = {"actor": 64, "critic": 32}


def make_app_state(role: str) -> dict[str, Any]:
    """A fresh model of this role and its optimizer, spread over the ranks of its world."""
    torch.manual_seed(len(role))
    model = torch.nn.Sequential(torch.nn.Linear(16, WIDTHS[role]), torch.nn.Tanh(), torch.nn.Linear(WIDTHS[role], 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)}


def train_step(app_state: dict[str, Any], step: int) -> float:
    """One step of the optimizer on data that depends on the step alone; the loss."""
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = (app_state["model"](data) - data.sum(1, keepdim=True)).square().mean()
    app_state["optimizer"].zero_grad()
    loss.backward()
    app_state["optimizer"].step()
    return float(loss.detach())


def work(place: str, role: str, dies_at: int) -> None:
    """One rank of a role: resume, train, save the part of every tenth step. Standard output is for the driver."""
    meeting = dist.FileStore(os.environ["MEET"], NUM_RANKS)
    dist.init_process_group("gloo", store=meeting, rank=int(os.environ["RANK"]), world_size=NUM_RANKS)
    run, app_state = anyshard.Run(place), make_app_state(role)
    report = run.restore_or_init(app_state, role=role)
    loss = 0.0
    for step in range(1 if report is None else report.next_step, NUM_STEPS + 1):
        loss = train_step(app_state, step)
        if step == dies_at:
            dist.barrier()  # all of this world at once
            os._exit(1)
        if step % EVERY == 0:
            saved = run.begin(step).save(role, app_state)
            if dist.get_rank() == 0:
                print(saved.attempt, flush=True)
    if dist.get_rank() == 0:
        print(f"{role}: the last loss is {loss:.4f}", file=sys.stderr)
    run.close()
    dist.destroy_process_group()


def start_world(place: str, role: str, directory: str, dies_at: int) -> list[subprocess.Popen[str]]:
    """The ranks of one role, which meet at a file and not at a port."""
    command = [sys.executable, __file__, place, "--role", role, "--critic-dies-at", str(dies_at)]
    return [
        subprocess.Popen(
            command,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MEET": f"{directory}/{role}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]


def drive(place: str, dies_at: int) -> int:
    """Start the worlds and publish their steps; how many roles have died. No process is left behind."""
    run = anyshard.Run(place)
    first = max((step.step for step in run.steps() if step.is_good), default=0)
    print(f"going on from step {first}" if first else "a new run")
    with tempfile.TemporaryDirectory() as directory:
        worlds = {role: start_world(place, role, directory, dies_at if role == "critic" else 0) for role in ROLES}
        ranks = [rank for world in worlds.values() for rank in world]
        try:
            dead = publish_steps(run, {role: world[0] for role, world in worlds.items()}, first)
            for rank in () if dead else ranks:
                rank.communicate()
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    run.close()
    return len(dead)


def publish_steps(run: anyshard.Run, firsts: dict[str, subprocess.Popen[str]], first: int) -> list[str]:
    """Publish each step once the rank 0 of every role has told that its part is saved; the roles that have died, if any."""
    for step in range(first + EVERY, NUM_STEPS + 1, EVERY):
        attempts = {role: _hear(rank) for role, rank in firsts.items()}
        if dead := [role for role, attempt in attempts.items() if not attempt]:
            print(f"step {step} is not published: {', '.join(dead)} died before saving its part")
            return dead
        print(run.begin(step).commit(attempts))
    return []


def _hear(rank: subprocess.Popen[str]) -> str:
    """The attempt that a rank tells; empty if it has ended."""
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def main() -> int:
    """Drive, or be one of the ranks that the driver has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", help="directory or URL of the run")
    parser.add_argument("--critic-dies-at", type=int, default=0, metavar="STEP", help="let the critic die at this step")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.role:
        work(chosen.place, chosen.role, chosen.critic_dies_at)
        return 0
    return drive(chosen.place, chosen.critic_dies_at)


if __name__ == "__main__":
    sys.exit(main())

"""The plainest use: a training loop in one process that may be killed at any moment.

    .venv/bin/python examples/plain.py runs/plain                  # 200 steps, a checkpoint every 20
    .venv/bin/python examples/plain.py runs/plain --steps 400      # 200 more

Started again it goes on from the last good step, with the same random numbers as if it had not been killed.
"""

from __future__ import annotations

import argparse

import torch

import anyshard


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step of the optimizer on random data; the loss."""
    data = torch.randn(32, 16)
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(place: str, num_steps: int) -> None:
    """Go on from the newest good step of the run in `place`, or begin, up to `num_steps`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app_state = {"model": model, "optimizer": optimizer, "random": anyshard.RNGState()}
    with anyshard.Run(place, keep=anyshard.KeepLast(3), every=anyshard.EverySteps(20)) as run:
        report = run.restore_or_init(app_state)
        first = 1 if report is None else report.next_step
        print(f"going on after step {first - 1}" if report else "a new run")
        for step in range(first, num_steps + 1):
            loss = train_step(model, optimizer)
            run.end_step(step, app_state, metrics={"loss": loss})  # saves every 20th step while training goes on
            if step % 100 == 0:
                print(f"step {step}: loss {loss:.4f}")
    print("kept:", *(f"step_{one.step}" for one in run.steps()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", help="directory or URL of the run")
    parser.add_argument("--steps", type=int, default=200)
    chosen = parser.parse_args()
    train(chosen.place, chosen.steps)

"""Thinning of ten steps of 500 MB to weights: bytes before and after, the optimizer's share, whether a blob was rewritten, time.

python benchmarks/thinning.py DIRECTORY [--steps 10] [--mb 500]
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

import anyshard
from anyshard.commit.thinning import thin_step
from anyshard.storage.local import LocalStore

TENSORS = 25


def main() -> None:
    """Save the steps, thin them, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mb", type=int, default=500)
    asked = parser.parse_args()
    run = asked.directory / "thinning"
    try:
        print(json.dumps(measure(run, num_steps=asked.steps, nbytes=asked.mb * 1_000_000)), flush=True)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def measure(run: Path, *, num_steps: int, nbytes: int) -> dict[str, Any]:
    """What thinning does to a run of steps of a model and two moments of its parameters."""
    state = make_state(nbytes)
    steps = [run / f"step_{step}" for step in range(num_steps)]
    for number, step in enumerate(steps):
        anyshard.save(step, state, step=number)
    before = list_files(run)
    began = time.perf_counter()
    for step in steps:
        thin_step(LocalStore(step), ("model",))
    duration_s = time.perf_counter() - began
    after = list_files(run)
    for step in steps:
        load_weights(step, state["model"])
    kept = {path: facts for path, facts in after.items() if path.suffix == ".bin"}
    optimizer_nbytes = sum(facts[2] for path, facts in before.items() if "optimizer" in path.parts)
    total, left = (sum(facts[2] for facts in files.values()) for files in (before, after))
    return {
        "steps": num_steps,
        "bytes_before": total,
        "bytes_after": left,
        "dropped_share": round(1 - left / total, 6),
        "optimizer_share": round(optimizer_nbytes / total, 6),
        "blobs_kept": len(kept),
        "blobs_rewritten": sum(before.get(path) != facts for path, facts in kept.items()),
        "seconds": round(duration_s, 3),
        "ms_per_step": round(1000 * duration_s / num_steps, 1),
    }


def make_state(nbytes: int) -> dict[str, Any]:
    """A model of a third of the bytes, and two tensors of each of its shapes."""
    rows = nbytes // 3 // TENSORS // 4 // 1024
    names = [f"layers.{i}.weight" for i in range(TENSORS)]
    model = {name: torch.randn(rows, 1024) for name in names}
    return {"model": model, "optimizer": {name: {"m": torch.randn(rows, 1024), "v": torch.rand(rows, 1024)} for name in names}}


def list_files(run: Path) -> dict[Path, tuple[int, int, int]]:
    """Inode, time of the last change and length of each file."""
    return {
        path: (found.st_ino, found.st_mtime_ns, found.st_size)
        for path in run.rglob("*")
        if path.is_file() and (found := path.stat())
    }


def load_weights(step: Path, expected: dict[str, torch.Tensor]) -> None:
    """The model loads from a thinned step as it was saved."""
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    anyshard.load(step, {"model": found})
    if not all(torch.equal(tensor, found[name]) for name, tensor in expected.items()):
        raise SystemExit(f"{step}: expected the weights that were saved, found others")


if __name__ == "__main__":
    main()

"""Extra memory of a load: resident peak minus what model and optimizer take anyway. Prints one JSON line.

    python benchmarks/memory.py [--nbytes 500e6] [--byte-budget-mib 64] [--root DIRECTORY]

Saving and loading run in two processes, so that no memory of the save is left to be used again. Libraries are imported by a tiny
load first; it uses a block pool of its own, so that the blocks of the measured load count in full.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import MIB, drop_page_cache, memory_nbytes, peak_memory_nbytes, reset_peak_memory

import anyshard

WIDTH = 1024


def make_app_state(nbytes: int) -> dict[str, object]:
    """A model and its AdamW with all moments, `nbytes` in all."""
    layers = max(1, nbytes // (3 * 4 * WIDTH * WIDTH))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def save(root: Path, nbytes: int) -> None:
    """What the other process will load."""
    anyshard.save(root / "tiny", {"x": torch.zeros(8)})
    anyshard.save(root / "step_1", make_app_state(nbytes))


def measure_load(root: Path, nbytes: int, byte_budget: int) -> dict[str, object]:
    """Peak of the load over the resident memory just before it."""
    app_state = make_app_state(nbytes)
    anyshard.load(root / "tiny", {"x": torch.zeros(8)}, options=anyshard.LoadOptions(byte_budget=MIB, block_nbytes=MIB))
    drop_page_cache(root)
    reset_peak_memory()
    steady = memory_nbytes()
    report = anyshard.load(root / "step_1", app_state, options=anyshard.LoadOptions(byte_budget=byte_budget))
    extra = peak_memory_nbytes() - steady
    return {
        "name": "extra memory of a load",
        "loaded_mb": round(report.nbytes / 1e6),
        "byte_budget_mib": byte_budget // MIB,
        "steady_mib": round(steady / MIB, 1),
        "peak_minus_steady_mib": round(extra / MIB, 1),
    }


def main() -> None:
    """Save here, load in a child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=500e6)
    parser.add_argument("--byte-budget-mib", type=int, default=64)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--load", action="store_true", help="only load what is in the root (for the child)")
    options = parser.parse_args()
    if options.load:
        print(json.dumps(measure_load(options.root, int(options.nbytes), options.byte_budget_mib * MIB)))
        return
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
        save(Path(directory), int(options.nbytes))
        subprocess.run([sys.executable, *sys.argv, "--root", directory, "--load"], check=True)


if __name__ == "__main__":
    main()

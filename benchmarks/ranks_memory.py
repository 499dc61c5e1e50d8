"""Extra memory of a load on 4 ranks: resident peak of each rank minus what it held just before. One JSON line per result.

    python benchmarks/ranks_memory.py [--nbytes 500e6] [--byte-budget-mib 64] [--root DIRECTORY]

Other processes than those that saved load, so that no memory of the save is left to be used again. Libraries are imported by a
tiny load first; it uses a block pool of its own, so that the blocks of the first measured load count in full. The second load
finds them, and what else the first one left.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import fsdp_job
import torch
from measure import MIB, drop_page_cache, memory_nbytes, peak_memory_nbytes, reset_peak_memory

import anyshard
from anyshard.testing.world import World

NUM_RANKS = 4


def save(num_blocks: int, root: str) -> None:
    """What other processes will load."""
    anyshard.save(f"{root}/tiny", {"x": torch.zeros(8)})
    anyshard.save(f"{root}/step_1", fsdp_job.make_job(num_blocks).app_state)


def load_tiny(num_blocks: int, root: str) -> None:
    """Have all there that a load needs, but its blocks."""
    fsdp_job.make_job(num_blocks)
    anyshard.load(f"{root}/tiny", {"x": torch.zeros(8)}, options=anyshard.LoadOptions(byte_budget=MIB, block_nbytes=MIB))


def measure_load(num_blocks: int, root: str, byte_budget: int) -> tuple[int, int, int]:
    """Bytes loaded, held before, and held at the peak, on this rank."""
    app_state = fsdp_job.make_job(num_blocks).app_state
    reset_peak_memory()
    steady = memory_nbytes()
    report = anyshard.load(f"{root}/step_1", app_state, options=anyshard.LoadOptions(byte_budget=byte_budget))
    return report.nbytes, steady, peak_memory_nbytes()


def report_load(name: str, measured: list[tuple[int, int, int]], byte_budget: int) -> None:
    """Print one JSON line about all ranks."""
    loaded, steady, peak = zip(*measured, strict=True)
    extra = [(high - low) / MIB for high, low in zip(peak, steady, strict=True)]
    line = {
        "name": f"extra memory of a load on {NUM_RANKS} ranks, {name}",
        "loaded_mb_per_rank": [round(nbytes / 1e6) for nbytes in loaded],
        "byte_budget_mib": byte_budget // MIB,
        "steady_mib": [round(nbytes / MIB, 1) for nbytes in steady],
        "peak_minus_steady_mib": [round(mib, 1) for mib in extra],
        "largest_mib": round(max(extra), 1),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    """Save in one world, load in another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=500e6, help="of all ranks together")
    parser.add_argument("--byte-budget-mib", type=int, default=64)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go")
    options = parser.parse_args()
    num_blocks = max(1, round(options.nbytes / fsdp_job.BLOCK_STATE_NBYTES))
    byte_budget = options.byte_budget_mib * MIB
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
        with World(NUM_RANKS) as world:
            world.run("ranks_memory:save", num_blocks, directory)
        with World(NUM_RANKS) as world:
            world.run("ranks_memory:load_tiny", num_blocks, directory)
            for name in ("the first", "the second"):
                drop_page_cache(Path(directory))
                report_load(name, world.run("ranks_memory:measure_load", num_blocks, directory, byte_budget), byte_budget)


if __name__ == "__main__":
    main()

"""Memory of a save to and a load from an S3 server: what the peak has beyond steady, and what it may have. JSON lines.

    python benchmarks/store_memory.py [--nbytes 300e6] [--byte-budget-mib 64] [--part-mib 16] [--threads 8] [--root DIRECTORY]

The server is SeaweedFS in a process of its own; saves and loads run in a child, which begins with a small one so that all is
imported. `bound_mib` is the byte budget, one part per stream (`threads` streams) and 16 MiB. A line is printed for each of two
saves and two loads: the second ones show what the first ones left behind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import MIB, memory_nbytes, peak_memory_nbytes, reset_peak_memory
from store_servers import run_buckets

import anyshard

SLACK_MIB = 16


def make_state(nbytes: int, fill: float) -> dict[str, Any]:
    """Tensors of 20 MB in two sections, as the weights and a moment are."""
    num = max(1, nbytes // 40_000_000)
    return {name: {f"w{k}": torch.full((5_000_000,), fill + k) for k in range(num)} for name in ("model", "moments")}


@contextmanager
def measuring(name: str, bound_mib: int) -> Iterator[None]:
    """Print what the block needs at its peak."""
    reset_peak_memory()
    steady = memory_nbytes()
    yield
    extra_mib = round((peak_memory_nbytes() - steady) / MIB, 1)
    line = {"name": name, "peak_minus_steady_mib": extra_mib, "bound_mib": bound_mib, "within": extra_mib <= bound_mib}
    print(json.dumps(line | {"steady_mib": round(steady / MIB, 1)}), flush=True)


def measure(options: argparse.Namespace) -> None:
    """In the child: save and load twice."""
    storage = {**json.loads(options.storage), "part_nbytes": options.part_mib * MIB}
    means: dict[str, Any] = {
        "byte_budget": options.byte_budget_mib * MIB,
        "threads": options.threads,
        "storage_options": storage,
    }
    bound_mib = options.byte_budget_mib + options.threads * options.part_mib + SLACK_MIB
    saving, loading = anyshard.SaveOptions(**means), anyshard.LoadOptions(**means)
    tiny = {"model": torch.zeros(3), "moments": torch.zeros(3)}
    anyshard.save(f"{options.url}/tiny", tiny, options=saving)
    anyshard.load(f"{options.url}/tiny", tiny, options=loading)
    state = make_state(int(options.nbytes), 1.0)
    act: Callable[[str], object]
    for what, act in (
        ("save", lambda place: anyshard.save(place, state, options=saving)),
        ("load", lambda place: anyshard.load(place, state, options=loading)),
    ):
        for number in range(2):
            with measuring(f"S3 {what} of {options.nbytes / 1e6:.0f} MB, number {number + 1}", bound_mib):
                act(f"{options.url}/step_{number}")


def main() -> None:
    """Run the server, and the measurement in a child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=300e6)
    parser.add_argument("--byte-budget-mib", type=int, default=64)
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--root", type=Path, help="where the server keeps its data (default: memory)")
    parser.add_argument("--url", help="only measure there (for the child)")
    parser.add_argument("--storage", help="how to reach it")
    options = parser.parse_args()
    if options.url:
        measure(options)
        return
    with run_buckets(options.root, num_cores=1) as buckets:
        buckets.renew("memory")
        given = ["--url", buckets.url("memory"), "--storage", json.dumps(buckets.options)]
        subprocess.run([sys.executable, *sys.argv, *given], check=True)


if __name__ == "__main__":
    main()

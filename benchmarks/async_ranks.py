"""How long the call of an asynchronous save holds FSDP2 on 4 ranks up, beside a copy and PyTorch DCP. JSON lines.

    python benchmarks/async_ranks.py [--nbytes 1e9] [--repeats 5] [--root DIRECTORY] [--only NAMES]

As async_save.py, on 4 ranks that begin together: a time is that of the slowest rank. `nbytes` is of all ranks. Every rank has one
thread, as torchrun sets it. Lazy is staged when nothing is lazy any more; what optimizers wait for is measured by lazy.py. DCP's
state dict, which costs its users further time, was made before.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import dcp_async
import fsdp_job
import torch.distributed as dist
from starts import Started, Times, best_call, make_copier, report_times, start_ours, time_in_turn, time_start

from anyshard.testing.world import World

NUM_RANKS = 4
TIMEOUT_S = 600
NAMES = ("memcpy", "anyshard eager", "anyshard lazy", *dcp_async.MODES)


def time_on_rank(num_blocks: int, name: str, place: str) -> list[float]:
    """One save on this rank, begun by all ranks at once."""
    start = find_start(num_blocks, name)
    dist.barrier()
    return list(time_start(functools.partial(start, Path(place))))


def find_start(num_blocks: int, name: str) -> Callable[[Path], Started]:
    """How to start the save of this name."""
    job = fsdp_job.make_job(num_blocks)
    if name == "memcpy":
        return get_copier(num_blocks)
    if name.startswith("anyshard"):
        return lambda place: start_ours(place, job.app_state, staging=name.removeprefix("anyshard "))
    return lambda place: dcp_async.start(name, job.state, place)


@functools.cache
def get_copier(num_blocks: int) -> Callable[[Path], Started]:
    """The copy of this rank's tensors, made once per process so that its buffers stay warm."""
    return make_copier(fsdp_job.make_job(num_blocks).tensors())


def close_on_rank() -> None:
    """Leave no thread of DCP behind."""
    dcp_async.close_stagers()


def main() -> None:
    """Run everything in a new directory and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go; its disk is what is measured")
    parser.add_argument("--only", default="", help="only cases whose names begin so, with commas between")
    options = parser.parse_args()
    num_blocks = max(1, round(options.nbytes / fsdp_job.BLOCK_STATE_NBYTES))
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory, World(NUM_RANKS) as world:

        def time_one(name: str, place: Path) -> Times:
            found = world.run("async_ranks:time_on_rank", num_blocks, name, str(place), timeout_s=TIMEOUT_S)
            return Times(*map(max, zip(*found, strict=True)))

        nbytes = sum(world.run("fsdp_job:count_nbytes", num_blocks, timeout_s=TIMEOUT_S))
        names = [name for name in NAMES if name.startswith(tuple(options.only.split(",")))]
        times = time_in_turn(names, Path(directory), repeats=options.repeats, time_one=time_one)
        world.run("async_ranks:close_on_rank", timeout_s=TIMEOUT_S)
    references = {"memcpy": times.get("memcpy", []), "dcp_default": best_call(times, "dcp default")}
    for name, values in times.items():
        report_times(name, values, nbytes, **references)


if __name__ == "__main__":
    main()

"""How long the call of an asynchronous save holds the training up, in one process, beside a copy and PyTorch DCP. JSON lines.

    python benchmarks/async_save.py [--nbytes 2e9] [--num-tensors 64] [--repeats 5] [--root DIRECTORY] [--only NAMES]

All cases take turns, after a first round that is thrown away: what counts are second and later saves, with warm memory and cached
plans. Each save has ended, outside of the time of its call, before the next begins. `memcpy` is a plain copy of the same tensors
into warm buffers with the process's own threads, the limit of any save that copies in its call. Ours is eager here: of plain
tensors nothing is lazy (see lazy.py). All saves are durable at their end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dcp_async
import torch
import torch.distributed as dist
from save_load import count_nbytes, make_state
from starts import Started, best_call, make_copier, report_times, start_ours, time_in_turn, time_start


def list_starts(state: dict[str, torch.Tensor]) -> dict[str, Callable[[Path], Started]]:
    """A copy, ours, and DCP in all its modes."""
    return {
        "memcpy": make_copier(list(state.values())),
        "anyshard eager": lambda place: start_ours(place, {"model": state}, staging="eager"),
        **{mode: partial(dcp_async.start, mode, state) for mode in dcp_async.MODES},
    }


def main() -> None:
    """Run everything in a new directory and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=2e9)
    parser.add_argument("--num-tensors", type=int, default=64, help="of equal size; from 32 MiB on malloc keeps no freed memory")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go; its disk is what is measured")
    parser.add_argument("--only", default="", help="only cases whose names begin so, with commas between")
    options = parser.parse_args()
    dcp_async.ignore_warnings()
    dcp_async.start_job()
    state = make_state(int(options.nbytes), options.num_tensors)
    starts = {name: start for name, start in list_starts(state).items() if name.startswith(tuple(options.only.split(",")))}
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
        times = time_in_turn(
            list(starts),
            Path(directory),
            repeats=options.repeats,
            time_one=lambda name, place: time_start(partial(starts[name], place)),
        )
    print(json.dumps({"torch_threads": torch.get_num_threads(), "nbytes": count_nbytes(state)}))
    references = {"memcpy": times.get("memcpy", []), "dcp_default": best_call(times, "dcp default")}
    for name, values in times.items():
        report_times(name, values, count_nbytes(state), **references)
    dcp_async.close_stagers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

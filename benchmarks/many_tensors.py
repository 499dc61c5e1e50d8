"""Many small tensors: how long a save takes, and how much it slows a Python loop on the main thread; beside DCP. JSON lines.

    python benchmarks/many_tensors.py [--num-tensors 100000] [--tensor-nbytes 1024] [--repeats 5] [--root DIRECTORY]

Each save is made in two ways. Alone: the main thread waits for it, and its times are taken. Then beside a loop that counts in
pure Python on the main thread from the return of the call until the save is durable: `loop_slower_by` is how much more time that
takes for the same count than with no save, `durable_beside_loop_s` what the loop does to the save. All cases take turns; the
first round is thrown away. `cat` puts the same tensors end to end into warm memory. DCP, whose saves take minutes, is tried
`--dcp-repeats` times, with 1 and 2 threads; beside the loop only with `--dcp-loop`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import dcp_async
import torch
import torch.distributed as dist
from measure import fresh
from starts import Started, do_nothing, time_start

import anyshard

CHUNK = 2_000  # counted between two looks at the clock or the event
ALONE_S = 0.5


class Save(NamedTuple):
    """Seconds until the call returned and until the save was durable; the latter beside a loop, and counts per second of that."""

    call_s: float
    durable_s: float
    beside_s: float = 0.0
    loop_slower_by: float = 0.0


def count_until(is_over: Callable[[], bool]) -> float:
    """Count in pure Python; counts per second."""
    began, counted = time.perf_counter(), 0
    while not is_over():
        for _ in range(CHUNK):
            counted += 1
    return counted / (time.perf_counter() - began)


def count_alone() -> float:
    """The same with nothing beside it."""
    deadline = time.perf_counter() + ALONE_S
    return count_until(lambda: time.perf_counter() > deadline)


def run_save(start: Callable[[Path], Started], place: Path, *, has_loop: bool) -> Save:
    """Save once alone and, if asked for, once beside the loop."""
    call_s, _, durable_s = time_start(functools.partial(start, place))
    anyshard.wait_all()
    if not has_loop:
        return Save(call_s, durable_s)
    counts_alone = count_alone()
    began = time.perf_counter()
    counts_beside = count_beside(start(place.with_name(f"{place.name}_beside_loop")))
    beside_s = time.perf_counter() - began
    anyshard.wait_all()  # it is durable; the commit comes after that
    return Save(call_s, durable_s, beside_s, counts_alone / counts_beside - 1)


def count_beside(started: Started) -> float:
    """Count until a save has ended, while a thread does nothing but wait for that; counts per second."""
    ended = threading.Event()

    def wait() -> None:
        try:
            started.wait_ended()
        finally:
            ended.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    counts = count_until(ended.is_set)
    waiter.join()
    return counts


def start_ours(place: Path, state: Mapping[str, torch.Tensor]) -> Started:
    """Our eager save, until it is durable."""
    pending = anyshard.async_save(place, {"model": state}, options=anyshard.SaveOptions(staging="eager"))
    return Started(do_nothing, pending.durable)


def list_starts(state: Mapping[str, torch.Tensor]) -> dict[str, Callable[[Path], Started]]:
    """A copy, ours, DCP."""
    buffer = torch.empty(sum(tensor.numel() for tensor in state.values()))

    def cat(_: Path) -> Started:
        torch.cat(list(state.values()), out=buffer)
        return Started(do_nothing, do_nothing)

    return {
        "cat": cat,
        "anyshard eager": lambda place: start_ours(place, state),
        **{
            f"{mode}, {n} threads": functools.partial(dcp_async.start, mode, state, num_threads=n)
            for mode, n in (("dcp default, writer", 1), ("dcp cached", 1), ("dcp cached", 2))
        },
    }


def report_all(saves: Mapping[str, Sequence[Save]], nbytes: int) -> None:
    """One JSON line per case."""
    medians = {name: Save(*map(statistics.median, zip(*found, strict=True))) for name, found in saves.items()}
    dcp_s = min((one.durable_s for name, one in medians.items() if name.startswith("dcp")), default=None)
    for name, one in medians.items():
        line = {
            "name": name,
            "call_s": round(one.call_s, 4),
            "durable_s": round(one.durable_s, 3),
            "mb_per_s": round(nbytes / one.durable_s / 1e6, 1),
            "durable_beside_loop_s": round(one.beside_s, 3),
            "loop_slower_by": round(one.loop_slower_by, 3),
            "most_slower_by": round(max(save.loop_slower_by for save in saves[name]), 3),
            "repeats": len(saves[name]),
        }
        print(json.dumps(line | ({"dcp_by_this": round(dcp_s / one.durable_s, 2)} if dcp_s else {})), flush=True)


def main() -> None:
    """Run everything in a new directory and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tensors", type=int, default=100_000)
    parser.add_argument("--tensor-nbytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dcp-repeats", type=int, default=1)
    parser.add_argument("--dcp-loop", action="store_true", help="count beside DCP too")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go; its disk is what is measured")
    parser.add_argument("--only", default="", help="only cases whose names begin so, with commas between")
    options = parser.parse_args()
    dcp_async.ignore_warnings()
    dcp_async.start_job()
    state = {f"t{i}": torch.full((options.tensor_nbytes // 4,), float(i)) for i in range(options.num_tensors)}
    starts = {name: start for name, start in list_starts(state).items() if name.startswith(tuple(options.only.split(",")))}
    saves: dict[str, list[Save]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
        for number in range(options.repeats + 1):
            for name, start in starts.items():
                is_dcp = name.startswith("dcp")
                if is_dcp and number > options.dcp_repeats:
                    continue
                place = Path(directory) / "case" / f"step_{number}"
                fresh(place.parent)()
                place.parent.mkdir()
                saves[name].append(run_save(start, place, has_loop=name.startswith("anyshard") or (is_dcp and options.dcp_loop)))
    report_all({name: found[1:] for name, found in saves.items()}, sum(tensor.nbytes for tensor in state.values()))
    dcp_async.close_stagers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Durable save, cold and warm load of FSDP2 on 4 ranks, and cold load on 2, beside the raw disk and PyTorch DCP. JSON lines.

    python benchmarks/ranks.py [--nbytes 1e9] [--repeats 5] [--root DIRECTORY]

All cases take turns, after a first round that is thrown away: every save that counts finds cached plans, ours and DCP's. Raw is
as many processes as there are ranks, all at once, each with O_DIRECT and its share of the bytes; a raw read is of the files that
we load. References are the best of the numbers of threads tried. All saves are durable, all cold loads find an empty page cache.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fsdp_job
from measure import Case, best_of, drop_page_cache, fill_page_cache, fresh, report, time_cases

from anyshard.testing.world import World

DCP_THREADS = (1, 2, 4)
RAW_THREADS = (1, 2, 4, fsdp_job.RAW_MAX_THREADS)
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Bench:
    """Two worlds, the size of their job, and where files go."""

    root: Path
    num_blocks: int
    worlds: Mapping[int, World]

    def run(self, size: int, case: Callable[..., object], *args: object) -> list[object]:
        """Run a case about the job on a world."""
        return self.worlds[size].run(case, self.num_blocks, *map(_plain, args), timeout_s=TIMEOUT_S)

    def latest(self) -> Path:
        """Our last save."""
        (step,) = (self.root / "ours").iterdir()
        return step

    def read_raw(self, size: int, num_threads: int) -> None:
        """Read the files of our last save on all ranks of a world at once."""
        blobs = sorted(map(str, self.latest().rglob("*.bin")))
        self.worlds[size].run(fsdp_job.read_raw, blobs, num_threads, timeout_s=TIMEOUT_S)


def _plain(arg: object) -> object:
    return str(arg) if isinstance(arg, Path) else arg


def save_cases(bench: Bench) -> list[Case]:
    """Raw writes, our save, DCP's saves, all on 4 ranks. What they wrote last is what the load cases read."""
    raw, ours, steps = bench.root / "raw", bench.root / "ours", itertools.count()
    return [
        *(Case(f"raw write, {n} threads", partial(bench.run, 4, fsdp_job.write_raw, raw, n), fresh(raw)) for n in RAW_THREADS),
        Case("anyshard save", lambda: bench.run(4, fsdp_job.save, ours / f"step_{next(steps)}"), fresh(ours)),
        *(
            Case(f"dcp save, {n} threads", partial(bench.run, 4, fsdp_job.save_with_dcp, path, n), fresh(path))
            for n, path in dcp_paths(bench).items()
        ),
    ]


def load_cases(bench: Bench, size: int, *, is_cold: bool) -> list[Case]:
    """Raw reads of the files that we load (cold only), our load, DCP's loads of what each number of threads has written."""
    name = f"{'cold' if is_cold else 'warm'}, 4 -> {size}"
    prepare = drop_page_cache if is_cold else fill_page_cache
    threads = RAW_THREADS if is_cold else ()
    return [
        *(
            Case(f"raw read, {name}, {n} threads", partial(bench.read_raw, size, n), partial(prepare, bench.root))
            for n in threads
        ),
        Case(
            f"anyshard load, {name}",
            lambda: bench.run(size, fsdp_job.load, bench.latest()),
            lambda: prepare(bench.root / "ours"),
        ),
        *(
            Case(
                f"dcp load, {name}, {n} files per rank",
                partial(bench.run, size, fsdp_job.load_with_dcp, path),
                partial(prepare, path),
            )
            for n, path in dcp_paths(bench).items()
        ),
    ]


def dcp_paths(bench: Bench) -> dict[int, Path]:
    """Where DCP's save with each number of threads goes."""
    return {n: bench.root / f"dcp-{n}" for n in DCP_THREADS}


def check_loads(bench: Bench) -> None:
    """Prove that what is timed saves and loads: all bits come back, ours and DCP's, on both worlds; further saves are cached."""
    first, ours, dcp = (bench.root / f"check-{name}" for name in ("first", "ours", "dcp"))
    expected = _add_up(bench.run(4, fsdp_job.fill_state))
    bench.run(4, fsdp_job.save, first)
    assert all(bench.run(4, fsdp_job.save, ours))
    bench.run(4, fsdp_job.save_with_dcp, dcp, 1)
    for size in (4, 2):
        for load, place in ((fsdp_job.load, ours), (fsdp_job.load_with_dcp, dcp)):
            bench.run(size, fsdp_job.forget_state)
            bench.run(size, load, place)
            assert expected == _add_up(bench.run(size, fsdp_job.sum_state)), f"{place.name} on {size} ranks"
    for path in (first, ours, dcp):
        fresh(path)()


def _add_up(sums: list[object]) -> list[int]:
    return [sum(column) for column in zip(*sums, strict=True)]


def report_all(seconds: Mapping[str, list[float]], nbytes: int) -> None:
    """One line per case."""
    references = {
        "anyshard save": {"raw": best_of(seconds, "raw write"), "dcp": best_of(seconds, "dcp save")},
        "anyshard load, warm, 4 -> 4": {"dcp": best_of(seconds, "dcp load, warm")},
    }
    for what in ("cold, 4 -> 4", "cold, 4 -> 2"):
        raw, dcp = best_of(seconds, f"raw read, {what}"), best_of(seconds, f"dcp load, {what}")
        references[f"anyshard load, {what}"] = {"raw": raw, "dcp": dcp}
    for name, values in seconds.items():
        report(name, values, nbytes, **references.get(name, {}))


def main() -> None:
    """Run everything in a new directory and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go; its disk is what is measured")
    options = parser.parse_args()
    num_blocks = max(1, round(options.nbytes / fsdp_job.BLOCK_STATE_NBYTES))
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory, World(4) as four, World(2) as two:
        bench = Bench(Path(directory), num_blocks, {4: four, 2: two})
        nbytes = sum(bench.run(4, fsdp_job.count_nbytes))
        cases = [
            *save_cases(bench),
            *load_cases(bench, 4, is_cold=True),
            *load_cases(bench, 2, is_cold=True),
            *load_cases(bench, 4, is_cold=False),
        ]
        check_loads(bench)
        seconds = time_cases(cases, repeats=options.repeats)
    report_all(seconds, nbytes)


if __name__ == "__main__":
    main()

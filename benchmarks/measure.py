"""What the benchmarks share: interleaved timing, raw disk rates, page cache and memory of this process. Linux only."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
BLOCK_NBYTES = 16 * MIB
PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time; `before` is run first and not timed."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = os.sync


def time_cases(cases: Sequence[Case], *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each case, all cases in turn, `repeats` times after a first round that is thrown away."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(repeats + 1):
        for case in cases:
            case.before()
            began = time.perf_counter()
            case.run()
            seconds[case.name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}


def best_of(seconds: Mapping[str, list[float]], prefix: str) -> float:
    """The smallest median among the cases whose name begins with `prefix`."""
    return min(statistics.median(values) for name, values in seconds.items() if name.startswith(prefix))


def report(name: str, seconds: Sequence[float], nbytes: float, **references: float) -> None:
    """Print one JSON line: median, slowest and fastest, and the speed as a multiple of each reference (in seconds)."""
    median = statistics.median(seconds)
    line = {
        "name": name,
        "seconds": round(median, 3),
        "gb_per_s": round(nbytes / median / 1e9, 2),
        "slowest": round(nbytes / max(seconds) / 1e9, 2),
        "fastest": round(nbytes / min(seconds) / 1e9, 2),
        "repeats": len(seconds),
    }
    print(json.dumps(line | {f"of_{what}": round(value / median, 2) for what, value in references.items()}), flush=True)


class RawDisk:
    """O_DIRECT reads and writes with warm aligned buffers: what the disk gives to a program that does nothing else."""

    def __init__(self, *, max_threads: int, block_nbytes: int = BLOCK_NBYTES) -> None:
        memory = mmap.mmap(-1, max_threads * block_nbytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(7).integers(0, 256, len(memory), np.uint8)
        self._block_nbytes = block_nbytes
        self._blocks = [memoryview(memory)[i * block_nbytes : (i + 1) * block_nbytes] for i in range(max_threads)]

    def write(self, path: Path, nbytes: int, *, num_threads: int) -> None:
        """Write a preallocated file of `nbytes` (rounded up to whole pages) durably."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, _round_up(nbytes))
        self._move([descriptor], os.pwrite, num_threads)
        os.fdatasync(descriptor)
        os.close(descriptor)

    def read(self, paths: Sequence[Path], *, num_threads: int) -> None:
        """Read files past the page cache."""
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        self._move(descriptors, lambda descriptor, block, position: os.preadv(descriptor, [block], position), num_threads)
        for descriptor in descriptors:
            os.close(descriptor)

    def _move(self, descriptors: Sequence[int], call: Callable[[int, memoryview, int], int], num_threads: int) -> None:
        spans = [span for descriptor in descriptors for span in self._cut(descriptor)]

        def work(number: int) -> None:
            for descriptor, position, nbytes in spans[number::num_threads]:
                # The last page of a file that is read need not be whole.
                assert call(descriptor, self._blocks[number][:nbytes], position) > nbytes - PAGE_NBYTES

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, range(num_threads)))

    def _cut(self, descriptor: int) -> Iterator[tuple[int, int, int]]:
        nbytes = _round_up(os.fstat(descriptor).st_size)
        for position in range(0, nbytes, self._block_nbytes):
            yield descriptor, position, min(self._block_nbytes, nbytes - position)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def fresh(path: Path) -> Callable[[], None]:
    """What makes a place empty and lets the disk come to rest."""

    def clear() -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        drop_page_cache(path.parent)

    return clear


def drop_page_cache(root: Path) -> None:
    """Make the next read of the files below `root` come from the disk."""
    os.sync()
    for path in _list_files(root):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    cached_nbytes = _count_cached(root)
    assert cached_nbytes == 0, f"{cached_nbytes} bytes below {root} stayed in the page cache"


def _count_cached(root: Path) -> int:
    """Bytes of the files below `root` that are in the page cache, as mincore says."""
    if not (files := _list_files(root)):
        return 0
    found = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", *files], check=True, capture_output=True)
    return sum(map(int, found.stdout.split()))


def _list_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def fill_page_cache(root: Path) -> None:
    """Make the next read of the files below `root` come from the page cache."""
    for path in _list_files(root):
        with path.open("rb") as file:
            while file.read(BLOCK_NBYTES):
                pass


def reset_peak_memory() -> None:
    """Let `peak_memory_nbytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_nbytes() -> int:
    """Resident memory of this process now."""
    return _read_status("VmRSS")


def peak_memory_nbytes() -> int:
    """Largest resident memory of this process since the last reset."""
    return _read_status("VmHWM")


def _read_status(member: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[member].split()[0]) * 1024

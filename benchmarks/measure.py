"""What the benchmarks share: interleaved timing, raw disk rates, page cache and memory of this process. Linux only."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
BLOCK_NBYTES = 16 * MIB


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
    """Print one JSON line: median GB/s, slowest and fastest, and the speed as a multiple of each reference (in seconds)."""
    median = statistics.median(seconds)
    line = {
        "name": name,
        "gb_per_s": round(nbytes / median / 1e9, 2),
        "slowest": round(nbytes / max(seconds) / 1e9, 2),
        "fastest": round(nbytes / min(seconds) / 1e9, 2),
        "repeats": len(seconds),
    }
    print(json.dumps(line | {f"of_{what}": round(value / median, 2) for what, value in references.items()}), flush=True)


class RawDisk:
    """O_DIRECT reads and writes with warm aligned buffers: what the disk gives to a program that does nothing else."""

    def __init__(self, nbytes: int, max_threads: int) -> None:
        self._nbytes = nbytes // BLOCK_NBYTES * BLOCK_NBYTES
        memory = mmap.mmap(-1, max_threads * BLOCK_NBYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:] = 7
        self._blocks = [memoryview(memory)[i * BLOCK_NBYTES : (i + 1) * BLOCK_NBYTES] for i in range(max_threads)]

    @property
    def nbytes(self) -> int:
        """Bytes that one call moves."""
        return self._nbytes

    def write(self, path: Path, num_threads: int) -> None:
        """Write a preallocated file durably."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, self._nbytes)
        self._move(lambda block, position: os.pwrite(descriptor, block, position), num_threads)
        os.fdatasync(descriptor)
        os.close(descriptor)

    def read(self, path: Path, num_threads: int) -> None:
        """Read a file past the page cache."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._move(lambda block, position: os.preadv(descriptor, [block], position), num_threads)
        os.close(descriptor)

    def _move(self, call: Callable[[memoryview, int], int], num_threads: int) -> None:
        def work(number: int) -> None:
            for position in range(number * BLOCK_NBYTES, self._nbytes, num_threads * BLOCK_NBYTES):
                assert call(self._blocks[number], position) == BLOCK_NBYTES

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def drop_page_cache(root: Path) -> None:
    """Make the next read of the files below `root` come from the disk."""
    os.sync()
    for path in filter(Path.is_file, root.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def fill_page_cache(root: Path) -> None:
    """Make the next read of the files below `root` come from the page cache."""
    for path in filter(Path.is_file, root.rglob("*")):
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

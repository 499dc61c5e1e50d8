"""Durable save, cold load and warm load of one process, beside the raw disk and PyTorch DCP. One JSON line per result.

    python benchmarks/save_load.py [--nbytes 2e9] [--repeats 5] [--root DIRECTORY]

All cases take turns, so that a disk that changes its mind hits all of them. The references are the best of 1, 2 and 4 threads.
DCP saves with fsync. The ceiling of every ratio to raw is 1: raw moves the same bytes and does nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from measure import Case, RawDisk, best_of, drop_page_cache, fill_page_cache, fresh, report, time_cases
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save

import anyshard

THREADS = (1, 2, 4)
NUM_TENSORS = 64


def make_state(nbytes: int, num_tensors: int = NUM_TENSORS) -> dict[str, torch.Tensor]:
    """Tensors of equal size whose pages are all there."""
    rows = nbytes // num_tensors // 4 // 1024
    return {f"layers.{i}.weight": torch.full((rows, 1024), float(i + 1)) for i in range(num_tensors)}


def save_with_dcp(state: dict[str, torch.Tensor], path: Path, num_threads: int) -> None:
    """DCP's own durable save."""
    dcp_save(state, storage_writer=FileSystemWriter(path, sync_files=True, thread_count=num_threads), no_dist=True)


def load_with_dcp(state: dict[str, torch.Tensor], path: Path) -> None:
    """DCP's own load, in place."""
    dcp_load(state, storage_reader=FileSystemReader(path), no_dist=True)


def save_cases(root: Path, state: dict[str, torch.Tensor], raw: RawDisk) -> list[Case]:
    """Raw writes, our save, DCP's saves. What they wrote last is what the load cases read."""
    nbytes = count_nbytes(state)
    return [
        *(
            Case(f"raw write, {n} threads", partial(raw.write, root / "raw", nbytes, num_threads=n), fresh(root / "raw"))
            for n in THREADS
        ),
        Case("anyshard save", lambda: anyshard.save(root / "ours", {"model": state}), fresh(root / "ours")),
        *(Case(f"dcp save, {n} threads", partial(save_with_dcp, state, root / "dcp", n), fresh(root / "dcp")) for n in THREADS),
    ]


def load_cases(root: Path, state: dict[str, torch.Tensor], raw: RawDisk) -> list[Case]:
    """Cold: raw reads of the file that we load, our load, DCP's load. Then both loads from the page cache."""
    cold, ours, dcp = partial(drop_page_cache, root), partial(anyshard.load, root / "ours"), root / "dcp"
    return [
        *(Case(f"raw read, {n} threads", lambda n=n: raw.read([find_blob(root / "ours")], num_threads=n), cold) for n in THREADS),
        Case("anyshard load, cold", lambda: ours({"model": state}), cold),
        Case("dcp load, cold", lambda: load_with_dcp(state, dcp), cold),
        Case("anyshard load, warm", lambda: ours({"model": state}), partial(fill_page_cache, root / "ours")),
        Case("dcp load, warm", lambda: load_with_dcp(state, dcp), partial(fill_page_cache, dcp)),
    ]


def count_nbytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def find_blob(checkpoint: Path) -> Path:
    """The largest file of a checkpoint."""
    return max(checkpoint.rglob("*.bin"), key=lambda path: path.stat().st_size)


def main() -> None:
    """Run everything in a new directory and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=2e9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go; its disk is what is measured")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # DCP says so at every call; we know
    state = make_state(int(options.nbytes))
    raw = RawDisk(max_threads=max(THREADS))
    with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
        root = Path(directory)
        seconds = time_cases([*save_cases(root, state, raw), *load_cases(root, state, raw)], repeats=options.repeats)
    report_all(seconds, count_nbytes(state))


def report_all(seconds: Mapping[str, list[float]], nbytes: int) -> None:
    """One line per case."""
    references = {
        "anyshard save": {"raw": best_of(seconds, "raw write"), "dcp": best_of(seconds, "dcp save")},
        "anyshard load, cold": {"raw": best_of(seconds, "raw read"), "dcp": best_of(seconds, "dcp load, cold")},
        "anyshard load, warm": {"dcp": best_of(seconds, "dcp load, warm")},
    }
    for name, values in seconds.items():
        report(name, values, nbytes, **references.get(name, {}))


if __name__ == "__main__":
    main()

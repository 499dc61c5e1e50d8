"""Memory of many asynchronous saves: resident after each, and what the peak has beyond app state and arena. JSON lines.

    python benchmarks/async_memory.py [--nbytes 500e6] [--saves 50] [--byte-budget-mib 64] [--root DIRECTORY] [--only NAMES]

Each case runs in a process of its own, which begins with a tiny save so that all is imported. The app state is a model with
AdamW and both moments; it takes a training step while each save is under way. `peak_minus_steady_mib` is the resident peak over
what the process held before the first save; for ours `beyond_arena_mib` is the same without the arena, which holds this rank's
share of the checkpoint. `growth_mib` is what the largest of all saves from the third on left behind more than the second. DCP is
beside it in two modes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_async
import torch
from measure import MIB, memory_nbytes, peak_memory_nbytes, reset_peak_memory
from memory import make_app_state
from starts import Started
from torch.distributed.checkpoint.state_dict import get_state_dict

import anyshard

CASES = ("anyshard eager", "anyshard lazy", "dcp default, writer", "dcp cached")


def start_ours(place: Path, app_state: dict[str, Any], *, staging: str, byte_budget: int) -> Started:
    """Our save; its end says how it was staged."""
    block_nbytes = min(byte_budget, anyshard.SaveOptions().block_nbytes)
    options = anyshard.SaveOptions(staging=staging, byte_budget=byte_budget, block_nbytes=block_nbytes)
    pending = anyshard.async_save(place, app_state, options=options)
    return Started(pending.staged, lambda: pending.result().staging)


def make_starter(case: str, app_state: dict[str, Any], byte_budget: int) -> Callable[[Path], Started]:
    """How to start a save of the app state."""
    if case.startswith("anyshard"):
        staging = case.removeprefix("anyshard ")
        return lambda place: start_ours(place, app_state, staging=staging, byte_budget=byte_budget)
    weights, moments = get_state_dict(app_state["model"], app_state["optimizer"])
    return lambda place: dcp_async.start(case, {"model": weights, "optimizer": moments}, place)


def measure(case: str, root: Path, options: argparse.Namespace) -> dict[str, object]:
    """Resident memory before, after each save, and at the peak."""
    app_state = make_app_state(int(options.nbytes))
    step = make_step(app_state)
    step()
    save_tiny(case, root / "tiny")
    start, found = make_starter(case, app_state, options.byte_budget_mib * MIB), None
    reset_peak_memory()
    steady, after = memory_nbytes(), []
    (root / "run").mkdir()
    for number in range(options.saves):
        started = start(root / "run" / f"step_{number}")
        step()
        found = started.wait_ended()
        shutil.rmtree(root / "run" / f"step_{number}")
        after.append(memory_nbytes())
    return describe(case, steady, after, found)


def save_tiny(case: str, place: Path) -> None:
    """Have all imported. Ours takes blocks of another size, so that those of the measured saves count in full."""
    model = torch.nn.Linear(1, 1)
    app_state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    model(torch.ones(1)).backward()
    app_state["optimizer"].step()
    make_starter(case, app_state, MIB)(place).wait_ended()


def make_step(app_state: dict[str, Any]) -> Callable[[], None]:
    """A training step without forward and backward: gradients stay as they are."""
    for parameter in app_state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    return app_state["optimizer"].step


def describe(case: str, steady: int, after: list[int], found: Any) -> dict[str, object]:
    """One result."""
    extra = peak_memory_nbytes() - steady
    line = {
        "name": f"memory of {len(after)} saves, {case}",
        "steady_mib": round(steady / MIB, 1),
        "after_mib": [round(nbytes / MIB, 1) for nbytes in after],
        "growth_mib": round((max(after[2:], default=0) - after[min(1, len(after) - 1)]) / MIB, 1),
        "peak_minus_steady_mib": round(extra / MIB, 1),
    }
    if not isinstance(found, anyshard.StagingReport):
        return line
    return line | {
        "arena_mib": round(found.arena_nbytes / MIB, 1),
        "share_mib": round(found.nbytes / MIB, 1),
        "lazy_mib": round(found.lazy_nbytes / MIB, 1),
        "beyond_arena_mib": round((extra - found.arena_nbytes) / MIB, 1),
    }


def check_sources_are_let_go(root: Path, staging: str) -> None:
    """Tensors of an app state can be collected as soon as a save is staged, before it has ended."""
    app_state = make_app_state(50_000_000)
    probes = [weakref.ref(tensor) for tensor in app_state["model"].parameters()]
    started = start_ours(root / "let_go", app_state, staging=staging, byte_budget=MIB)
    started.wait_staged()
    del app_state
    gc.collect()
    kept = sum(probe() is not None for probe in probes)
    started.wait_ended()
    print(json.dumps({"name": f"parameters kept after staged(), {staging}", "kept": kept, "of": len(probes)}), flush=True)


def main() -> None:
    """Run each case in a child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=500e6)
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--byte-budget-mib", type=int, default=64)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--only", default="", help="only cases whose names begin so, with commas between")
    parser.add_argument("--case", help="only this one, in the root itself (for the child)")
    options = parser.parse_args()
    if options.case:
        dcp_async.ignore_warnings()
        print(json.dumps(measure(options.case, options.root, options)), flush=True)
        if options.case.startswith("anyshard"):
            check_sources_are_let_go(options.root, options.case.removeprefix("anyshard "))
        dcp_async.close_stagers()
        return
    for case in CASES:
        if case.startswith(tuple(options.only.split(","))):
            with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
                subprocess.run([sys.executable, *sys.argv, "--root", directory, "--case", case], check=True)


if __name__ == "__main__":
    main()

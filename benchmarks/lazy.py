"""What a lazy save costs a training step: its call, and what the optimizer waits for; beside PyTorch DCP. JSON lines.

    python benchmarks/lazy.py [--nbytes 2e9] [--num-tensors 64 10000] [--repeats 5] [--root DIRECTORY] [--only NAMES]

The step is forward, backward and AdamW on a stack of layers; `nbytes` are its parameters and two moments. The batch is chosen so
that forward and backward take at least `--compute` times as long as one thread needs to copy all bytes. All cases take turns,
each after a plain step and with nothing else under way; the first round is thrown away. DCP's default has copied when its call
returns; with async staging its users wait for that before the optimizer's step, as torchtitan does. DCP's state dict, which costs
its users further time, was made before.

`stall_s` is the call and the wait: the time of waiting and of the optimizer's step beyond that of plain steps. `compute_extra_s`
is how much longer forward and backward take while bytes are copied beside them. All figures are medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dcp_async
import torch
import torch.distributed as dist
from measure import fresh
from starts import Started, do_nothing, make_copier
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import anyshard


class Residual(nn.Linear):
    """A layer whose output stays of the size of its input, however many follow each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input and a little more."""
        return x + super().forward(x)


@dataclass(slots=True)
class Training:
    """A model, its optimizer and a batch; the app state as anyshard and as DCP want it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: torch.Tensor
    state: dict[str, Any]

    @property
    def app_state(self) -> dict[str, Any]:
        """The same as anyshard wants it."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and moments."""
        params = list(self.model.parameters())
        moments = [self.optimizer.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach() for tensor in (*params, *moments)]

    def compute(self) -> None:
        """Forward and backward."""
        self.model(self.batch).square().mean().backward()


class Step(NamedTuple):
    """Seconds of the parts of one step: the call of a save, forward and backward, the optimizer's step with what it waits for."""

    call_s: float
    compute_s: float
    step_s: float
    reported_stall_s: float = 0.0


def make_training(nbytes: int, num_tensors: int) -> Training:
    """Parameters and two moments of `nbytes` in all, in about `num_tensors` tensors."""
    num_layers = max(1, num_tensors // 3)
    width = round(math.sqrt(nbytes / 12 / num_layers))
    model = nn.Sequential(*(Residual(width, width, bias=False) for _ in range(num_layers)))
    for param in model.parameters():
        nn.init.normal_(param, std=1e-3)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), torch.randn(1, width), {})
    training.compute()
    training.optimizer.step()
    weights, moments = get_state_dict(model, training.optimizer)
    training.state = {"model": weights, "optimizer": moments}
    return training


def choose_batch(training: Training, *, at_least_s: float) -> None:
    """The smallest batch, of a power of two, whose forward and backward take that long."""
    while measure(training.compute) < at_least_s:
        training.batch = torch.randn(2 * len(training.batch), training.batch.shape[1])
    training.optimizer.zero_grad(set_to_none=False)


def measure_copy(tensors: Sequence[torch.Tensor]) -> float:
    """Seconds of one thread to copy these into warm memory."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    copy = make_copier(tensors)
    copy(None)
    copy_s = measure(functools.partial(copy, None))
    torch.set_num_threads(num_threads)
    return copy_s


def measure(call: Callable[[], object]) -> float:
    """The median of three times, in seconds."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def start_ours(place: Path, app_state: Mapping[str, Any], *, staging: str) -> Started:
    """Our save: the optimizer waits for it by itself, and the report says for how long."""
    pending = anyshard.async_save(place, app_state, options=anyshard.SaveOptions(staging=staging))
    return Started(do_nothing, lambda: pending.result().stall_s)


def run_step(training: Training, start: Callable[[], Started]) -> Step:
    """One step with a save begun before it, and then, outside of its time, the end of the save."""
    began = time.perf_counter()
    started = start()
    called = time.perf_counter()
    training.compute()
    computed = time.perf_counter()
    started.wait_staged()
    training.optimizer.step()
    stepped = time.perf_counter()
    training.optimizer.zero_grad(set_to_none=False)
    stall_s = started.wait_ended()
    return Step(called - began, computed - called, stepped - computed, stall_s or 0.0)


def run_in_turn(training: Training, names: Sequence[str], root: Path, *, repeats: int) -> dict[str, list[Step]]:
    """Steps of each kind, and plain ones before each."""
    steps: dict[str, list[Step]] = {name: [] for name in ("plain", *names)}
    for number in range(repeats + 1):
        for name in names:
            place = root / "case" / f"step_{number}"
            fresh(place.parent)()
            place.parent.mkdir()
            plain = run_step(training, lambda: Started(do_nothing, do_nothing))
            found = run_step(training, functools.partial(find_start(training, name), place))
            if number:
                steps["plain"].append(plain)
                steps[name].append(found)
    return steps


def find_start(training: Training, name: str) -> Callable[[Path], Started]:
    """How to start the save of this name."""
    if name.startswith("anyshard"):
        return lambda place: start_ours(place, training.app_state, staging=name.removeprefix("anyshard "))
    return lambda place: dcp_async.start(name, training.state, place)


def report_steps(steps: Mapping[str, Sequence[Step]], **about: object) -> None:
    """One JSON line per case."""
    plain = Step(*map(statistics.median, zip(*steps["plain"], strict=True)))
    print(json.dumps({"name": "plain step", "compute_s": round(plain.compute_s, 4), "step_s": round(plain.step_s, 4)} | about))
    medians = {
        name: Step(*map(statistics.median, zip(*found, strict=True)))
        for name, found in steps.items()
        if found and name != "plain"
    }
    stalls = {name: one.call_s + one.step_s - plain.step_s for name, one in medians.items()}
    references = {
        "dcp_default": min((stalls[name] for name in stalls if name.startswith("dcp default")), default=None),
        "dcp_async_staging": min((stalls[name] for name in stalls if name.startswith("dcp async")), default=None),
    }
    for name, one in medians.items():
        line = {
            "name": name,
            "call_s": round(one.call_s, 4),
            "wait_s": round(one.step_s - plain.step_s, 4),
            "stall_s": round(stalls[name], 4),
            "reported_stall_s": round(one.reported_stall_s, 4),
            "compute_extra_s": round(one.compute_s - plain.compute_s, 4),
            "slowest_call_s": round(max(step.call_s for step in steps[name]), 4),
            "repeats": len(steps[name]),
        }
        ratios = {f"{what}_by_this": round(value / max(stalls[name], 1e-6), 1) for what, value in references.items() if value}
        print(json.dumps(line | ratios), flush=True)


def main() -> None:
    """Run everything in a new directory and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=2e9)
    parser.add_argument("--num-tensors", type=int, nargs="+", default=[64, 10_000])
    parser.add_argument("--compute", type=float, default=2.0, help="time of forward and backward by that of a copy by one thread")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where the files go; its disk is what is measured")
    parser.add_argument("--only", default="", help="only cases whose names begin so, with commas between")
    options = parser.parse_args()
    dcp_async.ignore_warnings()
    dcp_async.start_job()
    for num_tensors in options.num_tensors:
        modes = dcp_async.choose_modes(num_tensors, "dcp default", "dcp async staging")
        names = [name for name in ("anyshard lazy", "anyshard eager", *modes) if name.startswith(tuple(options.only.split(",")))]
        training = make_training(int(options.nbytes), num_tensors)
        copy_s = measure_copy(training.tensors())
        choose_batch(training, at_least_s=options.compute * copy_s)
        with tempfile.TemporaryDirectory(dir=options.root, prefix="bench-") as directory:
            steps = run_in_turn(training, names, Path(directory), repeats=options.repeats)
        report_steps(steps, num_tensors=num_tensors, batch=len(training.batch), copy_s=round(copy_s, 4))
        del training
    dcp_async.close_stagers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

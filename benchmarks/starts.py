"""What the benchmarks of asynchronous saves share: saves that are started, when they let training go on, and when they end."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import fresh

import anyshard


@dataclass(frozen=True, slots=True)
class Started:
    """A save under way: what waits until its sources may change, and what waits until it is durable and can be loaded."""

    wait_staged: Callable[[], object]
    wait_ended: Callable[[], object]


class Times(NamedTuple):
    """Seconds since the call: until it returned, until all was staged, until the save was durable and visible."""

    call_s: float
    staged_s: float
    ended_s: float


def start_ours(place: Path | str, app_state: Mapping[str, Any], *, staging: str) -> Started:
    """Our asynchronous save."""
    pending = anyshard.async_save(place, app_state, options=anyshard.SaveOptions(staging=staging))
    return Started(pending.staged, pending.committed)


def make_copier(tensors: Sequence[torch.Tensor]) -> Callable[[object], Started]:
    """A plain copy of the same bytes into buffers that are warm from its first use on, with the process's own threads."""
    buffers = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]

    @torch.no_grad()
    def copy(_: object) -> Started:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return Started(do_nothing, do_nothing)

    return copy


def do_nothing() -> None:
    """There is nothing to wait for."""


def time_start(start: Callable[[], Started]) -> Times:
    """Start a save and wait for its end; only this thread's waits are in between."""
    began = time.perf_counter()
    started = start()
    call_s = time.perf_counter() - began
    started.wait_staged()
    staged_s = time.perf_counter() - began
    started.wait_ended()
    return Times(call_s, staged_s, time.perf_counter() - began)


def time_in_turn(
    names: Sequence[str], root: Path, *, repeats: int, time_one: Callable[[str, Path], Times]
) -> dict[str, list[Times]]:
    """Times of each, all in turn, each with nothing else under way, `repeats` times after a first round that is thrown away."""
    times: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(repeats + 1):
        for position, name in enumerate(names):
            place = root / f"case-{position}" / f"step_{number}"
            fresh(place.parent)()
            place.parent.mkdir()
            times[name].append(time_one(name, place))
    return {name: values[1:] for name, values in times.items()}


def report_times(name: str, times: Sequence[Times], nbytes: int, **references: Sequence[Times]) -> None:
    """Print one JSON line: median seconds, and those of the call as a multiple of those of each reference (1 is as long)."""
    call_s, staged_s, ended_s = (statistics.median(values) for values in zip(*times, strict=True))
    calls = [one.call_s for one in times]
    line = {
        "name": name,
        "call_s": round(call_s, 4),
        "fastest_s": round(min(calls), 4),
        "slowest_s": round(max(calls), 4),
        "call_gb_per_s": round(nbytes / call_s / 1e9, 2),
        "staged_s": round(staged_s, 4),
        "ended_s": round(ended_s, 3),
        "repeats": len(times),
    }
    multiples = {
        f"call_by_{what}": round(call_s / statistics.median(one.call_s for one in values), 3)
        for what, values in references.items()
        if values
    }
    print(json.dumps(line | multiples), flush=True)


def best_call(times: Mapping[str, Sequence[Times]], prefix: str) -> Sequence[Times]:
    """The times of what has the smallest median call among those whose name begins with `prefix`; nothing if there is none."""
    found = [values for name, values in times.items() if name.startswith(prefix)]
    return min(found, key=lambda values: statistics.median(one.call_s for one in values), default=[])

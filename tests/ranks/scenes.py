"""Scenes for the tests of dead and frozen ranks: many launches at a time, and a look at what they leave."""

from __future__ import annotations

import signal
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import anyshard
from anyshard.testing.launch import Ended, Launch, Launcher
from tests.ranks.death_cases import NUM_RANKS, make_tensors

AT_ONCE = 6

K = TypeVar("K", bound=Hashable)


def play(launch: Launcher, cases: Mapping[K, tuple[Callable[..., object], Sequence[object]]]) -> Iterator[tuple[K, Launch]]:
    """Launch each of the cases with its arguments; many at a time, since they mostly wait."""
    rest = iter(cases.items())
    while batch := list(islice(rest, AT_ONCE)):
        with ExitStack() as stack:
            yield from [(key, stack.enter_context(launch(case, *args, size=NUM_RANKS))) for key, (case, args) in batch]


def tell_deaths(launch: Launcher, cases: Mapping[K, tuple[int, Callable[..., object], Sequence[object]]]) -> dict[K, list[Any]]:
    """What the ranks that live tell of the death of one of them; each case begins with the number of that rank."""
    told = {}
    for key, launched in play(launch, {key: (case, args) for key, (_, case, args) in cases.items()}):
        ended = launched.wait(timeout_s=100)
        assert -signal.SIGKILL == ended.pop(cases[key][0]).exit_code, launched.read_logs()
        told[key] = [one.value or one.error for one in ended]
    return told


def wake_all(launched: Launch, victim: int) -> list[Ended]:
    """Let a frozen rank and those that have given it up go on together; how they end."""
    for rank in (victim, *(rank for rank in range(NUM_RANKS) if rank != victim)):
        launched.wait_until_stopped(rank, timeout_s=100)
    for rank in range(NUM_RANKS):
        launched.send_signal(rank, signal.SIGCONT)
    return launched.wait(timeout_s=100)


def look(place: Path) -> str | None:
    """Which seed's tensors a reader finds; None without a checkpoint."""
    try:
        with anyshard.open(place) as checkpoint:
            found = {name: checkpoint[f"model/{name}"][...].tobytes() for name in ("w", "b")}
    except anyshard.CheckpointNotFound:
        return None
    return next(
        seed for seed in "123" if found == {name: tensor.numpy().tobytes() for name, tensor in make_tensors(seed).items()}
    )


def ranks_with_blobs(place: Path) -> set[int]:
    """Whose blobs are there, of whatever attempt."""
    return {int(path.name.split(".")[0]) for path in place.rglob("*.bin")}

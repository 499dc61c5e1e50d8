"""Small saves and loads on object stores that fail: what is saved, what a reader gets, and how each call may end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

import anyshard
from anyshard.errors import AnyshardError, CheckpointNotFound
from anyshard.testing.fill import assert_same_bytes, fill
from tests.proxy import Faults, Proxy

T = TypeVar("T")

PART_NBYTES: Final = 5 << 20  # the least that S3 takes
SMALL: Final = 2_000  # words: each blob is one request, not much longer than others
LONG: Final = 1_400_000  # words: more than a part
TIMEOUT_S: Final = 240.0

# What a save or load may end with on a store that fails in passing, and what it may not: damage, a checkpoint that is lost.
EXPECTED: Final = (anyshard.StorageUnavailable, anyshard.CommitOutcomeUnknown, anyshard.LoadInterrupted)


def make_state(name: str, num_words: int = SMALL) -> dict[str, Any]:
    """A state of two sections whose every byte depends on its name."""
    tensors = {"w": torch.empty(num_words, dtype=torch.int32), "b": torch.empty(3)}
    for address, tensor in tensors.items():
        fill(tensor, f"{name} {address}")
    return {"model": tensors, "extra": {"name": name}}


def make_storage(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Storage options for short parts and short waits, and more."""
    return {**options, "part_nbytes": PART_NBYTES, "request_timeout_s": 10.0, "connect_timeout_s": 2.0, **more}


def save(place: str, name: str, storage: Mapping[str, Any], *, num_words: int = SMALL, **more: Any) -> anyshard.SaveReport:
    """Save the state of this name."""
    options = anyshard.SaveOptions(threads=4, overwrite_grace_s=0, storage_options=storage, timeout_s=TIMEOUT_S)
    return anyshard.save(place, make_state(name, num_words), options=options, **more)


def look(place: str, storage: Mapping[str, Any], *, num_words: int = SMALL) -> str | None:
    """The name of the state that a reader gets, every byte of which is as it was saved; None if there is no checkpoint."""
    state = make_state("blank", num_words)
    try:
        anyshard.load(place, state, options=anyshard.LoadOptions(threads=4, storage_options=storage, timeout_s=TIMEOUT_S))
    except CheckpointNotFound:
        return None
    name: str = state["extra"]["name"]
    found, expected = (
        {address: tensor.numpy().tobytes() for address, tensor in model.items()}
        for model in (state["model"], make_state(name, num_words)["model"])
    )
    assert_same_bytes(expected, found)
    return name


def attempt(act: Callable[[], T]) -> T | AnyshardError:
    """What a call returns, or the error of ours that it ends in."""
    try:
        return act()
    except AnyshardError as error:
        return error


def meanwhile(act: Callable[[], T], do: Callable[[], object]) -> Future[T]:
    """Do one thing here while another is done on a thread; the outcome of that one, once it is there."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        do()
    return future


@dataclass
class Rounds:
    """Saves and loads through a proxy that cuts each connection somewhere, and what is really there after each."""

    bucket: str
    direct: Mapping[str, Any]
    proxied: Mapping[str, Any]
    proxy: Proxy
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def play(self, number: int) -> None:
        """One round: with a seed of its own, long states and overwriting every few rounds."""
        numbers = random.Random(number)
        num_words = LONG if number % 5 == 4 else SMALL
        place, name = f"s3://{self.bucket}/cut/step_{number}", f"round {number}"
        before = f"before {number}" if number % 3 == 2 else None
        if before is not None:
            save(place, before, self.direct, num_words=num_words)
        # Of requests that carry a blob, or a part of it, about half to a tenth die; of others fewer, but of these there are many.
        most = int(min(4 * num_words, PART_NBYTES) * numbers.choice((2, 3, 6)))
        self.proxy.set(Faults(cut_after=(0, most), seed=number))
        saved = attempt(lambda: save(place, name, self.proxied, num_words=num_words, overwrite=True))
        loaded = attempt(lambda: look(place, self.proxied, num_words=num_words))
        self._judge(f"{number}", saved, loaded, truth=look(place, self.direct, num_words=num_words), names=(before, name))

    def _judge(self, number: str, saved: Any, loaded: Any, *, truth: str | None, names: tuple[str | None, str]) -> None:
        """`truth` is what a reader gets without faults."""
        is_error = isinstance(saved, AnyshardError)
        is_load_error = isinstance(loaded, AnyshardError)
        allowed = names if isinstance(saved, anyshard.CommitOutcomeUnknown) else names[:1] if is_error else names[1:]
        if truth not in allowed or (not is_load_error and loaded != truth):
            self.wrong.append(f"round {number}: save {saved!r}, load {loaded!r}, without faults {truth!r}, allowed {allowed!r}")
        for error in (saved, loaded):
            if isinstance(error, AnyshardError) and not isinstance(error, EXPECTED):
                self.wrong.append(f"round {number}: {error!r}")
        self.outcomes[f"save: {type(saved).__name__ if is_error else 'done'}"] += 1
        self.outcomes[f"load: {type(loaded).__name__ if is_load_error else 'done'}"] += 1

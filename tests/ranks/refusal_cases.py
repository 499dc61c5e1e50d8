"""What the ranks of a world do in the tests of saves that one rank refuses, disturbs, or does otherwise than the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist

import anyshard
from anyshard.errors import AnyshardError
from anyshard.records.handles import Source
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, do_before
from tests.ranks.agreement_cases import Moments

TIMEOUT_S = 2.0
IMPATIENT = anyshard.SaveOptions(timeout_s=TIMEOUT_S)

State = dict[str, Any]


def tell(act: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of the error of a call."""
    try:
        act()
    except AnyshardError as error:
        return type(error).__name__, str(error)
    return "none", ""


class SavingState:
    """Saves while it is asked for its state."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.refusal = ("", "")

    def state_dict(self) -> State:
        self.refusal = tell(lambda: anyshard.save(self.place, {"model": {"w": torch.ones(2)}}))
        return {"w": torch.ones(3)}

    def load_state_dict(self, state: State) -> None:
        raise AssertionError(state)


def save_within_a_save(place: str) -> tuple[str, str]:
    """Save a stateful that saves, then save again; how the inner save ends."""
    inner = SavingState(f"{place}/inner")
    for step in (1, 2):
        anyshard.save(f"{place}/step_{step}", {"model": inner})
    return inner.refusal


class Signals:
    """A sink that sends its own process a signal at the first event of a name."""

    def __init__(self, at: str) -> None:
        self._at = at

    def emit(self, event: anyshard.Event) -> None:
        if event.name == self._at:
            self._at = ""
            signal.raise_signal(signal.SIGUSR2)


def save_in_a_handler(place: str) -> list[tuple[str, str]]:
    """A signal arrives in the middle of a save, and its handler saves too."""
    refusals: list[tuple[str, str]] = []
    state = {"model": {"w": torch.ones(3)}}
    before = signal.signal(signal.SIGUSR2, lambda *_: refusals.append(tell(lambda: anyshard.save(f"{place}/last", state))))
    try:
        anyshard.save(f"{place}/step_1", state, sinks=[Signals("save.write.begin")])
        anyshard.save(f"{place}/last", state)
    finally:
        signal.signal(signal.SIGUSR2, before)
    return refusals


def save_with_other_options(place: str, checks: Sequence[str]) -> tuple[str, str]:
    """Save a second time, with the check of replicas that `checks` has for each rank."""
    state = {"model": {"w": torch.arange(1 << 18).float()}}
    anyshard.save(f"{place}/step_1", state)
    own: Any = checks[dist.get_rank()]
    return tell(lambda: anyshard.save(f"{place}/step_2", state, options=anyshard.SaveOptions(replica_check=own)))


def lose_a_race(place: str) -> tuple[str, str, int]:
    """While both ranks save, rank 1 saves alone to the same place, and its storage fails then."""
    state = {"model": {"w": torch.ones(3)}}

    def race(*_: object) -> NoReturn:
        anyshard.save(place, state, group=[1])
        raise anyshard.StorageError("boom", file="data/model")

    rules = [Rule(Verb.CREATE_BLOB, "data/model/1.*", do_before(race))]
    store = FaultStore(LocalStore(place), rules if dist.get_rank() == 1 else [])
    try:
        anyshard.save(store, state)
    except anyshard.OperationFailed as failure:
        return type(failure).__name__, str(failure), len(getattr(failure, "__notes__", []))
    raise AssertionError("saved")


def save_to_a_stuck_store(place: str, victim: int) -> tuple[tuple[str, str], bool]:
    """The storage of one rank hangs when it creates a blob and when it deletes: the error, and whether this rank has cleaned."""
    answered = threading.Event()
    rules = [Rule(verb, "*", do_before(partial(answered.wait, 30)), times=99) for verb in (Verb.CREATE_BLOB, Verb.DELETE)]
    store = CountingStore(FaultStore(LocalStore(place), rules if dist.get_rank() == victim else []))
    try:
        error = tell(lambda: anyshard.save(store, {"model": {"w": torch.ones(3)}}, options=IMPATIENT))
        return error, store.count(Verb.DELETE).calls > 0
    finally:
        answered.set()


def save_a_bad_value(place: str) -> tuple[tuple[str, str], list[str]]:
    """Rank 1 alone has a value of its own that cannot be stored; what has happened by then."""
    moments = Moments()
    value: object = object() if dist.get_rank() == 1 else 1
    state = {"loader": anyshard.PerRank(value), "model": torch.ones(2)}
    error = tell(lambda: anyshard.save(place, state, sinks=[moments]))
    return error, [name for name in moments.times_s if name.startswith("save.attempt")]


def save_without_room(nbytes: int, room: int) -> tuple[str, str]:
    """Every rank has a text of so many bytes of its own, and the storage has room for so many."""
    store = MemoryStore(url="memory:small")
    state = {"loader": anyshard.PerRank("x" * nbytes)}
    with patch.object(store, "free_nbytes", lambda: room):
        return tell(lambda: anyshard.save(store, state))


def digest_for_ever(place: str) -> tuple[str, str]:
    """Rank 1 digests without end, when rank 0's storage fails."""

    def fail() -> NoReturn:
        dist.barrier()
        raise anyshard.StorageError("boom", file="data/model")

    def digest(sources: Sequence[Source], *_: object, **__: object) -> NoReturn:
        dist.barrier()
        while True:
            sources[0].read_into(0, memoryview(bytearray(sources[0].nbytes)))

    rules = [Rule(Verb.CREATE_BLOB, "*", do_before(fail))]
    store = FaultStore(LocalStore(place), rules if dist.get_rank() == 0 else [])
    with patch("anyshard.comparison.digest_rows", digest):
        return tell(lambda: anyshard.save(store, {"model": {"w": torch.ones(3)}}))


def miss_and_meet(place: str) -> list[tuple[str, str]]:
    """Load what is not there, then save to what is."""
    state = {"model": {"w": torch.ones(3)}}
    missing = tell(lambda: anyshard.load(f"{place}/step_3", state))
    anyshard.save(f"{place}/step_3", state)
    return [missing, tell(lambda: anyshard.save(Path(f"{place}/step_3"), state))]

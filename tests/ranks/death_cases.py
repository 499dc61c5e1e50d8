"""What the ranks of a launch do in the tests of dead and frozen ranks: save or load until one of them is struck."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import anyshard
from anyshard.coord.agreement import Agreement
from anyshard.testing.fill import fill, full_bytes

Outcome = dict[str, Any]
State = dict[str, dict[str, torch.Tensor]]

NUM_RANKS = 3
TIMEOUT_S = 3.0
LATE_S = 12.0  # two cores for many ranks
PATIENT = anyshard.SaveOptions(byte_budget=1 << 20, block_nbytes=1 << 17, threads=2)
IMPATIENT = anyshard.SaveOptions(byte_budget=1 << 20, block_nbytes=1 << 17, threads=2, timeout_s=TIMEOUT_S)
LOADING = anyshard.LoadOptions(byte_budget=4 << 20, block_nbytes=1 << 20, threads=2, timeout_s=TIMEOUT_S)


def make_tensors(seed: str) -> dict[str, torch.Tensor]:
    """What a checkpoint of this seed holds, whole."""
    tensors = {"w": torch.zeros(3000), "b": torch.zeros(7)}
    for name, tensor in tensors.items():
        fill(tensor, seed + name)
    return tensors


def make_state(seed: str, *, has_more: bool = False) -> State:
    """The tensors laid out on all ranks, of which each holds a part of `w`; `has_more` makes it another structure."""
    tensors = make_tensors(seed)
    tensors["w"] = distribute_tensor(
        tensors["w"], init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], src_data_rank=None
    )
    return {"model": tensors | ({"more": torch.zeros(3)} if has_more else {})}


class Strike:
    """Sends its own process a signal at the first event `at`, which may also be `post of <phase>`; on one rank."""

    def __init__(self, number: int, at: str, *, rank: int) -> None:
        self._number = number
        self._at = at if rank == dist.get_rank() else ""
        self._watch_posts()

    def emit(self, event: anyshard.Event) -> None:
        if self._at in (event.name, f"{event.name} {event.file}"):
            self._hit()

    def _hit(self) -> None:
        self._at = ""
        os.kill(os.getpid(), self._number)

    def _watch_posts(self) -> None:
        post = Agreement.post

        def watched(agreement: Agreement, phase: str, payload: bytes) -> None:
            if self._at == f"post of {phase}":
                self._hit()
            post(agreement, phase, payload)

        Agreement.post = watched  # type: ignore[method-assign]  # the process ends with this case


def end_at_once() -> None:
    """Let this process end without taking down the interpreter and all of torch, most of what a launch costs."""
    atexit.register(os._exit, 0)  # the first to be registered is the last to be called


def tell(act: Callable[[], object]) -> Outcome:
    """How a call ends: the class of its error, the failed ranks with phase and class, and whether that came soon."""
    began_s = time.monotonic()
    try:
        act()
    except anyshard.AnyshardError as error:
        failed = error if isinstance(error, anyshard.OperationFailed) else error.__cause__
        failures = {rank: text.split(": ")[:2] for rank, text in getattr(failed, "failures", {}).items()}
        return {"error": type(error).__name__, "failures": failures, "is_soon": time.monotonic() - began_s < TIMEOUT_S + LATE_S}
    return {"error": None}


def save_and_strike(place: str, number: int, at: str, victim: int, is_new: bool) -> Outcome:
    """Save step 1, then step 2, in which one rank is struck; `is_new` if step 2 is of another structure."""
    end_at_once()
    anyshard.save(f"{place}/step_1", make_state("1"), options=PATIENT)
    sink = Strike(number, at, rank=victim)
    state = make_state("2", has_more=is_new)
    return tell(lambda: anyshard.save(f"{place}/step_2", state, options=IMPATIENT, sinks=[sink]))


def save_over_and_strike(place: str, at: str, victim: int) -> Outcome:
    """Save step 1, then save over it, in which one rank dies."""
    end_at_once()
    anyshard.save(place, make_state("1"), options=PATIENT)
    sink = Strike(int(signal.SIGKILL), at, rank=victim)
    return tell(lambda: anyshard.save(place, make_state("2"), overwrite=True, options=IMPATIENT, sinks=[sink]))


def save_and_strike_with_store(place: str, at: str) -> Outcome:
    """As `save_and_strike`, of a coordinator that holds the key-value store of the job, as without torchrun."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port: list[int | None] = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return save_and_strike(place, int(signal.SIGKILL), at, 0, False)


def save_and_freeze(place: str, at: str, victim: int) -> tuple[Outcome, Outcome]:
    """As `save_and_strike`, but the rank is frozen until the others have given up; then all save step 3 together."""
    outcome = save_and_strike(place, int(signal.SIGSTOP), at, victim, False)
    if dist.get_rank() != victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return outcome, tell(lambda: anyshard.save(f"{place}/step_3", make_state("3"), options=PATIENT))


def save_once(place: str, seed: str) -> Outcome:
    """Save over whatever is there."""
    end_at_once()
    return tell(lambda: anyshard.save(place, make_state(seed), overwrite=True, options=PATIENT))


def load_and_strike(place: str, number: int, at: str, victim: int) -> tuple[Outcome, bool]:
    """Load a step twice, the second time with a strike; how that ends, and whether the state of this rank is what it was."""
    end_at_once()
    anyshard.load(place, make_state("blank"))
    state = make_state("blank")
    before = _bytes_here(state)
    sink = Strike(number, at, rank=victim)
    outcome = tell(lambda: anyshard.load(place, state, options=LOADING, sinks=[sink]))
    return outcome, before == _bytes_here(state)


def load_and_freeze(place: str, at: str, victim: int) -> tuple[Outcome, dict[str, bytes]]:
    """As `load_and_strike` with a rank that is frozen until the others have given up; then all load it again."""
    outcome, _ = load_and_strike(place, int(signal.SIGSTOP), at, victim)
    if dist.get_rank() != victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    state = make_state("blank")
    anyshard.load(place, state)
    return outcome, full_bytes(state["model"])


def _bytes_here(state: State) -> dict[str, bytes]:
    parts = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state["model"].items()}
    return {name: part.numpy().tobytes() for name, part in parts.items()}

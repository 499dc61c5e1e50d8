"""What worlds of roles do in tests; and as a script, drivers that are killed.

`python -m tests.run.parts_scripts PLACE STORAGE N` lets drivers publish a step each, every one of them killed by SIGKILL right
before another store call (every N-th is tried). It prints one JSON object per case: what a reader finds then, and what it finds
once another driver has published the step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from anyshard.run.parts import open_parts
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers import Call, WrapperStore
from anyshard.storage.wrappers.below import StoreBelow
from tests.crash.children import fork
from tests.run.parts_scenes import ROLES, STEP, named_attempts, save_all, seen_attempts

T = TypeVar("T")

Storage = Mapping[str, Any]

NUM_WORDS = 3000
TIMEOUT_S = 3.0


class StrikeAt:
    """Kills its own process at the first event of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def emit(self, event: Any) -> None:
        if event.name == self._name:
            os.kill(os.getpid(), signal.SIGKILL)


def make_tensor(role: str, step: int) -> Any:
    """What a part holds, whole."""
    import torch

    from anyshard.testing.fill import fill

    tensor = torch.zeros(NUM_WORDS)
    fill(tensor, f"{role} {step}")
    return tensor


def is_part(tensor: Any, role: str, step: int) -> bool:
    """Whether every byte is that of the part."""
    found, expected = (one.numpy().tobytes() for one in (tensor, make_tensor(role, step)))
    return bool(found == expected)


def make_state(role: str, step: int) -> dict[str, Any]:
    """The state of a role, laid out on all ranks of its world."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"model": {"w": distribute_tensor(make_tensor(role, step), mesh, [Shard(0)], src_data_rank=None)}, "step": step}


def make_run(place: str, storage: Storage) -> Any:
    """The run, as every world opens it."""
    from anyshard.options import LoadOptions, SaveOptions
    from anyshard.run.run import Run

    saving = SaveOptions(threads=2, timeout_s=TIMEOUT_S, storage_options=storage)
    return Run(place, options=saving, load_options=LoadOptions(threads=2, storage_options=storage))


def save_parts(place: str, storage: Storage, role: str, steps: list[int], dies: bool) -> str:
    """Save the part of a role in steps, in the background; in the last one rank 0 may die right before its commit."""
    import torch.distributed as dist

    from anyshard.options import SaveOptions

    for step in steps[:-1]:
        make_run(place, storage).begin(step).async_save(role, make_state(role, step)).committed()
    sinks = [StrikeAt("save.publish.begin")] if dies and dist.get_rank() == 0 else []
    store = StoreBelow(open_store(place, storage_options=storage), f"step_{steps[-1]}/")
    part = open_parts(store, steps[-1], options=SaveOptions(threads=2, timeout_s=TIMEOUT_S), sinks=sinks)
    return part.save(role, make_state(role, steps[-1])).attempt


def go_on(place: str, storage: Storage, role: str, step: int) -> tuple[int, bool, str]:
    """Resume a role on as many ranks as there are and save its next part: from where, whether that was whole, the attempt."""
    run = make_run(place, storage)
    state = make_state(role, -1)
    report = run.load(state, role=role)
    is_whole = is_part(state["model"]["w"].full_tensor(), role, report.step) and state["step"] == report.step
    return report.step, is_whole, run.begin(step).save(role, make_state(role, step)).attempt


class KillAt(WrapperStore):
    """Kills its own process right before the n-th call; counts them."""

    def __init__(self, inner: Store, at: int = 0) -> None:
        super().__init__(inner)
        self.num_calls, self._at = 0, at
        self._lock = threading.Lock()

    def around(self, call: Call, run: Callable[[], T]) -> T:
        with self._lock:
            self.num_calls += 1
            if self.num_calls == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
        return run()


def _open(place: str, storage: Storage, number: int) -> Store:
    return open_store(f"{place}/{number}/step_{STEP}", storage_options=storage)


def _publish(store: Store) -> str:
    return open_parts(store, STEP).commit(ROLES).attempt


def _kill_drivers(place: str, storage: Storage, every: int) -> Iterator[dict[str, Any]]:
    """All that touches the storage is done in forks: clients of object stores have threads, which a fork would lack."""

    def prepare(number: int) -> list[str]:
        return fork(lambda report: report(json.dumps(save_all(_open(place, storage, number))))).result()

    def count(report: Callable[[str], None]) -> None:
        store = KillAt(_open(place, storage, 0))
        _publish(store)
        report(str(store.num_calls))

    prepare(0)
    (num_calls,) = fork(count).result()
    for at in range(1, int(num_calls) + 1, every):
        (attempts,) = prepare(at)
        end = fork(lambda report, at=at: report(_publish(KillAt(_open(place, storage, at), at)))).result()  # type: ignore[misc]

        def look(report: Callable[[str], None], at: int = at) -> None:
            store = _open(place, storage, at)
            before = [named_attempts(store), seen_attempts(store)]
            first, again = _publish(store), _publish(store)
            report(json.dumps({"before": before, "same": first == again, "after": seen_attempts(store)}))

        yield {"at": at, "attempts": json.loads(attempts), "end": end, "seen": fork(look).result()}


if __name__ == "__main__":
    for case in _kill_drivers(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(case))

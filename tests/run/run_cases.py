"""What processes do in the tests of runs: ranks that load a damaged step, and writers that are paused, killed and restarted."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import anyshard
from anyshard.errors import StorageError
from anyshard.run.run import Run
from anyshard.run.when import SavePolicy
from anyshard.storage.local import LocalStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before, fail
from anyshard.testing.fill import Fill, fill, full_bytes
from anyshard.testing.layouts import make_mesh

SAVING = anyshard.SaveOptions(timeout_s=30.0, threads=2)
LOADING = anyshard.LoadOptions(timeout_s=30.0, threads=2)
TTL_S = 3.0


def make_tensors(seed: str) -> dict[str, torch.Tensor]:
    """What a step of this seed holds, whole: several cells on each of four ranks."""
    tensors = {"w": torch.zeros(4 * 70_000), "b": torch.zeros(7)}
    for name, tensor in tensors.items():
        fill(tensor, seed + name, kind=Fill.FINITE)
    return tensors


def make_state(seed: str) -> dict[str, Any]:
    """The same laid out on all ranks of the job, if there are several; a rank alone has a value, too."""
    tensors = make_tensors(seed)
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = make_mesh(("dp", dist.get_world_size()))
        tensors["w"] = distribute_tensor(tensors["w"], mesh, [Shard(0)], src_data_rank=None)
        return {"model": tensors}
    return {"model": tensors, "seed": seed}


def open_run(place: object, **given: Any) -> Run:
    """A run with little patience."""
    return Run(place, options=SAVING, load_options=LOADING, **given)  # type: ignore[arg-type]


def list_damages(step: Path) -> dict[str, tuple[str, bytes | None]]:
    """Ways to damage each file of a step, by name: which file, and its bytes then (None: it is missing)."""
    damages: dict[str, tuple[str, bytes | None]] = {}
    for path in sorted(path for path in step.rglob("*") if path.is_file()):
        name, data = str(path.relative_to(step)), path.read_bytes()
        is_alike = re.match(r"data/model/[1-9]", name) and "/1." not in name
        for kind, changed in _damage(data).items():
            if is_alike and kind != "cell":
                continue  # as for that of rank 1
            damages[f"{name.split('-', maxsplit=1)[0]} {kind}"] = name, changed
    return damages


def _damage(data: bytes) -> Mapping[str, bytes | None]:
    def flip(where: int) -> bytes:
        return data[:where] + bytes([data[where] ^ 0x10]) + data[where + 1 :]

    places = {"head": 8, "cell": len(data) // 2, "tail": len(data) - 20}
    return {**{name: flip(where) for name, where in places.items()}, "cut": data[: len(data) // 3], "missing": None}


@contextmanager
def damaged(step: Path, name: str, data: bytes | None) -> Iterator[None]:
    """A file of a step with other bytes, or none, on all ranks; put back at the end."""
    path, rank = step / name, dist.get_rank() if dist.is_initialized() else 0
    whole = path.read_bytes()
    _meet()
    if rank == 0:
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    _meet()
    try:
        yield
    finally:
        _meet()
        if rank == 0:
            path.write_bytes(whole)
        _meet()


def _meet() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def load_past_damage(place: str) -> dict[str, tuple[int | None, list[Any], bool]]:
    """Two steps; each damage of the newer one in turn: which step is loaded, what is skipped, and whether all bytes are right."""
    with open_run(place) as run:
        run.save(1, make_state("1"))
        run.save(2, make_state("2"))
    step, outcomes = Path(place) / "step_2", {}
    expected = {name: tensor.numpy().tobytes() for name, tensor in make_tensors("1").items()}
    damages = list_damages(step)
    _meet()
    for kind, (name, data) in damages.items():
        state = make_state("blank")
        with damaged(step, name, data), open_run(place) as run:
            report = run.load(state)
        is_right = expected == full_bytes(state["model"]) and state.get("seed", "1") == "1"
        outcomes[kind] = report.step, [list(one) for one in report.skipped], is_right
    return outcomes


def fail_past_damage(place: str, names: Sequence[str]) -> list[str]:
    """The classes of errors of a load with these files of the only step damaged; all ranks meet again in the next load."""
    with open_run(place) as run:
        run.save(1, make_state("1"))
    found = []
    for name in names:
        path = next(Path(place).glob(f"step_1/{name}"))
        data = path.read_bytes()
        with damaged(path.parents[len(Path(name).parts) - 1], str(Path(name).parent / path.name), data[:-1]):
            try:
                with open_run(place) as run:
                    run.restore_or_init(make_state("blank"))
            except anyshard.AnyshardError as error:
                found.append(type(error).__name__)
    with open_run(place) as run:
        run.load(make_state("blank"))
    return found


def save_and_stop(place: str, verb: str, key: str) -> str | None:
    """Save step 1, then step 2, in which this process stops before a call of the store; how step 2 ends once it goes on."""
    rules = [Rule(Verb(verb), key, do_before(lambda: os.kill(os.getpid(), signal.SIGSTOP)))]
    run = open_run(FaultStore(LocalStore(place), rules), lease_ttl_s=TTL_S)
    run.save(1, make_state("1"))
    try:
        run.save(2, make_state("2"))
    except anyshard.AnyshardError as error:
        return f"{type(error).__name__}: {error}"
    return None


def save_and_wait(place: str) -> None:
    """Save step 1 and stop, with the lease in hand."""
    run = open_run(place, lease_ttl_s=TTL_S)
    run.save(1, make_state("1"))
    os.kill(os.getpid(), signal.SIGSTOP)


def save_by_time(place: str, num_calls: int) -> tuple[list[int], list[int]]:
    """Train with a policy that goes by the coordinator's clock: which steps this rank has saved, and which are there."""
    saved = []
    with open_run(place, every=_AtOnce()) as run:
        state = make_state("1")
        run.restore_or_init(state)
        for step in range(num_calls):
            dist.barrier()  # ranks of a training wait for each other in every step
            pending = run.end_step(step, state)
            if pending is not None:
                saved.append(step)
                pending.committed(30)
            if len(saved) == 2:
                break
    return saved, [one.step for one in open_run(place).steps()]


class _AtOnce(SavePolicy):
    """Wants a save at every moment."""

    __slots__ = ()

    @property
    def goes_by_time(self) -> bool:
        return True

    def is_wanted(self, since_s: float, *, is_saving: bool) -> bool:
        return True


def save_and_roll_back(place: str) -> list[Any]:
    """A whole life on several ranks: saves, a rollback, replaced steps; what the coordinator's report warns of, and the steps."""
    with open_run(place) as run:
        for step in (1, 2, 3):
            run.save(step, make_state(str(step)))
    with open_run(place) as run:
        report = run.load(make_state("blank"), step=1)
        warnings = run.save(2, make_state("new"), metrics={"loss": 0.5}).warnings
        state = make_state("blank")
        again = run.load(state)
    whole = full_bytes(state["model"]) == {name: tensor.numpy().tobytes() for name, tensor in make_tensors("new").items()}
    return [report.step, again.step, list(warnings), whole, [(one.step, one.is_stale) for one in open_run(place).steps()]]


def load_what_one_rank_cannot_see(place: str, role: str) -> tuple[int, bool]:
    """Load a role while one rank gets no answer on what the step is: of which step, and whether all bytes are right."""
    with open_run(place) as run:
        part = run.begin(2)
        attempt = part.save(role, make_state("2")).attempt
        if dist.get_rank() == 0:
            part.commit({role: attempt})
    _meet()
    rules = [Rule(Verb.LIST, "step_2/", fail(StorageError("no answer", file="step_2/")))] if dist.get_rank() == 1 else []
    state = make_state("blank")
    with open_run(FaultStore(LocalStore(place), rules)) as run:
        step = run.load(state, role=role).step
    return step, full_bytes(state["model"]) == {name: tensor.numpy().tobytes() for name, tensor in make_tensors("2").items()}


def save_a_part_alone(place: str) -> str | None:
    """Rank 0 saves a part by itself, in a run of its own group; the note that it is stored with. The others do nothing."""
    if dist.get_rank() != 0:
        return None
    options = anyshard.SaveOptions(timeout_s=30.0, threads=2, user={"note": "x"})
    with Run(place, group=[0], options=options) as run:
        run.begin(1).save("actor", {"model": make_tensors("1")})
    with anyshard.open(f"{place}/step_1/parts/actor") as checkpoint:
        return str(checkpoint.manifest.user["note"])


def be_refused(place: str) -> list[str]:
    """How saves end that must not be made, and whether the ranks are together again after each: names of errors, and a step."""
    run, ended = open_run(place), []

    def note(act: Callable[[], object]) -> None:
        try:
            act()
        except anyshard.AnyshardError as error:
            ended.append(type(error).__name__)

    state = make_state("1")
    run.save(1, state)
    note(lambda: run.save(1, state))
    note(lambda: run.async_save(1, state).result(30))
    run.save(2, state)
    _meet()
    if dist.get_rank() == 0:
        path = Path(place) / "lease.json"
        path.write_bytes(path.read_bytes().replace(b'"incarnation":"', b'"incarnation":"x'))
    _meet()
    note(lambda: run.save(3, state))
    note(lambda: run.async_save(3, state).result(30))
    ended.append(str(run.load(make_state("blank")).step))
    run.close()
    return ended

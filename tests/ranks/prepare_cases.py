"""What the ranks of a world do in the tests of rehearsals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import anyshard
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from anyshard.testing.fill import Fill, fill
from anyshard.testing.layouts import make_mesh
from tests.ranks.refusal_cases import tell

State = dict[str, Any]


def make_unfitting(rank: int) -> State:
    """A shard that is not the part of the whole that its placement says."""
    mesh = make_mesh(("dp", 2))
    local = torch.ones(4 + rank, 2)
    return {"model": {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1))}}


# What the ranks hold that must not be, by rank.
STATES: dict[str, Callable[[int], State]] = {
    "replica": lambda rank: {"model": {"w": torch.full((300, 300), 2.0 + (rank == 1))}},
    "moment": lambda rank: {"model": {"w": torch.ones(3)}, "optimizer": {"m": [torch.ones(2), torch.full((2,), float(rank))]}},
    "value": lambda rank: {"extra": {"loss": 0.5 + rank, "tokens": 7}},
    "equal keys": lambda rank: {"loader": anyshard.PerRank(rank, key="same")},
    "other shapes": lambda rank: {"model": nn.Linear(3 + rank, 3)},
    "other dtypes": lambda rank: {"model": {"w": torch.ones(3, dtype=[torch.float32, torch.bfloat16][rank])}},
    "kinds": lambda rank: {"extra": {"host": {"name": "a"} if rank else "a"}},
    "unfitting": make_unfitting,
    "bad value": lambda rank: {"loader": anyshard.PerRank(print if rank else 1)},
    "meta": lambda rank: {"model": {"w": torch.ones(3, device="meta" if rank else "cpu")}},
}


def make_state(name: str) -> State:
    """A tensor that lies on all ranks, one on each, a value, and what each rank has for itself; of a structure of its own."""
    whole = torch.zeros(401, 64)
    fill(whole, name, kind=Fill.FINITE)
    mesh = make_mesh(("dp", dist.get_world_size()))
    sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    return {"model": {name: sharded, "bias": torch.ones(300)}, "step": 3, "loader": anyshard.PerRank([dist.get_rank()] * 9)}


def rehearse_bad(what: str, place: str) -> tuple[str, str]:
    """How the rehearsal ends that a fault of the app state meets."""
    return tell(lambda: anyshard.prepare(place, STATES[what](dist.get_rank())))


def rehearse_and_save(place: str) -> dict[str, Any]:
    """A rehearsal, the first save after it, and a load: what the report has said, and what came."""
    state, layout = make_state("rehearsed"), anyshard.Layout({"dp": dist.get_world_size()}, {"model/rehearsed": {"dp": 0}})
    report = anyshard.prepare(place, state, also=[layout], num_steps=2)
    saved = anyshard.save(f"{place}/step_1", state)
    loaded = anyshard.load(f"{place}/step_1", state)
    return {
        "said": (report.num_ranks, report.num_tensors, report.nbytes, report.num_files),
        "shares": (report.smallest_rank_nbytes, report.largest_rank_nbytes),
        "saved": (saved.num_tensors, saved.nbytes),
        "cached": saved.plan_was_cached,
        "loads": [(load.wanted_nbytes, load.read_nbytes) for load in report.loads],
        "loaded": (loaded.nbytes, loaded.read_nbytes),
        "page": str(report),
    }


def rehearse_on_own_disks() -> tuple[str, str]:
    """Every rank has a store of its own under the same name."""
    return tell(lambda: anyshard.prepare(MemoryStore(url="memory:own"), make_state("own disks")))


def rehearse_blind(place: str) -> tuple[str, str]:
    """The coordinator does not see what the others create, after it has read its own key twice."""
    lost = fail(anyshard.BlobNotFound("gone", file="index"))
    rules = [Rule(Verb.READ, "index*", lost, nth=3, times=10_000)] if dist.get_rank() == 0 else []
    store = FaultStore(LocalStore(place), rules)
    return tell(lambda: anyshard.prepare(store, make_state("blind"), options=anyshard.SaveOptions(timeout_s=20)))


def rehearse_on_a_bad_store(place: str, verb: str, victim: int) -> tuple[tuple[str, str], bool]:
    """The storage of one rank fails in the trial: the error, and whether the save after it has a plan."""
    state = make_state(f"{verb} {victim}")
    rules = [Rule(Verb(verb), "*", fail(anyshard.StorageDenied("boom", file="data")))] if dist.get_rank() == victim else []
    error = tell(lambda: anyshard.prepare(FaultStore(LocalStore(place), rules), state))
    return error, anyshard.save(f"{place}/step_1", state).plan_was_cached


def rehearse_as_a_stranger(place: str) -> tuple[str, str]:
    """All ranks call for a group of the first one."""
    return tell(lambda: anyshard.prepare(place, {"model": torch.ones(3)}, group=[0]))


def rehearse_a_changed_structure(place: str) -> list[tuple[str, str]]:
    """After a save one rank holds something else: the rehearsal of that, and the one after it, when the others do so too."""
    state = make_state("changed")
    anyshard.save(f"{place}/step_1", state)
    act = partial(anyshard.prepare, place)
    ends = [tell(lambda: act({**state, "more": 1} if dist.get_rank() else state))]
    return [*ends, tell(lambda: act({**state, "more": 1}))]

"""Groups of torch's process groups: which ranks, which store, what a store that is gone becomes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import torch.testing._internal.distributed.fake_pg  # noqa: F401  isort: skip - makes the backend called fake known
from anyshard.coord.group import Group
from anyshard.coord.looks import Patience
from anyshard.coord.torch_dist import TorchKeyValueStore, find_ranks, job_token, make_group
from anyshard.errors import InvalidOption, KeyValueStoreLost
from tests.coord.conftest import serve_tcp

SERVER = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job() -> Iterator[None]:
    """This process as rank 1 of a job of four whose other ranks do not exist."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_without_a_job_the_process_is_alone() -> None:
    """Outside of torch.distributed a group is this process."""
    assert (0, (0,)) == (make_group().rank, make_group().ranks)


def test_without_a_job_there_is_one_rank_and_no_token() -> None:
    """Outside of torch.distributed this process is rank 0, and there is no job that could end."""
    assert ((0,), None) == (find_ranks(None), job_token())


@pytest.mark.parametrize("find", [make_group, find_ranks])
def test_a_group_outside_of_a_job_is_refused(find: Callable[[list[int]], object]) -> None:
    """A list of ranks means nothing before init_process_group."""
    with pytest.raises(InvalidOption, match="call init_process_group first"):
        find([0])


def test_a_job_that_is_not_initialised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun without init_process_group each rank would save alone; a job of one rank needs nothing."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidOption, match=r"a job of 4 ranks \(WORLD_SIZE\), found that it is not; call init_process_group"):
        find_ranks(None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (0,) == find_ranks(None)


def test_ranks_are_found_without_making_a_group(job: None) -> None:
    """They are those of the group that would be made."""
    assert ((0, 1, 2, 3), (1, 3), (1, 2)) == (find_ranks(None), find_ranks([3, 1]), find_ranks(dist.new_group([1, 2])))


def test_a_token_does_not_keep_the_job_alive() -> None:
    """It stays the same as long as the process group does, which ends although the token is held."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    token: Any = job_token()
    assert token is job_token()
    dist.destroy_process_group()
    assert (None, None) == (token(), job_token())


def test_all_ranks(job: None) -> None:
    """By default all ranks of the job take part."""
    group = make_group()
    assert (1, (0, 1, 2, 3), 4, False) == (group.rank, group.ranks, group.size, group.is_coordinator)


def test_a_list_of_ranks_is_sorted(job: None) -> None:
    """However a list is written, its lowest rank is the coordinator."""
    group = make_group([3, 1])
    assert (0, (1, 3), True) == (group.rank, group.ranks, group.is_coordinator)


def test_a_process_group(job: None) -> None:
    """A process group gives its ranks by their numbers in the job."""
    group = make_group(dist.new_group([1, 2]))
    assert (0, (1, 2)) == (group.rank, group.ranks)


def test_a_list_of_this_rank_alone(job: None) -> None:
    """A rank that saves alone waits for nobody, and keeps its number."""
    group = make_group([1])
    assert (0, (1,)) == (group.rank, group.ranks)
    with group.agree("save 1") as agreement:
        agreement.decide()


@pytest.mark.parametrize("ranks", [[], [0, 2], [1, 1], [1, 4], [-1, 1]])
def test_a_list_that_cannot_be(job: None, ranks: list[int]) -> None:
    """A list without this rank, with a rank twice or with one that the job does not have is refused."""
    with pytest.raises(InvalidOption, match="group: expected"):
        make_group(ranks)


def test_a_process_group_of_others(job: None) -> None:
    """Only the members of a process group may call."""
    with pytest.raises(InvalidOption, match="rank 1 outside"):
        make_group(dist.new_group([0, 2]))


def test_torch_without_a_default_store(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch hides its default store one day, the error says what to do."""
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    with pytest.raises(InvalidOption, match="use a release of anyshard that knows this torch"):
        make_group()


def test_a_store_that_cannot_do_it(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose store lacks a verb is told how to start with one that has it."""

    class PoorStore(dist.Store):
        def clone(self) -> PoorStore:
            return self

    monkeypatch.setattr(distributed_c10d, "_get_default_store", PoorStore)
    with pytest.raises(InvalidOption, match="start the job with torchrun"):
        make_group()


def test_the_job_can_use_its_store_meanwhile() -> None:
    """Our connection is a clone: a long wait of the job on its own does not hold us up, nor the other way round."""
    server = serve_tcp()
    ours = TorchKeyValueStore(server).clone()
    assert ours._store is not server
    ours.set("a", b"1")
    assert server.get("a") == b"1"


each_end = pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])


@pytest.fixture
def server() -> Iterator[tuple[dist.TCPStore, int]]:
    """A client of a server in a process of its own, and that process."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            port = int(process.stdout.readline())
            short = timedelta(seconds=2)
            yield dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=short), process.pid
        finally:
            process.kill()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "anyshard-coord":  # in a call that was given up
            thread.join(20)


@pytest.mark.slow
@each_end
def test_a_store_that_ends(server: tuple[dist.TCPStore, int], end: signal.Signals) -> None:
    """A server that is frozen or dead is `KeyValueStoreLost` within the patience, not a hang."""
    group = Group(1, (0, 1), TorchKeyValueStore(server[0]))
    os.kill(server[1], end)
    began_s = time.monotonic()
    with pytest.raises(KeyValueStoreLost, match="expected an answer"):
        group.agree("save 1", patience=Patience(timeout_s=1.0))
    assert time.monotonic() - began_s < 5


@pytest.mark.slow
@each_end
def test_a_store_that_has_ended_before_a_group_is_made(server: tuple[dist.TCPStore, int], end: signal.Signals) -> None:
    """The same holds for the connection with which a group begins, and nobody is told to start the job in another way."""
    dist.init_process_group("fake", store=server[0], rank=1, world_size=2)
    try:
        os.kill(server[1], end)
        began_s = time.monotonic()
        with pytest.raises(KeyValueStoreLost, match="expected an answer"):
            make_group(timeout_s=1.0)
        assert time.monotonic() - began_s < 5
    finally:
        dist.destroy_process_group()

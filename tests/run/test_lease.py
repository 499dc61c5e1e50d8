"""The lease of a run: free or not, found out without trust in anybody's clock, and lost without harm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from anyshard.errors import BlobNotFound, InvalidOption, RunInUse, StorageError, StorageUnguarded
from anyshard.run import lease as lease_module
from anyshard.run.lease import KEY, Lease, LeaseRecord, check_ttl, decode_lease, describe_self
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before, fail

TTL_S = 60.0  # never waited for: pauses are counted, not slept
OTHER = LeaseRecord("b" * 13, "node-7", "elsewhere", 4711, "", "run", TTL_S)


def make_own(**facts: object) -> LeaseRecord:
    return replace(describe_self(TTL_S), job="", **facts)  # type: ignore[arg-type]


class Clock:
    """A pause that lets others act instead of time go by."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.paused_s = 0.0
        self._act = act

    def __call__(self, seconds: float) -> None:
        self.paused_s += seconds
        self._act()


@contextmanager
def held(store: Store, own: LeaseRecord | None = None, pause: Callable[[float], None] = time.sleep) -> Iterator[Lease]:
    lease = Lease(store, make_own() if own is None else own, pause=pause)
    lease.take("run")
    try:
        yield lease
    finally:
        lease.release()


def write(store: Store, record: LeaseRecord) -> None:
    store.put(KEY, record.encode(), token=record.incarnation)


def read(store: Store) -> LeaseRecord | None:
    return decode_lease(store.read(KEY, max_nbytes=10_000))


def end_of_process() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    return child.pid


def test_a_lease_says_who_holds_it_until_it_is_released() -> None:
    """Its record names host and process, and goes with the release."""
    store = MemoryStore()
    with held(store):
        found = read(store)
        assert found is not None
        assert (os.getpid(), "run", TTL_S) == (found.pid, found.run_id, found.ttl_s)
    with pytest.raises(BlobNotFound):
        read(store)


def test_a_record_of_another_host_is_waited_for_and_then_taken() -> None:
    """A holder that shows no sign of life for its time is as good as dead."""
    store, clock = MemoryStore(), Clock()
    write(store, OTHER)
    with held(store, pause=clock) as lease:
        assert lease.is_held
    assert TTL_S <= clock.paused_s <= 1.5 * TTL_S


def test_a_holder_that_is_alive_is_told_early() -> None:
    """As soon as it refreshes, which is well within its time; the error names it."""
    store = MemoryStore()
    write(store, OTHER)
    clock = Clock(lambda: write(store, replace(OTHER, count=1)))
    with pytest.raises(RunInUse, match="process 4711 on host node-7") as caught, held(store, pause=clock):
        pass
    assert ("node-7", 4711) == (caught.value.host, caught.value.pid)
    assert clock.paused_s < TTL_S / 3
    assert replace(OTHER, count=1) == read(store)


def test_a_holder_that_releases_meanwhile_leaves_it_free() -> None:
    """Whoever waits takes it then."""
    store = MemoryStore()
    write(store, OTHER)
    with held(store, pause=Clock(lambda: store.delete([KEY]))) as lease:
        assert lease.is_held


@pytest.mark.parametrize(
    "other",
    [
        replace(OTHER, place=make_own().place, pid=end_of_process()),
        replace(OTHER, ttl_s=1e-9),
    ],
    ids=["dead on this host", "long ago"],
)
def test_a_lease_of_the_dead_is_taken_at_once(other: LeaseRecord) -> None:
    """A restart waits for nobody who is known to be gone."""
    store, clock = MemoryStore(), Clock()
    write(store, other)
    with held(store, pause=clock):
        assert 0.0 == clock.paused_s


def test_an_earlier_start_of_the_job_on_another_host_is_waited_for_less_long() -> None:
    """It is probably dead, and one that lives shows that within a third of its time."""
    store, clock = MemoryStore(), Clock()
    write(store, replace(OTHER, job="job-1"))
    with held(store, replace(make_own(), job="job-1"), pause=clock):
        assert TTL_S / 3 < clock.paused_s < 0.6 * TTL_S


def test_a_living_writer_of_a_job_with_the_same_name_keeps_the_lease() -> None:
    """Names of jobs are easily used twice: the second writer is refused, and the first never hears of it."""
    store = MemoryStore()
    with held(store, replace(make_own(), job="job-1", place="elsewhere")) as first:
        with (
            pytest.raises(RunInUse, match="of job job-1"),
            held(store, replace(make_own(), job="job-1"), pause=Clock(first.refresh)),
        ):
            pass
        first.check()


def test_a_living_process_of_this_host_is_waited_for() -> None:
    """Its number may have been given to another one since."""
    store, clock = MemoryStore(), Clock()
    write(store, replace(OTHER, place=make_own().place, pid=os.getpid()))
    with held(store, pause=clock):
        assert clock.paused_s > 0.0


def test_two_processes_of_one_job_are_two_writers() -> None:
    """As long as both live, on one host; what says so is the number of the process, not the job."""
    store, clock = MemoryStore(), Clock()
    write(store, replace(OTHER, job="job-1", place=make_own().place, pid=os.getpid()))
    with held(store, replace(make_own(), job="job-1"), pause=clock):
        assert clock.paused_s > 0.0


def test_a_store_without_conditions_has_leases_too() -> None:
    """There the last of two at the same moment stays."""
    store = MemoryStore()
    refusing = FaultStore(store, [Rule(Verb.CREATE, KEY, fail(StorageUnguarded("no conditions", file=KEY)))])
    with held(refusing) as lease:
        lease.check()
        assert read(store) is not None


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"incarnation": 3}', b"\xff" * 100, OTHER.encode().replace(b"60.0", b'"x"')]
)
def test_an_unreadable_lease_is_waited_for_too(data: bytes) -> None:
    """It is somebody's, and nobody can tell whose."""
    store, clock = MemoryStore(), Clock()
    store.put(KEY, data, token="a" * 13)
    with held(store, pause=clock):
        assert clock.paused_s >= TTL_S


def test_the_loser_of_two_at_the_same_moment_is_told() -> None:
    """Only one of those that find no lease creates it, and of those that replace an old one the last stays."""
    store = MemoryStore()
    write(store, replace(OTHER, ttl_s=1e-9))
    late = replace(OTHER, incarnation="c" * 13)
    racing = FaultStore(store, [Rule(Verb.READ, KEY, do_before(lambda: write(store, late)), nth=2)])
    with pytest.raises(RunInUse, match="node-7"), held(racing):
        pass
    assert late == read(store)


def test_a_refresh_shows_life() -> None:
    """The count rises and the run is named, and a lease that somebody has removed is there again."""
    store = MemoryStore()
    with held(store) as lease:
        store.delete([KEY])
        lease.update("another-run")
        lease.refresh()
        found = read(store)
        assert found is not None
        assert (1, "another-run") == (found.count, found.run_id)


def test_a_lease_refreshes_itself() -> None:
    """On a thread of its own, several times within its time."""
    store, refreshed = MemoryStore(), threading.Event()
    noting = FaultStore(store, [Rule(Verb.PUT, KEY, do_before(refreshed.set))])
    with held(noting, replace(make_own(), ttl_s=0.3)):
        assert refreshed.wait(30)


def test_a_refresh_that_fails_is_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    """By the next one; it is logged."""
    store, refreshed = MemoryStore(), threading.Event()
    rules = [Rule(Verb.PUT, KEY, fail(StorageError("no answer", file=KEY))), Rule(Verb.PUT, KEY, do_before(refreshed.set), nth=2)]
    with held(FaultStore(store, rules), replace(make_own(), ttl_s=0.3)):
        assert refreshed.wait(30)
    assert any("could not be refreshed: no answer" in record.getMessage() for record in caplog.records)


def test_a_refresh_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a save, which is checked without it then, nor the end, which leaves the lease."""
    store, hangs, gate = MemoryStore(), threading.Event(), threading.Event()
    monkeypatch.setattr(lease_module, "_PATIENCE_S", 0.05)

    def hang() -> None:
        hangs.set()
        assert gate.wait(60)

    with held(FaultStore(store, [Rule(Verb.PUT, KEY, do_before(hang))]), replace(make_own(), ttl_s=0.3)) as lease:
        assert hangs.wait(30)
        lease.check()
        lease.release()
        assert any("its refresh hangs" in record.getMessage() for record in caplog.records)
        gate.set()


def test_a_lost_lease_is_told_and_left_alone() -> None:
    """Whoever was paused so long that another has it finds out before its next record, and does not take it back."""
    store = MemoryStore()
    with held(store) as lease:
        lease.check()
        write(store, OTHER)
        with pytest.raises(RunInUse, match="node-7"):
            lease.check()
        lease.refresh()
    assert OTHER == read(store)


def test_a_refresh_that_comes_late_takes_nothing_back() -> None:
    """A writer that was paused between its look and its write hears that it has lost, and the new holder goes on."""
    store = MemoryStore()
    late = FaultStore(store, [Rule(Verb.PUT, KEY, do_before(lambda: second.take("run")))])
    second = Lease(store, make_own(), pause=Clock())
    with held(late, make_own(place="elsewhere")) as first:
        first.refresh()
        second.check()
        with pytest.raises(RunInUse):
            first.check()
        second.check()
    second.release()


def test_storage_that_does_not_answer_takes_no_lease_away() -> None:
    """It is advice: only another's record is a reason to stop."""
    store = MemoryStore()
    with held(store) as lease:
        lease._store = FaultStore(store, [Rule(Verb.READ, KEY, fail(StorageError("no answer", file=KEY)))])
        lease.check()
        lease._store = store
        assert lease.is_held


def test_a_release_without_an_answer_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The next start waits for the end of its time then."""
    store = MemoryStore()
    with held(store) as lease:
        lease._store = FaultStore(store, [Rule(Verb.DELETE, KEY, fail(StorageError("no answer", file=KEY)))])
    assert ["lease.json could not be removed, so a restart may wait for it"] == [
        part for record in caplog.records for part in record.getMessage().split(": ") if "removed" in part
    ]


def test_the_job_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not torchrun's word for none."""
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    jobs = [describe_self(1.0).job]
    monkeypatch.setenv("SLURM_JOB_ID", "815")
    jobs.append(describe_self(1.0).job)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    jobs.append(describe_self(1.0).job)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-b-c")
    assert ["", "815", "815", "a-b-c"] == [*jobs, describe_self(1.0).job]


@pytest.mark.parametrize("ttl_s", [0, -1, 601, True, "60", float("nan")])
def test_impossible_times_are_refused(ttl_s: object) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidOption, match="lease_ttl_s"):
        check_ttl(ttl_s)

"""Object stores that fail in the middle of saves and loads: each checkpoint that was committed loads, and no wrong bytes ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard

import anyshard
from anyshard.storage.resolve import open_store
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import error_of, filled, shard
from tests.crash.store_children import EXPECTED, LONG, SMALL, Rounds, attempt, look, make_storage, meanwhile, save
from tests.proxy import Faults, Proxy, Rule, run_proxy
from tests.servers import S3Server, run_seaweedfs

pytestmark = pytest.mark.slow

Storage = Mapping[str, Any]


@pytest.fixture
def storage(server: S3Server, proxy: Proxy) -> Storage:
    """By way of the proxy."""
    return make_storage(server.options, endpoint=proxy.endpoint, max_attempts=5)


# The server dies -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that a test may kill and start again."""
    with run_seaweedfs(tmp_path_factory.mktemp("server")) as server:
        yield server


def bounce(server: S3Server, proxy: Proxy, nbytes: int, down_s: float) -> None:
    """Kill the server once so many more bytes have passed, or soon if they do not, and start it again later."""
    sent = proxy.count().nbytes + nbytes
    proxy.wait_until(lambda counts: counts.nbytes >= sent)
    server.stop()
    threading.Event().wait(down_s)
    server.start()


def end(server: S3Server, proxy: Proxy) -> None:
    """Kill the server when a request has come that it has not been heard to answer."""
    proxy.wait_until(lambda counts: counts.faults["hang"] > 0)
    server.stop()
    proxy.set(Faults())


KILLS = [(SMALL, 1), (LONG, 1), pytest.param((SMALL, 8), marks=pytest.mark.long), pytest.param((LONG, 8), marks=pytest.mark.long)]


@pytest.mark.parametrize("case", KILLS, ids=str)
def test_a_server_that_is_killed_in_mid_save_and_comes_back(mortal_server: S3Server, case: tuple[int, int]) -> None:
    """Each save of which the server is killed at a random byte commits and loads equal; so does what was there before."""
    (num_words, num_kills), server = case, mortal_server
    numbers = random.Random(f"{case}")
    with run_proxy(server.endpoint) as proxy:
        direct = make_storage(server.options)
        storage = make_storage(server.options, endpoint=proxy.endpoint, max_attempts=20)
        run = f"s3://{server.make_bucket()}/run"
        save(f"{run}/step_0", "before", direct, num_words=num_words)
        usual = proxy.count().nbytes
        save(f"{run}/step_1", "measured", storage, num_words=num_words)
        usual = proxy.count().nbytes - usual
        for step in range(2, 2 + num_kills):
            place, moment, down_s = f"{run}/step_{step}", numbers.randrange(usual * 7 // 10), numbers.uniform(1.0, 3.0)
            saved = meanwhile(
                lambda place=place: save(place, place, storage, num_words=num_words),  # type: ignore[misc]
                lambda moment=moment, down_s=down_s: bounce(server, proxy, moment, down_s),  # type: ignore[misc]
            )
            assert 1 == saved.result().generation
            assert [place, "before"] == [look(name, direct, num_words=num_words) for name in (place, f"{run}/step_0")]


def test_a_server_that_stays_away(mortal_server: S3Server) -> None:
    """The save ends with an error that names key and attempts, the checkpoint is not there, and the one before it is."""
    server = mortal_server
    with run_proxy(server.endpoint) as proxy:
        direct = make_storage(server.options)
        storage = make_storage(server.options, endpoint=proxy.endpoint, max_attempts=3, request_timeout_s=2.0)
        run = f"s3://{server.make_bucket()}/run"
        save(f"{run}/step_0", "before", direct)
        proxy.set(Faults(rules=[Rule("PUT .*data/model", "hang", times=99)]))
        failed = meanwhile(
            lambda: attempt(lambda: save(f"{run}/step_1", "lost", storage)),
            lambda: end(server, proxy),
        ).result()
        assert isinstance(failed, anyshard.StorageUnavailable)
        assert (f"{run}/step_1/" in str(failed), "attempts: 3" in str(failed), failed.attempts) == (True, True, 3), failed
        assert isinstance(attempt(lambda: look(f"{run}/step_0", storage)), anyshard.StorageUnavailable)
        server.start()
        assert [None, "before"] == [look(f"{run}/step_{step}", direct) for step in (1, 0)]


# Connections that are cut --------------------------------------------------------------------------------------------------


KINDS = ("seaweedfs", "moto_s3")
ROUNDS = [("seaweedfs", 0), *(pytest.param((kind, k), marks=pytest.mark.long) for kind in KINDS for k in range(1, 11))]


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_connections_that_are_cut_anywhere(case: tuple[str, int], request: pytest.FixtureRequest) -> None:
    """Whatever twenty saves and loads say is so: what is committed is whole, what failed is not there, and what was there is."""
    kind, first = case
    server: S3Server = request.getfixturevalue(kind)
    direct = make_storage(server.options)
    with run_proxy(server.endpoint) as proxy:
        proxied = make_storage(server.options, endpoint=proxy.endpoint, max_attempts=5)
        rounds = Rounds(server.make_bucket(), direct, proxied, proxy)
        for number in range(20 * first, 20 * first + 20):
            rounds.play(number)
        counts = proxy.count()
    print(f"{kind} {first}: {counts.faults['cut']} cut of {sum(counts.requests.values())} requests: {dict(rounds.outcomes)}")
    assert [] == rounds.wrong
    assert counts.faults["cut"] > 20
    assert min(rounds.outcomes["save: done"], rounds.outcomes["load: done"]) > 5


# Answers that are lost -----------------------------------------------------------------------------------------------------

ANSWERS = {
    "manifest": "PUT .*/manifest-1[.]json",
    "index": "PUT .*/index-1-",
    "small blob": "PUT .*/data/extra/",
    "part": "PUT .*/data/model/.*partNumber=1",
    "upload begun": "POST .*/data/model/.*[?]uploads",
    "upload completed": "POST .*/data/model/.*[?]uploadId",
}


@pytest.mark.parametrize("action", ["lose", "cut"])
@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_is_lost(place: str, storage: Storage, proxy: Proxy, what: str, action: Any) -> None:
    """The save succeeds, whether the server has heard of the request or not, and there is one generation, which loads."""
    before = proxy.count().faults[action]
    proxy.set(Faults(rules=[Rule(ANSWERS[what], action)]))
    report = save(place, "mine", storage, num_words=LONG)
    assert 1 == proxy.count().faults[action] - before
    assert ("mine", 1) == (look(place, storage, num_words=LONG), report.generation)
    names = [entry.key for entry in open_store(place, storage_options=storage).list("").entries]
    assert ["manifest-1.json"] == [name for name in names if name.startswith("manifest")]
    assert 1 == sum(name.startswith("index") for name in names)


class OnRetry:
    """A sink that does something once, at the first time that a request about a file is made again."""

    def __init__(self, file: str, act: Callable[[], object]) -> None:
        self._file, self._act = file, act
        self.outcomes: list[object] = []

    def emit(self, event: anyshard.Event) -> None:
        if event.name == "storage.retry" and str(event.file).startswith(self._file) and not self.outcomes:
            self.outcomes.append(None)
            self.outcomes[:] = [attempt(self._act)]


@pytest.mark.parametrize("action", ["cut", 503])
def test_another_wins_before_the_request_is_made_again(place: str, storage: Storage, proxy: Proxy, action: Any) -> None:
    """The server has not heard of the first one's record when the second one's is made: the first one is told."""
    proxy.set(Faults(rules=[Rule(ANSWERS["manifest"], action)]))
    other = OnRetry("manifest-1", lambda: save(place, "other", storage))
    with pytest.raises(anyshard.CommitConflict):
        save(place, "mine", storage, sinks=[other])
    assert (["SaveReport"], "other") == ([type(outcome).__name__ for outcome in other.outcomes], look(place, storage))


@pytest.mark.parametrize(("overwrite", "seen"), [(False, "mine"), (True, "other")])
def test_another_comes_while_the_answer_is_lost(
    place: str, storage: Storage, proxy: Proxy, *, overwrite: bool, seen: str
) -> None:
    """Where the record is there, one that does not overwrite is refused; one that does wins, and the first one is told."""
    proxy.set(Faults(rules=[Rule(ANSWERS["manifest"], "lose")]))
    other = OnRetry("manifest-1", lambda: save(place, "other", storage, overwrite=overwrite))
    mine = attempt(lambda: save(place, "mine", storage, sinks=[other]))
    expected = ("CommitConflict", "SaveReport") if overwrite else ("SaveReport", "CheckpointExists")
    assert expected == (type(mine).__name__, type(other.outcomes[0]).__name__), (mine, other.outcomes)
    assert seen == look(place, storage)


# Answers that are errors, or none ------------------------------------------------------------------------------------------


# Which statuses are tried again is quick to see with a pretended server: tests/storage/test_object_faults.py.
@pytest.mark.parametrize("status", [pytest.param(429, marks=pytest.mark.long), pytest.param(500, marks=pytest.mark.long), 503])
def test_a_store_that_is_busy_for_a_while(place: str, storage: Storage, proxy: Proxy, status: int) -> None:
    """Four requests in a row that are answered so, in a save and in a load, are no more than a delay."""
    proxy.set(Faults(rules=[Rule("data/", status, times=4), Rule("", status, skip=3, times=4)]))
    save(place, "mine", storage)
    proxy.set(Faults(rules=[Rule("data/", status, times=4), Rule("", status, skip=3, times=4)]))
    assert "mine" == look(place, storage)


def test_a_request_that_is_never_answered_is_made_again(place: str, storage: Storage, proxy: Proxy) -> None:
    """It ends by `request_timeout_s`: of the blob, of a part, of the record, of a read."""
    impatient = {**storage, "request_timeout_s": 1.0}
    patterns = ["PUT .*data/extra", "PUT .*partNumber=2", ANSWERS["manifest"], "GET .*data/model"]
    proxy.set(Faults(rules=[Rule(pattern, "hang") for pattern in patterns]))
    save(place, "mine", impatient, num_words=LONG)
    assert "mine" == look(place, impatient, num_words=LONG)
    assert 4 <= proxy.count().faults["hang"]


def save_rows(place: str, storage: Storage) -> tuple[str, str]:
    """The error in which a save of two ranks ends."""
    state = {"w": shard(filled("w", 64, 3), make_mesh(("dp", dist.get_world_size())), Shard(0))}
    options = anyshard.SaveOptions(storage_options=storage)
    return error_of(lambda: anyshard.save(place, state, options=options))


@pytest.mark.parametrize("case", [("PUT .*data/w/1[.]", 1), ("PUT .*/index-1-", 0)], ids=["blob", "index"])
def test_a_store_that_stays_busy_is_one_error_on_all_ranks(
    worlds: Worlds, place: str, storage: Storage, proxy: Proxy, case: tuple[str, int]
) -> None:
    """It names rank, store, key, attempts and cause; nothing is committed, and the next save is."""
    (pattern, rank), few = case, {**storage, "max_attempts": 3}
    proxy.set(Faults(rules=[Rule(pattern, 503, times=99)]))
    errors = worlds(2).run(save_rows, place, few)
    assert [errors[0]] * 2 == errors
    name, message = errors[0]
    assert "StorageUnavailable" == name
    for part in (f"rank {rank}: ", f"{place}/", "attempts: 3", "503"):
        assert part in message
    proxy.set(Faults())
    assert look(place, storage) is None
    save(place, "mine", storage)
    assert "mine" == look(place, storage)


def test_an_outage_ends_within_its_budget(place: str, storage: Storage, proxy: Proxy) -> None:
    """`retry_budget_s` ends a save on a store that answers nothing but 503, though attempts are left."""
    proxy.set(Faults(rules=[Rule("", 503, times=10_000)]))
    outcome = attempt(lambda: save(place, "mine", {**storage, "max_attempts": 1000, "retry_budget_s": 1.0}))
    assert isinstance(outcome, EXPECTED)
    assert "retry_budget_s" in str(outcome)

"""Preemption: signals and notices stop all ranks at one step with one last save, or, if a rank is missing, end them at once."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import anyshard
from anyshard import _api
from anyshard.coord.group import Channel, make_lone_group
from anyshard.coord.members import Members
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.summons import Call, Kind
from anyshard.errors import InvalidOption, KeyValueStoreLost, RankMissing
from anyshard.run import preemption as preemption_room
from anyshard.run.in_flight import InFlight
from anyshard.run.preemption import Preemption, PreemptionWatch
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before
from anyshard.testing.launch import Launch, Launcher
from anyshard.testing.processes import start_python
from tests.coord.thread_ranks import run_ranks
from tests.run import preemption_scripts as scripts

NUMBER = signal.SIGUSR2
HERE = Preemption(signals=(NUMBER,))
WAIT_S = 60.0
NUM_RANKS = 4


def open_alone(preemption: Preemption | None) -> PreemptionWatch:
    """An open watch of a process without a job."""
    watch = PreemptionWatch(preemption)
    watch.open(make_lone_group().open_channel("one"))
    return watch


def count_until_stop(watch: PreemptionWatch) -> Call:
    """Train, as it were, until all are to stop."""
    deadline = time.monotonic() + WAIT_S
    while Kind.STOP not in (call := watch.count_call()).kinds:
        assert time.monotonic() < deadline, "nobody says stop"
        threading.Event().wait(0.002)
    return call


def await_true(is_true: Callable[[], object]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it does not come true"
        threading.Event().wait(0.01)


def signal_here() -> None:
    os.kill(os.getpid(), NUMBER)


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    """Every test puts handlers and the wakeup descriptor back."""
    before = signal.getsignal(NUMBER), signal.getsignal(signal.SIGINT)
    yield
    assert before == (signal.getsignal(NUMBER), signal.getsignal(signal.SIGINT))
    assert -1 == signal.set_wakeup_fd(-1)


# --------------------------------------------------------------------------------------------------------- a process alone


@pytest.mark.parametrize(
    "wrong",
    [
        {"signals": (signal.SIGKILL,)},
        {"signals": (999,)},
        {"signals": signal.SIGTERM},
        {"notice": True},
        {"deadline_s": "60"},
        {"deadline_s": 0.0},
        {"roll_call_s": float("nan")},
        {"poll_s": float("inf")},
        {"deadline_s": 2.0, "roll_call_s": 2.0},
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    """They are refused when they are made."""
    with pytest.raises(InvalidOption, match="preemption: "):
        Preemption(**wrong)


def test_a_signal() -> None:
    """The next call is the one to stop at, the deadline runs, and a second signal changes nothing."""
    with open_alone(HERE) as watch:
        assert math.inf == watch.deadline_left_s
        watch.count_call()
        signal_here()
        signal_here()
        call = count_until_stop(watch)
        assert "SIGUSR2 on rank 0" == call.reason
        assert 0 < watch.deadline_left_s <= HERE.deadline_s
        signal_here()
        assert frozenset() == watch.count_call().kinds


def test_a_second_watch_after_the_first() -> None:
    """It knows nothing of what the first one has heard, and hears for itself."""
    with open_alone(HERE) as watch:
        signal_here()
        count_until_stop(watch)
    with open_alone(HERE) as watch:
        assert frozenset() == watch.count_call().kinds
        signal_here()
        count_until_stop(watch)


@pytest.mark.parametrize("first", [0, 1])
def test_two_watches_at_once(first: int) -> None:
    """Both hear a signal; whichever is closed first, the other one goes on, and then all is as before."""
    watches = [open_alone(HERE), open_alone(HERE)]
    signal_here()
    assert ["SIGUSR2 on rank 0"] * 2 == [count_until_stop(watch).reason for watch in watches]
    watches[first].close()
    with open_alone(HERE) as third:
        signal_here()
        count_until_stop(third)
    watches[1 - first].close()


def test_the_handler_of_another_library() -> None:
    """It is called as before, and is there again afterwards."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(NUMBER, hear)
    try:
        with open_alone(HERE) as watch:
            signal_here()
            count_until_stop(watch)
        assert ([NUMBER], hear) == (heard, signal.getsignal(NUMBER))
    finally:
        signal.signal(NUMBER, before)


def test_a_handler_that_comes_later_stays() -> None:
    """Closing does not take away what another library has put over ours, which goes on calling nothing of ours."""
    before = signal.getsignal(NUMBER)
    try:
        with open_alone(HERE):
            ours = signal.getsignal(NUMBER)
            signal.signal(NUMBER, lambda number, frame: ours(number, frame))  # type: ignore[operator, misc]  # ours can be called
            theirs = signal.getsignal(NUMBER)
        assert theirs is signal.getsignal(NUMBER)
        signal_here()
    finally:
        signal.signal(NUMBER, before)


def test_ctrl_c_as_a_wish_to_stop() -> None:
    """Python's own handler, which would interrupt the step, is left out."""
    with open_alone(Preemption(signals=(signal.SIGINT,))) as watch:
        os.kill(os.getpid(), signal.SIGINT)
        assert "SIGINT on rank 0" == count_until_stop(watch).reason


def test_the_wakeup_descriptor_of_another_library() -> None:
    """It gets the numbers of signals as before, also if it came later, and is in place again in the end."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        theirs.setblocking(False)
        ours.settimeout(WAIT_S)
        signal.set_wakeup_fd(theirs.fileno())
        with open_alone(HERE) as watch:
            signal_here()
            assert bytes([NUMBER]) == ours.recv(1)
            signal.set_wakeup_fd(theirs.fileno())
            watch._tap.keep()
            signal_here()
            assert bytes([NUMBER]) == ours.recv(1)
        assert theirs.fileno() == signal.set_wakeup_fd(-1)


def test_a_wakeup_descriptor_that_was_closed(tmp_path: Path) -> None:
    """What has its number by then is not written to."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    number = theirs.fileno()
    signal.set_wakeup_fd(number)
    with closing(ours), open_alone(HERE) as watch:
        theirs.close()
        file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, number)
        signal_here()
        count_until_stop(watch)
        for descriptor in {file, number}:
            os.close(descriptor)
        assert b"" == (tmp_path / "file").read_bytes()


def test_an_event_loop_meanwhile() -> None:
    """A loop of asyncio that handles another signal hears it, and a signal of ours is heard after it."""

    async def hear() -> None:
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(heard.wait(), WAIT_S)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    with open_alone(HERE) as watch:
        asyncio.run(hear())
        signal_here()
        assert "SIGUSR2 on rank 0" == count_until_stop(watch).reason


def test_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked again and again, also if asking fails, until it says so."""
    answers = iter([False, None, True])

    def notice() -> bool:
        if (answer := next(answers)) is None:
            raise OSError("no answer")
        return answer

    with open_alone(Preemption(signals=(), notice=notice, poll_s=0.01)) as watch:
        assert "notice on rank 0" == count_until_stop(watch).reason
    assert "notice has failed" in caplog.text


def test_without_preemption() -> None:
    """No signal is heard, and wishes to save are agreed on all the same."""
    with open_alone(None) as watch:
        assert signal.SIG_DFL == signal.getsignal(NUMBER)
        watch.summon(Kind.SAVE, "10 min over")
        await_true(lambda: Kind.SAVE in watch.count_call().kinds)


# ---------------------------------------------------------------------------------------------------- a run of one process


def open_run(store: Store, state: dict[str, Any]) -> anyshard.Run:
    """A run that hears signals."""
    run = anyshard.Run(store, preemption=HERE)
    run.restore_or_init(state)
    return run


def make_state() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(3)}}


def test_a_run_that_was_dropped() -> None:
    """Signals do at once what they did before, and its threads and descriptors are gone."""
    run = open_run(MemoryStore(), make_state())
    watch = run._pace._watch
    assert watch is not None
    (thread,), reading = watch._threads, watch._tap._reading
    del run, watch
    gc.collect()
    assert signal.SIG_DFL == signal.getsignal(NUMBER)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def does_handle(number: int) -> bool:
    """Whether this process does anything but the default at a signal, whatever the interpreter knows of that."""
    (caught,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_run_that_was_dropped_by_another_thread() -> None:
    """As before: there the interpreter lets nobody set handlers, so the process itself is told."""
    watch = open_alone(HERE)
    assert does_handle(NUMBER)
    run_ranks([watch.abandon])
    assert not does_handle(NUMBER)
    watch._threads[0].join(WAIT_S)
    watch.close()  # as the end of the process does


def test_an_error_of_the_training_ends_the_watch_first() -> None:
    """Before saves are waited for: this rank must agree on no call that it never comes to, and signals end it by then."""

    def await_end() -> None:
        await_true(lambda: signal.getsignal(NUMBER) is signal.SIG_DFL)

    store = MemoryStore()
    slow = FaultStore(store, [Rule(Verb.CREATE, "step_1/manifest-*", do_before(await_end))])
    with pytest.raises(ZeroDivisionError), open_run(slow, make_state()) as run:
        run.async_save(1, make_state())
        raise ZeroDivisionError
    assert [1] == [one.step for one in anyshard.Run(store).steps()]


def test_saves_that_are_stuck_leave_time_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for during half of what is left, and by the last save itself for no longer than it can bear."""
    waited: list[float] = []

    def settle(_saves: InFlight, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return False

    def save(*_: object, options: anyshard.SaveOptions, **__: object) -> None:
        waited.append(options.timeout_s)
        raise ZeroDivisionError

    monkeypatch.setattr(InFlight, "settle", settle)
    monkeypatch.setattr(_api, "save_step", save)
    preemption = Preemption(signals=(), notice=lambda: True, deadline_s=60.0, poll_s=0.01)
    with pytest.raises(ZeroDivisionError), anyshard.Run(MemoryStore(), preemption=preemption) as run:
        await_true(lambda: run.end_step(1, make_state()))
    assert [True, True] == [0 < found <= most for found, most in zip(waited, (30.0, 15.0), strict=True)]


# ----------------------------------------------------------------------------------------------- several ranks, as threads


class LosableStore(MemoryKeyValueStore):
    """Answers until it is lost."""

    is_lost = False

    def get(self, key: str) -> bytes | None:
        if self.is_lost:
            raise KeyValueStoreLost("the agent has gone", {})
        return super().get(key)


def channel(rank: int, store: MemoryKeyValueStore, size: int = NUM_RANKS) -> Channel:
    return Channel(Members(rank, tuple(range(size))), store, "one")


def test_a_notice_on_one_of_four_ranks() -> None:
    """All stop at the same call."""
    store, together, is_time = MemoryKeyValueStore(), threading.Barrier(NUM_RANKS, timeout=WAIT_S), threading.Event()

    def run(rank: int) -> Call:
        notice = is_time.is_set if rank == 2 else None
        with PreemptionWatch(Preemption(signals=(), notice=notice, poll_s=0.01)) as watch:
            watch.open(channel(rank, store))
            while Kind.STOP not in (call := watch.count_call()).kinds:
                together.wait()
                if call.number == 5 + rank:
                    is_time.set()
            together.wait()
            return call

    results = run_ranks([lambda rank=rank: run(rank) for rank in range(NUM_RANKS)])
    assert [results[0]] * NUM_RANKS == results
    assert "notice on rank 2" == results[0].reason


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals by which this process would have been ended."""
    numbers: list[int] = []
    monkeypatch.setattr(preemption_room, "end_by", numbers.append)
    return numbers


def test_a_signal_while_a_rank_is_missing(ends: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """The process is ended by the signal, and whoever counts a call gets an error that names the rank."""
    with PreemptionWatch(Preemption(signals=(NUMBER,), roll_call_s=0.1, poll_s=0.01)) as watch:
        watch.open(channel(0, MemoryKeyValueStore(), size=2))
        signal_here()
        await_true(lambda: ends)
        with pytest.raises(RankMissing, match="rank 1: roll call: RankMissing: did not answer within 0.1 s"):
            watch.count_call()
    assert NUMBER == ends[0]
    assert "rank 0: ends at once by its signal: no last save (SIGUSR2 on rank 0)" in caplog.text


def test_a_notice_while_a_rank_is_missing(ends: list[int]) -> None:
    """There is no signal to end by: the next call raises."""
    with PreemptionWatch(Preemption(signals=(), notice=lambda: True, roll_call_s=0.1, poll_s=0.01)) as watch:
        watch.open(channel(0, MemoryKeyValueStore(), size=2))
        with pytest.raises(RankMissing):
            count_until_stop(watch)
    assert [] == ends


def test_a_signal_when_the_key_value_store_is_lost(ends: list[int]) -> None:
    """Nobody can be asked, so the process is ended as by a signal that nobody handles."""
    store = LosableStore()
    with PreemptionWatch(Preemption(signals=(NUMBER,), poll_s=0.01)) as watch:
        watch.open(channel(1, store, size=2))
        store.is_lost = True
        assert watch._summons is not None
        await_true(lambda: watch._summons.is_over)  # type: ignore[union-attr]  # it is open
        watch.count_call()
        signal_here()
        await_true(lambda: ends)
        with pytest.raises(KeyValueStoreLost, match="the agent has gone"):
            watch.count_call()


def test_the_deadline(ends: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """A process that has not closed its run by then is ended by its signal, and the log says what it was at."""
    with open_alone(Preemption(signals=(NUMBER,), deadline_s=0.2, roll_call_s=0.1)) as watch:
        watch.count_call()
        signal_here()
        await_true(lambda: ends)
        assert 0.0 == watch.deadline_left_s
    assert [NUMBER] == ends
    assert "was to stop within 0.2 s; its call 2 of end_step has not come" in caplog.text


# ------------------------------------------------------------------------------------------------------------ real ranks


@contextmanager
def launched(
    launch: Launcher, case: Callable[..., object], place: Path, *args: object, size: int = NUM_RANKS
) -> Iterator[Launch]:
    """Ranks that have come to where they can be told to stop."""
    with launch(case, str(place), *args, size=size) as ranks:
        await_ready(place, size)
        yield ranks


def await_ready(place: Path, size: int) -> list[int]:
    """The process ids of ranks that are ready."""
    files = [place / f"ready.{rank}" for rank in range(size)]
    await_true(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def list_steps(place: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step_")) for path in (place / "run").glob("step_*/manifest-*.json"))


def check_stopped(values: list[dict[str, Any]], place: Path) -> None:
    """All ranks stopped at the step in which they were told, and saved it; nobody trained it twice."""
    assert [(scripts.HELD_AT, True)] * NUM_RANKS == [(value["step"], value["stopped"]) for value in values]
    assert [4, scripts.HELD_AT] == list_steps(place)


@pytest.mark.slow
@pytest.mark.parametrize("told", [(2,), (0, 1, 2, 3, 0, 1)], ids=["one", "all"])
def test_signals_to_ranks_in_a_collective(launch: Launcher, tmp_path: Path, told: tuple[int, ...]) -> None:
    """One, or all and some of them twice: all save the same step once and end by themselves."""
    with launched(launch, scripts.train, tmp_path, "signal") as ranks:
        for rank in told:
            ranks.send_signal(rank, signal.SIGTERM)
        ended = ranks.wait(timeout_s=WAIT_S)
    assert [0] * NUM_RANKS == [one.exit_code for one in ended]
    check_stopped([one.value for one in ended], tmp_path)


@pytest.mark.slow
def test_a_notice_to_a_rank_in_a_collective(launch: Launcher, tmp_path: Path) -> None:
    """As a signal."""
    with launched(launch, scripts.train, tmp_path, "notice") as ranks:
        (tmp_path / "notice").touch()
        check_stopped([one.value for one in ranks.wait(timeout_s=WAIT_S)], tmp_path)


@pytest.mark.slow
def test_a_loop_that_does_not_come_back(launch: Launcher, tmp_path: Path) -> None:
    """At the deadline the process that was told ends by the signal, whatever its main thread does."""
    with launched(launch, scripts.never_come_again, tmp_path, size=2) as ranks:
        for rank in range(2):
            ranks.send_signal(rank, signal.SIGTERM)
        ended = ranks.wait(timeout_s=WAIT_S)
        logs = ranks.read_logs()
    assert [-signal.SIGTERM] * 2 == [one.exit_code for one in ended]
    assert "its call 2 of end_step has not come" in logs[0]


@pytest.mark.slow
def test_data_workers_that_are_hit_too(launch: Launcher, tmp_path: Path) -> None:
    """A signal to a rank with its data workers, while it waits for data and saves: the workers go on until the last save."""
    with launched(launch, scripts.load_data, tmp_path, "fork", size=2) as ranks:
        os.killpg(await_ready(tmp_path, 2)[1], signal.SIGTERM)
        values = [one.value or one.error for one in ranks.wait(timeout_s=WAIT_S)]
    assert values[0] == values[1]
    assert (True, values[0]["step"]) == (values[0]["stopped"], list_steps(tmp_path)[-1])


@pytest.mark.slow
def test_children_of_a_rank(launch: Launcher) -> None:
    """A data worker passes over signals but its parent's; a plain fork is ended by them; the rank hears nothing of either."""
    with launch(scripts.have_children, size=1) as ranks:
        (ended,) = ranks.wait(timeout_s=WAIT_S)
    died = -int(signal.SIGTERM)
    assert {"answer": "alive", "terminated": died, "fork": died, "is_told": False} == (ended.value or ended.error)


# --------------------------------------------------------------------------------------------------------------- torchrun


@contextmanager
def torchrun(case: str, place: Path, size: int) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A job under torchrun whose ranks are ready, with their process ids; none of them outlives the block."""
    arguments = ("--standalone", "--nproc-per-node", str(size), "-m", scripts.__name__, case, str(place))
    with (place / "log").open("wb") as log:
        agent = start_python("torch.distributed.run", *arguments, output=log.fileno())
    pids: list[int] = []
    try:
        await_true(lambda: agent.poll() is not None or len(list(place.glob("ready.*"))) == size)
        assert agent.poll() is None, read_log(place)
        pids += await_ready(place, size)
        yield agent, pids
    finally:
        for pid in (agent.pid, *pids):
            if is_alive(pid):
                os.killpg(pid, signal.SIGKILL)
        agent.wait(WAIT_S)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def read_log(place: Path) -> str:
    return (place / "log").read_text(errors="replace")


@pytest.mark.slow
def test_preemption_under_torchrun(launch: Launcher, tmp_path: Path) -> None:
    """SIGTERM to one of 4 ranks: all save one step, torchrun ends with 0, and the resumed run ends bit for bit as one at rest."""
    place, at_rest = tmp_path / "told", tmp_path / "at rest"
    place.mkdir()
    with torchrun("train", place, NUM_RANKS) as (agent, pids):
        os.kill(pids[2], signal.SIGTERM)
        assert 0 == agent.wait(scripts.DEADLINE_S), read_log(place)
    assert [4, scripts.HELD_AT] == list_steps(place)
    digests = []
    for where in (place, at_rest):
        with launch(scripts.train, str(where), size=NUM_RANKS) as ranks:
            digests.append([(one.value or {}).get("digest", one.error) for one in ranks.wait(timeout_s=WAIT_S)])
    assert 1 == len(set(digests[0] + digests[1]))
    assert anyshard.open(place / "run" / f"step_{scripts.HELD_AT}").step == scripts.HELD_AT


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun(tmp_path: Path) -> None:
    """torchrun tells the others by SIGTERM: they make no last save and end at once by it, whatever they are in."""
    with torchrun("die", tmp_path, 3) as (_, pids):
        (tmp_path / "die").touch()
        await_true(lambda: not any(map(is_alive, pids)))
    assert "ends at once by its signal: no last save" in read_log(tmp_path)
    assert set(list_steps(tmp_path)) <= {4}  # whose asynchronous save may have been under way


@pytest.mark.long
def test_data_workers_that_were_spawned(tmp_path: Path) -> None:
    """torchrun is told, which signals ranks and data workers alike; workers that call `shield_worker` go on."""
    with torchrun("spawn", tmp_path, 2) as (agent, _):
        agent.send_signal(signal.SIGTERM)
        await_true(lambda: len(list(tmp_path.glob("ended.*"))) == 2)
        ended = [(tmp_path / f"ended.{rank}").read_text() for rank in range(2)]
    assert ended[0] == ended[1]
    assert f"{{'step': {list_steps(tmp_path)[-1]}, 'stopped': True}}" == ended[0]


TOO_LATE = """
import os, signal, sys, torch, anyshard
with anyshard.Run(sys.argv[1], preemption=anyshard.Preemption(deadline_s=30)) as run:
    run.end_step(1, {"x": torch.ones(1)})
    run.save(1, {"x": torch.ones(1)})
    os.kill(os.getpid(), signal.SIGTERM)
print("swallowed")
"""


def test_a_signal_after_the_last_step_is_not_swallowed(tmp_path: Path) -> None:
    """Where no call is left that could answer it, a signal ends the process once the run is closed, and the saves stand."""
    job = subprocess.run([sys.executable, "-c", TOO_LATE, tmp_path], check=False, capture_output=True, text=True, timeout=60)
    assert (-signal.SIGTERM, "") == (job.returncode, job.stdout), job.stderr
    assert [1] == [one.step for one in anyshard.Run(tmp_path).steps()]

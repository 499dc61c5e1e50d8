"""The end of a process with saves under way: they are finished or given up in time, whatever the way in which it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from anyshard.coord.bounded import Caller
from anyshard.engine.crew import Crew, Patience
from anyshard.errors import KeyValueStoreLost
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import TimedStore
from anyshard.testing.launch import Launcher
from tests.background import exit_scripts
from tests.background.exit_scripts import VICTIM
from tests.ranks.scenes import look

NUM_RANKS = 3
AT_ONCE = 6  # launches


@dataclass(frozen=True, slots=True)
class Scene:
    """A script, whether rank 0 holds the key-value store, exit codes, which seed step 2 holds then, words of some rank's log."""

    script: Callable[[str, bool], object]
    is_hosted: bool
    exit_codes: tuple[int, ...] = (0,) * NUM_RANKS
    seen: str | None = "2"
    log: str = ""

    def __str__(self) -> str:
        return f"{self.script.__name__}{', hosted' if self.is_hosted else ''}"


def one_is(code: int) -> tuple[int, ...]:
    return tuple(code if rank == VICTIM else 0 for rank in range(NUM_RANKS))


MISSED = f"rank {VICTIM}: durable: RankMissing"
UNTOLD = "the process ends, and no call has raised what an asynchronous save failed with: "
GIVEN_UP = f"expected its end within {exit_scripts.EXIT_S:g} s, found rank {VICTIM} in phase write"
SCENES = (  # those first that mostly wait
    Scene(exit_scripts.raise_before, False, (1,) * NUM_RANKS, None, f"rank {VICTIM}: begin: RankMissing"),
    Scene(exit_scripts.raise_between, True, one_is(1), None, MISSED),
    Scene(exit_scripts.leave_at_once, False, seen=None, log=MISSED),
    Scene(exit_scripts.leave_at_once, True, seen=None, log=f"{UNTOLD}KeyValueStoreLost: expected an answer"),
    Scene(exit_scripts.hang, False, seen=None, log=GIVEN_UP),
    Scene(exit_scripts.hang, True, seen=None, log=GIVEN_UP),
    Scene(exit_scripts.save_last, False),
    Scene(exit_scripts.save_last, True),
    Scene(exit_scripts.save_then_destroy, False),
    Scene(exit_scripts.save_then_destroy, True),
    Scene(exit_scripts.save_two_last, True),
    Scene(exit_scripts.save_without_threads, False),
    Scene(exit_scripts.save_without_threads, True),
    Scene(exit_scripts.exit_after, True, (3,) * NUM_RANKS),
    Scene(exit_scripts.raise_after, False, one_is(1)),
    Scene(exit_scripts.raise_after, True, one_is(1)),
    Scene(exit_scripts.be_terminated, False, (-int(signal.SIGTERM),) * NUM_RANKS, None),
    Scene(exit_scripts.fail_last, False, seen=None, log=UNTOLD),
)


@dataclass(frozen=True, slots=True)
class End:
    """How a scene has ended."""

    exit_codes: tuple[int, ...]
    seen: str | None
    place: Path
    log: str


@pytest.fixture(scope="module")
def ends(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[Scene, End]:
    """All scenes, played some at a time, for they mostly wait."""
    return dict(_play(launch, tmp_path_factory))


def _play(launch: Launcher, places: pytest.TempPathFactory) -> Iterator[tuple[Scene, End]]:
    rest = iter(SCENES)
    while batch := [(scene, places.mktemp("exit")) for scene in islice(rest, AT_ONCE)]:
        with ExitStack() as stack:
            launches = [
                stack.enter_context(launch(scene.script, str(place), scene.is_hosted, size=NUM_RANKS)) for scene, place in batch
            ]
            for (scene, place), launched in zip(batch, launches, strict=True):
                codes = tuple(one.exit_code for one in launched.wait(timeout_s=90))
                yield scene, End(codes, look(place / "step_2"), place, "\n".join(launched.read_logs().values()))


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_the_process_ends(ends: dict[Scene, End], scene: Scene) -> None:
    """In time, with the exit code of the script; the save is whole or not visible at all, and what is lost is logged."""
    end = ends[scene]
    assert (scene.exit_codes, scene.seen) == (end.exit_codes, end.seen), end.log
    assert scene.log in end.log
    assert "Fatal Python error" not in end.log


@pytest.mark.slow
def test_saves_that_begin_when_the_process_ends(ends: dict[Scene, End]) -> None:
    """A save that waits for another one is made too, with threads and without."""
    for scene, end in ends.items():
        if scene.script in (exit_scripts.save_two_last, exit_scripts.save_without_threads):
            assert "3" == look(end.place / "step_3"), scene


@pytest.mark.slow
def test_calls_by_exit_handlers(launch: Launcher, tmp_path: Path) -> None:
    """Saves of all kinds that are called when no thread can be started any more are made on the thread of the caller."""
    with launch(exit_scripts.save_in_exit_handlers, str(tmp_path), size=1) as launched:
        (ended,) = launched.wait()
        log = launched.read_logs()[0]
    assert 0 == ended.exit_code
    assert "Traceback" not in log
    assert [1, 2, 3, 6] == sorted(int(path.parent.name[5:]) for path in tmp_path.glob("step_*/manifest*"))


# ------------------------------------------------------------------------------------------------ threads that do not start


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.12 on while the interpreter ends."""
    monkeypatch.setattr(threading.Thread, "start", exit_scripts.refuse_thread)


def test_a_crew_without_threads(no_threads: None) -> None:
    """The owner does the tasks in their order, the last one too, and gets the first error."""
    done: list[object] = []
    with Crew(3, name="test", patience=Patience(), at_rest=lambda: done.append("rest")) as crew:
        for number in range(3):
            crew.submit(lambda number=number: done.append(number))
        crew.finish(lambda: None)
    assert [0, 1, 2, "rest"] == done
    with pytest.raises(ZeroDivisionError), Crew(3, name="test", patience=Patience()) as crew:
        crew.submit(lambda: 1 // 0)
        crew.submit(lambda: done.append("not done"))
    assert [0, 1, 2, "rest"] == done


def test_storage_and_key_value_store_without_threads(no_threads: None) -> None:
    """Their calls are made on the thread of whoever asks."""
    assert b"bytes" == TimedStore(MemoryStore({"a": b"bytes"}), 1.0).read("a", max_nbytes=9)
    assert threading.get_ident() == Caller().ask(threading.get_ident, 1.0)


def test_a_caller_that_is_closed() -> None:
    """Its thread has ended, and nothing is asked any more."""
    caller = Caller()
    thread = caller.ask(threading.current_thread, 10.0)
    caller.close(10.0)
    assert not thread.is_alive()
    with pytest.raises(KeyValueStoreLost, match="the process ends"):
        caller.ask(threading.get_ident, 1.0)

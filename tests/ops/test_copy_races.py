"""Several copies, saves and cleans at one target at once, in every order of their calls."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import anyshard
from anyshard import ops
from anyshard.errors import AnyshardError, CheckpointExists, CommitConflict
from anyshard.ops.copy import CopyReport
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from tests.commit.actors import Actor
from tests.ops.scenes import Died, MortalStore, is_sound, make_training, read_files, save_training, some_or_all

MAX_CALLS = 200


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return save_training()


def start(files: dict[str, bytes], target: Store, num_calls: int, **options: Any) -> Actor:
    """A copy that has made so many calls at the target, and stops before the next one."""
    actor = Actor(target, lambda store: ops.copy(MemoryStore(files), store, threads=1, **options))
    for _ in range(num_calls):
        actor.step()
    return actor


def finish(actor: Actor) -> object:
    """How a copy ends that goes on alone."""
    for _ in range(MAX_CALLS):
        actor.step()
    assert actor.is_done
    return actor.outcome


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("verify", ["all", "source"])
@pytest.mark.parametrize("make", [LocalStore, lambda _: MemoryStore()], ids=["local", "memory"])
def test_a_second_copy_comes_between_any_two_calls(
    files: dict[str, bytes], quick_path: Path, make: Any, verify: Any, stride: int
) -> None:
    """The second one always completes; the first one ends as well with the checkpoint there, or with a conflict."""
    for number in range(0, MAX_CALLS, stride):
        target = make(quick_path / str(number))
        first = start(files, target, number, verify=verify)
        is_over = first.is_done
        assert isinstance(ops.copy(MemoryStore(files), target, verify=verify), CopyReport)
        assert isinstance(finish(first), CopyReport | CommitConflict), number
        assert files == read_files(target), number
        if is_over:
            break


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("verify", ["all", "source"])
def test_a_second_copy_dies_between_any_two_calls(files: dict[str, bytes], quick_path: Path, verify: Any, stride: int) -> None:
    """However far the second one came before it died, the first one never publishes what is not whole."""
    for number in range(2, 60, 5 * stride):
        for dies_at in range(4, 60, 5 * stride):
            target = LocalStore(quick_path / f"{number}-{dies_at}")
            first = start(files, target, number, verify=verify)
            with suppress(Died):
                ops.copy(MemoryStore(files), MortalStore(target, dies_at), threads=1, verify=verify)
            assert is_sound(read_files(target), files)
            assert isinstance(finish(first), CopyReport | AnyshardError)
            assert is_sound(read_files(target), files), (number, dies_at)
            ops.copy(MemoryStore(files), target)
            assert files == read_files(target)


@pytest.mark.slow
@some_or_all
def test_two_copies_take_turns(files: dict[str, bytes], quick_path: Path, stride: int) -> None:
    """Call by call in turn, after any head start: neither ever leaves half a checkpoint, and one more copy finishes it."""
    for number in range(0, 50, 4 * stride):
        target = LocalStore(quick_path / str(number))
        first, second = start(files, target, number), start(files, target, 0)
        for _ in range(MAX_CALLS):
            first.step()
            second.step()
            assert is_sound(read_files(target), files)
        for actor in (first, second):
            assert actor.is_done
            assert isinstance(actor.outcome, CopyReport | AnyshardError)
        ops.copy(MemoryStore(files), target)
        assert files == read_files(target)


def test_copies_of_many_threads(files: dict[str, bytes], quick_path: Path) -> None:
    """Eight at once: each ends with a report, or with an error and then without half a checkpoint; at most one more is needed."""
    for number in range(5):
        target, outcomes = LocalStore(quick_path / str(number)), list[object]()

        def act(store: Store = target, into: list[object] = outcomes) -> None:
            try:
                into.append(ops.copy(MemoryStore(files), store, threads=2))
            except AnyshardError as error:
                into.append(error)

        threads = [threading.Thread(target=act) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert 8 == len(outcomes)
        assert is_sound(read_files(target), files)
        ops.copy(MemoryStore(files), target)
        assert files == read_files(target)


@some_or_all
def test_a_save_comes_between_any_two_calls(files: dict[str, bytes], stride: int) -> None:
    """A whole save at the target wins or finds the copy there; the copy never replaces it."""
    for number in range(0, MAX_CALLS, stride):
        target = MemoryStore()
        first = start(files, target, number)
        is_over = first.is_done
        try:
            anyshard.save(target, {"extra": {"other": 1}})
            is_saved = True
        except CheckpointExists:
            is_saved = False
        outcome = finish(first)
        with anyshard.open(target) as found:
            assert is_saved == ("model" not in found.sections), number
        assert isinstance(outcome, (CheckpointExists, CommitConflict) if is_saved else CopyReport), number
        if is_over:
            break


@some_or_all
def test_a_clean_comes_between_any_two_calls(files: dict[str, bytes], stride: int) -> None:
    """A clean that takes the copy for dead ends it, and it removes nothing that was published."""
    for number in range(0, MAX_CALLS, stride):
        target = MemoryStore()
        first = start(files, target, number)
        is_over = first.is_done
        ops.clean(target, older_than_s=0, grace_s=0)
        finish(first)
        assert is_sound({name: data for name, data in read_files(target).items() if name in files}, files) or (
            "deleted" in read_files(target)["manifest-1.json"].decode()
        )
        if is_over:
            break


def test_a_later_save_with_other_weights_is_not_mixed_in(files: dict[str, bytes]) -> None:
    """What the source becomes after the copy has begun is not in the copy."""
    source, target = MemoryStore(files), MemoryStore()
    actor = Actor(source, lambda store: ops.copy(store, target, threads=1))
    for _ in range(6):
        actor.step()
    anyshard.save(source, make_training("later"), overwrite=True)
    assert isinstance(finish(actor), CopyReport)
    assert files == target.snapshot()


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("num_calls", range(12, 27, 3))
def test_a_late_removal_meets_nothing_that_was_published(
    files: dict[str, bytes], quick_path: Path, num_calls: int, stride: int
) -> None:
    """A copy that has judged a file which another one was writing goes on when that one has ended: there is never half of one."""
    for seen in range(16, 30, stride):
        target = LocalStore(quick_path / str(seen))
        first, second = start(files, target, num_calls, verify="source"), start(files, target, seen)
        finish(first)
        while not second.is_done:
            assert is_sound(read_files(target), files), seen
            second.step()
        assert files == read_files(target)

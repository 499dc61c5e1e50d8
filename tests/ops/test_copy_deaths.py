"""Copies that die or fail at every call: no half of a checkpoint is ever published, and the next call finishes it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from anyshard import ops
from anyshard.errors import AnyshardError, StorageError, StorageUnavailable
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Action, FaultStore, Rule, SequentialStore, Verb
from anyshard.storage.wrappers.faults import fail, lose_answer
from tests.ops.scenes import Died, MortalStore, is_sound, read_files, save_training, some_or_all

VERBS = (
    Verb.PREPARE,
    Verb.CREATE,
    Verb.CREATE_BLOB,
    Verb.WRITE_AT,
    Verb.FINISH,
    Verb.READ,
    Verb.OPEN_BLOB,
    Verb.READ_INTO,
    Verb.LIST,
    Verb.DELETE,
)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return save_training()


def copy_again(files: dict[str, bytes], target: Store) -> None:
    """Finish what a copy has left, and check what the report says about it."""
    before = read_files(target)
    assert is_sound(before, files)
    report = ops.copy(MemoryStore(files), target)
    assert files == read_files(target)
    assert {name for name, data in files.items() if before.get(name) == data} == set(report.kept)
    assert sum(len(files[name]) for name in files.keys() - set(report.kept)) == report.copied_nbytes


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("make", [LocalStore, lambda _: MemoryStore()], ids=["local", "memory"])
def test_a_copy_that_dies_at_any_call(
    files: dict[str, bytes], quick_path: Path, *, make: Any, is_done: bool, stride: int
) -> None:
    """Dead before or after each call at the target, it has published nothing or all; the next copy keeps what is whole."""
    for number in count(0, stride):
        target = make(quick_path / str(number))
        mortal = MortalStore(target, number, is_done=is_done)
        try:
            ops.copy(MemoryStore(files), mortal, threads=1)
        except Died:
            copy_again(files, target)
        else:
            break
    assert mortal.num_calls > 30


@pytest.mark.slow
@some_or_all
def test_two_deaths_in_a_row(files: dict[str, bytes], quick_path: Path, stride: int) -> None:
    """What two dead copies left, claims and all, is finished and cleared by a third."""
    for first in range(3, 40, 5 * stride):
        for second in range(4, 40, 5 * stride):
            target = LocalStore(quick_path / f"{first}-{second}")
            for number in (first, second):
                with pytest.raises(Died):
                    ops.copy(MemoryStore(files), MortalStore(target, number, is_done=True), threads=1)
            copy_again(files, target)


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("at", ["source", "target"])
@pytest.mark.parametrize("make", [fail, lose_answer])
@pytest.mark.parametrize("kind", [StorageError, StorageUnavailable])
@pytest.mark.parametrize("verb", VERBS)
def test_a_copy_that_fails_at_any_call(
    files: dict[str, bytes],
    verb: Verb,
    kind: type[StorageError],
    make: Callable[[BaseException], Action],
    *,
    at: str,
    stride: int,
) -> None:
    """Each call of each verb fails once: the copy ends with that error or goes on, and is never half published."""
    for nth in count(1, stride):
        target = MemoryStore()
        places: dict[str, Store] = {"source": MemoryStore(files), "target": SequentialStore(target)}
        places[at] = faulty = FaultStore(places[at], [Rule(verb, "*", make(kind("broken", file="x")), nth=nth)])
        is_copied = copy_if_possible(places["source"], places["target"])
        assert is_sound(target.snapshot(), files)
        if not faulty.fired:
            assert (True, files) == (is_copied, target.snapshot())
            break
        if not is_copied:
            copy_again(files, target)


def copy_if_possible(source: Store, target: Store) -> bool:
    """Whether the copy went through."""
    try:
        ops.copy(source, target, threads=1, timeout_s=1)
    except AnyshardError:
        return False
    return True

"""Checkpoints that give up sections: what is left is what was saved, what goes is said, and no reader ever finds a half."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

import anyshard
from anyshard import ops
from anyshard.commit.parts import part_store
from anyshard.commit.resolve import resolve
from anyshard.commit.thinning import thin_step
from anyshard.commit.tombstone import delete_step
from anyshard.errors import (
    CheckpointDamaged,
    CheckpointExists,
    CheckpointNotFound,
    CommitConflict,
    InvalidOption,
    NotACheckpoint,
    StorageError,
    StorageUnguarded,
)
from anyshard.records.manifest import StepState
from anyshard.records.names import parse_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before, fail, lose_answer
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.steps import Clock, contents, run_until, save_slowly
from tests.commit.thinner import make_state, publish_by_hand, read, save_state
from tests.ops.scenes import Died, MortalStore, some_or_all

WHOLE, THIN = {"model": 1, "optimizer": 1, "extra": 1}, {"model": 1}
KEPT = ("model",)


def saved(number: int = 1) -> MemoryStore:
    store = MemoryStore()
    save_state(store, number)
    return store


# What thinning does --------------------------------------------------------------------------------------------------------


def test_a_thinned_checkpoint_holds_what_was_kept() -> None:
    """The kept section loads as it was saved; files of the others are gone, and are what is returned."""
    store = saved()
    before = store.snapshot()
    removed = thin_step(store, KEPT)
    assert (THIN, set(before) - set(store.snapshot())) == (read(store), set(removed))
    assert ["1 blob", "2 index", "2 manifest"] == contents(store)


def test_the_record_says_what_is_gone_and_is_else_that_of_the_save() -> None:
    """Step, time and data stay those of the save; the sections that went are listed, those of all thinnings."""
    store = saved()
    first = resolve(store).manifest
    thin_step(store, ("optimizer", "model"))
    thin_step(store, KEPT)
    manifest = resolve(store).manifest
    assert manifest.thinned is not None
    assert (("model",), ("extra", "optimizer"), 3) == (manifest.sections, manifest.thinned.dropped, manifest.generation)
    assert (first.attempt, first.attempt) == (manifest.thinned.attempt, manifest.data_attempt)
    assert (first.time, first.step, first.blobs[:1]) == (manifest.time, manifest.step, manifest.blobs)


def test_no_blob_is_touched_on_disk(tmp_path: Path) -> None:
    """Kept blobs are the same files as before, to the inode; directories of dropped sections are gone."""
    store = LocalStore(tmp_path)
    save_state(store)
    facts = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.glob("data/model/*")}
    thin_step(store, KEPT)
    assert facts == {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.glob("data/*/*")}
    assert ["data/model"] == [str(path.relative_to(tmp_path)) for path in tmp_path.glob("data/*")]


def test_ten_steps_lose_the_share_of_the_optimizer(tmp_path: Path) -> None:
    """Thinning every step of a run to weights frees just the bytes of the other sections' blobs, but for small records."""
    for step in range(10):
        state = {"model": torch.zeros(1000), "optimizer": {"a": torch.zeros(1000), "b": torch.zeros(1000)}}
        anyshard.save(tmp_path / f"step_{step}", state, step=step)
    blobs = {path: path.stat().st_size for path in tmp_path.rglob("*.bin")}
    for step in range(10):
        thin_step(LocalStore(tmp_path / f"step_{step}"), KEPT)
    left = {path: path.stat().st_size for path in tmp_path.rglob("*.bin")}
    assert {path: nbytes for path, nbytes in blobs.items() if "optimizer" not in path.parts} == left


def test_what_is_as_thin_already_stays_as_it_is() -> None:
    """Nothing is written and nothing goes."""
    store = saved()
    thin_step(store, KEPT)
    before = store.snapshot()
    assert ((), (), before) == (thin_step(store, KEPT), thin_step(store, ("model", "optimizer")), store.snapshot())


def test_a_grace_lets_readers_finish() -> None:
    """With a grace the files of dropped sections stay, and go with a thinning after it."""
    clock = Clock()
    store = MemoryStore(clock=clock.read)
    save_state(store)
    assert () == thin_step(store, KEPT, grace_s=60)
    with anyshard.open(store) as checkpoint:
        assert "model" in checkpoint.sections
    clock.sleep(60)
    assert 4 == len(thin_step(store, KEPT, grace_s=60))
    assert ["1 blob", "2 index", "2 manifest"] == contents(store)


def test_a_thinned_checkpoint_can_be_saved_over_fenced_and_deleted() -> None:
    """It is a checkpoint as any other: a save replaces it, a clean commits it again, a delete ends it."""
    clock = Clock()
    store = MemoryStore(clock=clock.read)
    save_state(store)
    thin_step(store, KEPT)
    with pytest.raises(CheckpointExists):
        save_state(store, 2)
    run_until(save_slowly(store, overwrite=True), "blob")
    clock.sleep(1e6)
    assert (3, THIN) == (ops.clean(store).fenced, read(store))
    assert resolve(store).manifest.thinned is not None
    save_state(store, 2, overwrite=True)
    assert {"model": 2, "optimizer": 2, "extra": 2} == read(store)
    assert None is resolve(store).manifest.thinned
    delete_step(store)
    assert (["5 manifest"], None) == (contents(store), read(store))


# What readers are told -----------------------------------------------------------------------------------------------------


def test_what_is_gone_is_named_when_it_is_asked_for() -> None:
    """An address of a section that was dropped is no unknown one: the message says since when it is gone, and so does repr."""
    store = saved()
    thin_step(store, ("model", "extra"))
    with anyshard.open(store) as checkpoint:
        for ask in (checkpoint.values, checkpoint.__getitem__):
            with pytest.raises(KeyError, match="thinned to model, extra: optimizer is gone since 20"):
                ask("optimizer")
        with pytest.raises(KeyError, match="holds model, extra'"):
            checkpoint["other"]
        assert "optimizer/m" not in checkpoint
        assert repr(checkpoint).endswith("with model, extra, without optimizer>")


# What is refused -----------------------------------------------------------------------------------------------------------


def missing_a_blob() -> MemoryStore:
    store = saved()
    store.delete([blob.name for blob in resolve(store).manifest.blobs[:1]])
    return store


def deleted() -> MemoryStore:
    store = saved()
    delete_step(store)
    return store


def foreign() -> MemoryStore:
    return MemoryStore({"notes.txt": b"mine"})


REFUSALS: dict[str, tuple[Callable[[], MemoryStore], tuple[str, ...], type[Exception], str]] = {
    "nothing would be left": (
        saved,
        ("ema", "weights"),
        InvalidOption,
        "at least one of .*model, optimizer, extra.*ema, weights",
    ),
    "no section is named": (saved, (), InvalidOption, "none of them in nothing"),
    "an incomplete copy": (missing_a_blob, KEPT, CheckpointDamaged, "incomplete copy"),
    "a deleted step": (deleted, KEPT, CheckpointNotFound, "was deleted"),
    "an empty place": (MemoryStore, KEPT, CheckpointNotFound, "no checkpoint is there"),
    "strangers' files": (foreign, KEPT, NotACheckpoint, "notes.txt"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_thinned_stays_as_it_is(case: str) -> None:
    """The error says why, and the store is as it was."""
    make, sections, kind, message = REFUSALS[case]
    store = make()
    before = store.snapshot()
    with pytest.raises(kind, match=message):
        thin_step(store, sections)
    assert before == store.snapshot()


def test_a_store_that_is_not_guarded_is_refused() -> None:
    """Nobody could decide there between a thinner and a save."""
    store = saved()
    before = store.snapshot()
    with pytest.raises(StorageUnguarded, match="Nothing was changed"):
        thin_step(store, KEPT, settle=UnguardedStore)
    assert before == store.snapshot()


def test_foreign_files_stay() -> None:
    """Names that anyshard never makes are not touched, wherever they are."""
    store = saved()
    for name in ("README", "data/optimizer/notes.txt"):
        store.create(name, b"mine", token="x")
    thin_step(store, KEPT)
    assert {"README", "data/optimizer/notes.txt"} == {name for name in store.snapshot() if parse_name(name) is None}


# Steps in parts ------------------------------------------------------------------------------------------------------------


def in_parts() -> MemoryStore:
    store = MemoryStore()
    for number, name in enumerate(("actor", "critic"), start=1):
        save_state(part_store(store, name), number)
    anyshard.save(part_store(store, "rewards"), {"extra": {"number": 3}})
    publish_by_hand(store, "actor", "critic", "rewards")
    return store


def test_each_part_is_thinned_that_has_what_is_kept() -> None:
    """A part without any of these sections stays whole, and the record of the step stays as it is."""
    store = in_parts()
    record = resolve(store).data
    removed = thin_step(store, KEPT)
    assert (THIN, {"model": 2}) == (read(part_store(store, "actor")), read(part_store(store, "critic")))
    assert (record, ("extra",)) == (resolve(store).data, resolve(part_store(store, "rewards")).manifest.sections)
    assert {"actor", "critic"} == {key.split("/")[1] for key in removed if key.startswith("parts/")}
    assert () == thin_step(store, KEPT)


def test_parts_that_keep_nothing_or_were_replaced_are_refused() -> None:
    """A part that was saved over since is not what the step was published with."""
    store = in_parts()
    with pytest.raises(InvalidOption, match="at least one"):
        thin_step(store, ("ema",))
    save_state(part_store(store, "critic"), 4, overwrite=True)
    with pytest.raises(CheckpointDamaged, match=r"critic.*saved over the part"):
        thin_step(store, KEPT)


# Deaths, sleepers, faults --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("make", [LocalStore, lambda _: MemoryStore()], ids=["local", "memory"])
def test_a_thinner_that_dies_at_any_call(quick_path: Path, make: Callable[[Path], Store], *, is_done: bool, stride: int) -> None:
    """Dead before or after each call it leaves the checkpoint as it was or thinned; the next one finishes, to the last file."""
    seen = []
    for number in count(0, stride):
        store = make(quick_path / str(number))
        save_state(store)
        try:
            thin_step(MortalStore(store, number, is_done=is_done), KEPT)
        except Died:
            seen.append(read(store))
        else:
            break
        thin_step(store, KEPT)
        ops.clean(store, older_than_s=0, grace_s=0)
        assert (THIN, 3) == (
            read(store),
            sum(1 for _ in resolve(store).listing.entries()) + len(resolve(store).listing.manifests),
        )
    assert [WHOLE, THIN] == [found for i, found in enumerate(seen) if found != seen[i - 1] or i == 0]


@pytest.mark.slow
@pytest.mark.parametrize("make", [fail, lose_answer])
@pytest.mark.parametrize("verb", [Verb.CREATE, Verb.READ, Verb.LIST, Verb.DELETE])
def test_a_thinner_whose_calls_fail_or_lose_their_answer(verb: Verb, make: Callable[[BaseException], object]) -> None:
    """Each call fails once: the checkpoint is as it was or thinned, and never lost; one that reports success has thinned it."""
    for nth in count(1):
        store = saved()
        faulty = FaultStore(store, [Rule(verb, "*", make(StorageError("broken", file="x")), nth=nth)])  # type: ignore[arg-type]
        try:
            thin_step(faulty, KEPT)
        except StorageError:
            assert read(store) in (WHOLE, THIN)
        else:
            assert THIN == read(store)
        if not faulty.fired:
            break
        thin_step(store, KEPT)
        assert THIN == read(store)


def overtaken(store: MemoryStore, act: Callable[[], object], pattern: str = "manifest-*") -> FaultStore:
    """A store on which somebody acts right before the thinner creates its index or its record."""
    return FaultStore(store, [Rule(Verb.CREATE, pattern, do_before(act))])


OTHERS: dict[str, tuple[Callable[[MemoryStore], object], dict[str, int] | None]] = {
    "a save over it": (partial(save_state, number=2, overwrite=True), {"model": 2, "optimizer": 2, "extra": 2}),
    "a delete": (delete_step, None),
    "another thinner": (partial(thin_step, sections=("model", "extra")), {"model": 1, "extra": 1}),
    "the same thinner": (partial(thin_step, sections=KEPT), THIN),
}


@pytest.mark.parametrize("pattern", ["index-*", "manifest-*"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_thinner_that_wakes_when_others_have_acted(other: str, pattern: str) -> None:
    """Whoever came first stands, whole; the thinner says so and leaves nothing."""
    act, expected = OTHERS[other]
    store = saved()
    with pytest.raises(CommitConflict):
        thin_step(overtaken(store, partial(act, store), pattern), KEPT)
    assert expected == read(store)
    assert len({parse_name(name).attempt for name in store.snapshot() if name.startswith("index-")}) <= 1  # type: ignore[union-attr]


def test_a_thinner_that_sleeps_before_it_removes_files() -> None:
    """When it wakes it takes nothing of the checkpoint that was saved over its own."""
    store = saved()
    asleep = FaultStore(store, [Rule(Verb.DELETE, "*", do_before(lambda: save_state(store, 2, overwrite=True)))])
    thin_step(asleep, KEPT)
    assert {"model": 2, "optimizer": 2, "extra": 2} == read(store)


def test_a_save_that_wakes_when_the_step_was_thinned() -> None:
    """It lost: the thinned checkpoint stands, and nothing of the save is left."""
    store = saved()
    asleep = FaultStore(store, [Rule(Verb.CREATE, "manifest-*", do_before(lambda: thin_step(store, KEPT)))])
    with pytest.raises(CommitConflict):
        save_state(asleep, 2, overwrite=True)
    assert (THIN, ["1 blob", "2 index", "2 manifest"]) == (read(store), contents(store))


def test_a_reader_that_comes_to_files_that_were_thinned_away() -> None:
    """It is told that the checkpoint was replaced, and opens it anew."""
    store = saved()
    with anyshard.open(store) as checkpoint:
        thin_step(store, KEPT)
        with pytest.raises(anyshard.CheckpointReplaced):
            checkpoint["optimizer/m"][...]
    assert THIN == read(store)
    assert StepState.COMMITTED is resolve(store).manifest.state
    assert {"number": 0} == make_state(0)["extra"]

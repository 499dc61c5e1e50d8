from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import anyshard
from anyshard import ops
from anyshard.commit.attempt import begin
from anyshard.errors import (
    CheckpointDamaged,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointReplaced,
    CommitConflict,
    InvalidOption,
    NotACheckpoint,
    StorageError,
    StorageStuck,
    StorageUnavailable,
    UnsupportedFormat,
)
from anyshard.monitor.sinks import RecordingSink
from anyshard.records.digests import digest_bytes
from anyshard.records.names import FileKind, index_name, make_attempt, manifest_name, parse_name
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Capabilities
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, SequentialStore, Verb
from anyshard.storage.wrappers.faults import do_before, fail, flip_bit, lose_answer
from anyshard.testing.fill import local_bytes
from anyshard.testing.training import training_state
from anyshard.testing.world import Worlds
from tests.ops.scenes import make_training, read_tree, save_sharded, save_training, write_tree

NO_GRACE = anyshard.SaveOptions(overwrite_grace_s=0)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return save_training()


def names_of(files: dict[str, bytes], kind: FileKind) -> list[str]:
    return [name for name in sorted(files) if (parsed := parse_name(name)) and parsed.kind is kind]


def load_bytes(place: Any) -> dict[str, bytes]:
    state = make_training("other")
    anyshard.load(place, state)
    assert 7 == state["extra"]["tokens"]
    return local_bytes(training_state(state["model"], state["optimizer"]))


# Whole copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_copy_has_the_same_bytes_on_every_storage(files: dict[str, bytes], tmp_path: Path, threads: int) -> None:
    """Memory -> directory -> front-to-back memory: byte for byte the same, nothing else is left, and it loads equal."""
    ops.copy(MemoryStore(files), tmp_path / "a", threads=threads)
    assert files == read_tree(tmp_path / "a")
    assert {"data", "data/model", "data/optimizer", "data/extra"} == {
        str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_dir()
    }
    target = MemoryStore()
    ops.copy(tmp_path / "a", SequentialStore(target), threads=threads)
    assert files == target.snapshot()
    assert load_bytes(MemoryStore(files)) == load_bytes(target)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """What two ranks have saved is copied whole, to a store and back to a directory; a single process reads the same."""
    worlds(2).run(save_sharded, str(tmp_path / "a"))
    store = MemoryStore()
    report = ops.copy(tmp_path / "a", store)
    ops.copy(store, tmp_path / "b")
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")
    assert (11, len(store.snapshot())) == (report.step, report.num_files)
    with anyshard.open(tmp_path / "a") as first, anyshard.open(tmp_path / "b") as second:
        assert first["model/weight"][...].tobytes() == second["model/weight"][...].tobytes()


@pytest.mark.parametrize("is_sequential", [False, True])
def test_blobs_of_several_blocks(tmp_path: Path, *, is_sequential: bool) -> None:
    """A blob longer than a block, with a tail behind a border that no block has, comes over whole."""
    source, target = MemoryStore(), MemoryStore()
    anyshard.save(source, {"model": {"w": torch.arange(9_000_000, dtype=torch.float32), "b": torch.ones(3)}})
    report = ops.copy(source, SequentialStore(target) if is_sequential else target, threads=4)
    assert source.snapshot() == target.snapshot()
    assert report.nbytes == report.copied_nbytes == sum(map(len, source.snapshot().values()))


def test_a_checkpoint_without_tensors() -> None:
    """Plain values alone are copied as everything is."""
    source, target = MemoryStore(), MemoryStore()
    anyshard.save(source, {"extra": {"tokens": 7}})
    ops.copy(source, target)
    assert source.snapshot() == target.snapshot()


def test_b143_a_copy_is_complete_on_every_storage(files: dict[str, bytes], tmp_path: Path) -> None:
    """No mark of one storage is needed on another: copied by hand or by us it loads, and a clean removes nothing (B143)."""
    write_tree(tmp_path / "hand", files)
    target = MemoryStore()
    ops.copy(tmp_path / "hand", target)
    assert () == ops.clean(target, older_than_s=0, grace_s=0).removed
    assert (files, load_bytes(tmp_path / "hand")) == (target.snapshot(), load_bytes(target))


def test_the_report_and_events(files: dict[str, bytes]) -> None:
    """The report counts all files, prints on a line; each file has its events, and the copy is a span."""
    sink = RecordingSink()
    report = ops.copy(MemoryStore(files, url="mem:a"), MemoryStore(url="mem:b"), sinks=[sink])
    nbytes = sum(map(len, files.values()))
    assert ("mem:a", "mem:b", 3, len(files), nbytes, nbytes, ()) == (
        report.source,
        report.target,
        report.step,
        report.num_files,
        report.nbytes,
        report.copied_nbytes,
        report.kept,
    )
    assert str(report).startswith(f"mem:a -> mem:b: step 3, {len(files)} files of ")
    copied = [event.file for event in sink.events if event.name == "copy.file.copied"]
    assert set(files) - {manifest_name(1)} == set(copied) & set(files)
    assert ("copy.begin", "copy.published", "copy.end") == (sink.names()[0], sink.names()[-2], sink.names()[-1])


# What is at the target already -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["all", "source"])
def test_the_same_checkpoint_is_copied_once(files: dict[str, bytes], verify: Any) -> None:
    """A second copy writes nothing; with verify="all" it reads what is there, else it goes by names and lengths."""
    target = CountingStore(MemoryStore(files))
    report = ops.copy(MemoryStore(files), target, verify=verify)
    assert (set(files), 0) == (set(report.kept), report.copied_nbytes)
    assert [0, 0, 0, 0] == [target.count(verb).calls for verb in (Verb.CREATE, Verb.CREATE_BLOB, Verb.PUT, Verb.DELETE)]
    assert (verify == "all") == (target.count(Verb.READ_INTO).calls > 0)


@pytest.mark.parametrize("verify", ["all", "source"])
def test_a_torn_copy_by_another_program_is_completed(files: dict[str, bytes], verify: Any) -> None:
    """Where the manifest came first and the rest did not, the rest is brought."""
    lost = [*names_of(files, FileKind.BLOB)[:1], *names_of(files, FileKind.INDEX)]
    target = MemoryStore({name: data for name, data in files.items() if name not in lost})
    report = ops.copy(MemoryStore(files), target, verify=verify)
    assert files == target.snapshot()
    assert (set(files) - set(lost), sum(len(files[name]) for name in lost)) == (set(report.kept), report.copied_nbytes)


@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
@pytest.mark.parametrize("action", [fail, lose_answer])
def test_a_torn_copy_is_completed_through_a_passing_fault(files: dict[str, bytes], verb: Verb, action: Any) -> None:
    """Storage that is unavailable for a moment has damaged nothing: where nothing is under the name, the file is sent again."""
    name = names_of(files, FileKind.BLOB)[0]
    inner = MemoryStore({key: data for key, data in files.items() if key != name})
    rule = Rule(verb, name, action(StorageUnavailable("gone", file=name)), times=2)
    ops.copy(MemoryStore(files), FaultStore(inner, [rule]))
    assert files == inner.snapshot()


def test_no_file_of_a_committed_checkpoint_is_removed(files: dict[str, bytes]) -> None:
    """A wrong file that a manifest names is named and stays, whatever its length."""
    name = names_of(files, FileKind.BLOB)[0]
    for wrong in (b"x" * len(files[name]), b"x"):
        target = MemoryStore({**files, name: wrong})
        with pytest.raises(CheckpointDamaged, match="never removed") as caught:
            ops.copy(MemoryStore(files), target)
        assert (name, wrong) == (caught.value.file, target.snapshot()[name])


def test_another_checkpoint_is_in_the_way(files: dict[str, bytes]) -> None:
    """Nothing is replaced, be it another checkpoint, a damaged one, or another generation of the same."""
    other, damaged = save_training(), {manifest_name(1): b"{}"}
    later = MemoryStore(files)
    anyshard.save(later, make_training(), overwrite=True)
    for there in (other, damaged, later.snapshot()):
        target = MemoryStore(there)
        with pytest.raises(CheckpointExists, match="copy to another place"):
            ops.copy(MemoryStore(files), target)
        assert there == target.snapshot()


def test_a_deleted_step_is_in_the_way_only_of_older_generations(files: dict[str, bytes]) -> None:
    """A tombstone of generation 2 hides a copy of generation 1, so that is refused; one of generation 3 comes after it."""
    target, source = MemoryStore(), MemoryStore(files)
    anyshard.save(target, make_training())
    ops.delete(target)
    before = target.snapshot()
    with pytest.raises(CheckpointExists, match="deleted a step there"):
        ops.copy(source, target)
    assert before == target.snapshot()
    for _ in range(2):
        anyshard.save(source, make_training("new"), overwrite=True, options=NO_GRACE)
    ops.copy(source, target)
    assert load_bytes(source) == load_bytes(target)


def test_foreign_files_are_left_alone(files: dict[str, bytes]) -> None:
    """A directory that is somebody else's is refused; strangers beside our files are no hindrance and stay."""
    with pytest.raises(NotACheckpoint):
        ops.copy(MemoryStore(files), MemoryStore({"model.safetensors": b"x"}))
    leftover = names_of(files, FileKind.BLOB)[0]
    target = MemoryStore({"notes.txt": b"x", leftover: files[leftover]})
    assert (leftover,) == ops.copy(MemoryStore(files), target).kept
    assert {**files, "notes.txt": b"x"} == target.snapshot()


def test_an_unfinished_save_is_no_hindrance_and_loses(files: dict[str, bytes]) -> None:
    """A save that has begun at the target is not disturbed; it finds the generation taken when it commits."""
    target = MemoryStore()

    def copy_meanwhile() -> None:
        ops.copy(MemoryStore(files), target)

    slow = FaultStore(target, [Rule(Verb.CREATE, "index-*", do_before(copy_meanwhile))])
    with pytest.raises(CommitConflict):
        anyshard.save(slow, make_training("other"))
    assert load_bytes(MemoryStore(files)) == load_bytes(target)


def test_leftovers_of_this_copy_are_checked_and_wrong_ones_replaced(files: dict[str, bytes]) -> None:
    """Of what a dead copy left, whole files are kept; short ones, and those with a flipped bit anywhere, are sent again."""
    first, second, third = names_of(files, FileKind.BLOB)
    (index,) = names_of(files, FileKind.INDEX)
    flipped = bytearray(files[second])
    flipped[len(flipped) // 2] ^= 1
    target = MemoryStore({first: files[first], second: bytes(flipped), third: files[third][:100], index: files[index] + b"x"})
    report = ops.copy(MemoryStore(files), target, verify="source")
    assert ((first,), files) == (report.kept, target.snapshot())
    assert sum(map(len, files.values())) - len(files[first]) == report.copied_nbytes


# The source ------------------------------------------------------------------------------------------------------------


def test_damage_at_the_source_is_found_before_it_is_written(files: dict[str, bytes]) -> None:
    """A flipped bit anywhere in any file ends the copy with that file's name, and nothing is published."""
    for name, data in files.items():
        for position in [*range(0, len(data), 397), 1, 64, 125, len(data) - 1]:
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            target = MemoryStore()
            with pytest.raises(CheckpointDamaged) as caught:
                ops.copy(MemoryStore({**files, name: bytes(damaged)}), target, threads=1)
            assert name == caught.value.file, position
            assert name not in target.snapshot()
            assert manifest_name(1) not in target.snapshot()


def test_damage_names_the_addresses(files: dict[str, bytes]) -> None:
    """The error says which tensors lie in the cell that is damaged."""
    name = next(name for name in names_of(files, FileKind.BLOB) if "/model/" in name)
    damaged = bytearray(files[name])
    damaged[70] ^= 1
    with pytest.raises(CheckpointDamaged, match=r"model/0\.bias"):
        ops.copy(MemoryStore({**files, name: bytes(damaged)}), MemoryStore())


def test_a_source_that_is_no_checkpoint(files: dict[str, bytes]) -> None:
    """Nothing there, or a file missing: the errors of a load, and nothing is made."""
    target = MemoryStore()
    with pytest.raises(CheckpointNotFound):
        ops.copy(MemoryStore(), target)
    lost = names_of(files, FileKind.BLOB)[0]
    with pytest.raises(CheckpointDamaged, match="incomplete copy"):
        ops.copy(MemoryStore({name: data for name, data in files.items() if name != lost}), target)
    assert manifest_name(1) not in target.snapshot()


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda store: anyshard.save(store, {"x": {"y": 1}}, overwrite=True, options=NO_GRACE), CheckpointReplaced),
        (ops.delete, CheckpointNotFound),
    ],
    ids=["saved over", "deleted"],
)
def test_a_source_that_goes_away_meanwhile(files: dict[str, bytes], act: Any, expected: type[Exception]) -> None:
    """Files that vanish are explained by what became of the checkpoint; nothing is published."""
    inner, target = MemoryStore(files), MemoryStore()
    source = FaultStore(inner, [Rule(Verb.OPEN_BLOB, "*", do_before(lambda: act(inner)), nth=4)])
    with pytest.raises(expected):
        ops.copy(source, target, threads=1)
    assert 1 == len(source.fired)
    assert manifest_name(1) not in target.snapshot()


def test_a_checkpoint_that_a_fence_committed_once_more() -> None:
    """The manifest of a later generation names files of an earlier one; the copy has both as they are."""
    source, target = MemoryStore(), MemoryStore()
    anyshard.save(source, make_training())
    attempt = begin(source, sections=("model",), overwrite=True)
    source.create(index_name(attempt.generation, attempt.id), b"x", token=attempt.id)
    assert 2 == ops.clean(source, older_than_s=0, grace_s=math.inf).fenced
    ops.copy(source, target)
    assert {name: data for name, data in source.snapshot().items() if name != manifest_name(1)} == target.snapshot()
    assert load_bytes(source) == load_bytes(target)


def test_members_that_this_release_does_not_know_are_not_lost(files: dict[str, bytes]) -> None:
    """A manifest that would be published with other bytes is refused."""
    body = files[manifest_name(1)].rsplit(b"\n", 2)[0].replace(b'{"format"', b'{"more":1,"format"', 1) + b"\n"
    changed = body + digest_bytes(body).encode() + b"\n"
    with pytest.raises(UnsupportedFormat, match="more in it"):
        ops.copy(MemoryStore({**files, manifest_name(1): changed}), MemoryStore())


# The storage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [fail, lose_answer])
@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
def test_a_blob_is_sent_again_when_the_storage_was_unavailable(files: dict[str, bytes], verb: Verb, action: Any) -> None:
    """Twice per file, and no other file with it; a lost answer is no reason to send it once more."""
    name, sink, inner = names_of(files, FileKind.BLOB)[0], RecordingSink(), MemoryStore()
    rule = Rule(verb, name, action(StorageUnavailable("gone", file=name)), times=2)
    report = ops.copy(MemoryStore(files), FaultStore(inner, [rule]), sinks=[sink])
    again = [event.file for event in sink.events if event.name == "copy.file.again"]
    assert (files, (), {name}) == (inner.snapshot(), report.kept, set(again))


def test_storage_that_stays_unavailable_ends_the_copy(files: dict[str, bytes]) -> None:
    """After two further tries the error is raised, and nothing is published."""
    inner = MemoryStore()
    rule = Rule(Verb.FINISH, "data/model/*", fail(StorageUnavailable("gone", file="x")), times=3)
    with pytest.raises(StorageUnavailable):
        ops.copy(MemoryStore(files), FaultStore(inner, [rule]))
    assert manifest_name(1) not in inner.snapshot()


def test_what_was_written_is_read_back(files: dict[str, bytes]) -> None:
    """Storage that changes a byte on the way is found with verify="all"; "source" never reads blobs at the target."""
    name = names_of(files, FileKind.BLOB)[0]
    rule = Rule(Verb.READ_INTO, name, flip_bit(1000), times=1000)
    with pytest.raises(StorageError, match="expected to read back"):
        ops.copy(MemoryStore(files), FaultStore(MemoryStore(), [rule]))
    target = CountingStore(MemoryStore())
    ops.copy(MemoryStore(files), target, verify="source")
    assert 0 == target.count(Verb.READ_INTO).calls


def test_a_full_storage_ends_the_copy(files: dict[str, bytes]) -> None:
    """The store's own error is raised; what was finished stays for the next call."""
    inner = MemoryStore()
    rule = Rule(Verb.WRITE_AT, "data/optimizer/*", fail(anyshard.StorageFull("full", file="x")), times=1000)
    with pytest.raises(anyshard.StorageFull):
        ops.copy(MemoryStore(files), FaultStore(inner, [rule]), threads=1)
    there = set(inner.snapshot())
    assert there == set(ops.copy(MemoryStore(files), inner).kept)


@pytest.mark.parametrize(("threads", "streams", "expected"), [(1, 1, 1), (2, 1, 2), (8, 4, 2), (2, 4, 1)])
def test_front_to_back_storage_takes_few_files_at_once(
    files: dict[str, bytes], threads: int, streams: int, expected: int
) -> None:
    """As many files are under way as their streams fit into `threads`; each is written front to back."""
    counting = CountingStore(MemoryStore())
    ops.copy(MemoryStore(files), SequentialStore(counting, streams_per_blob=streams), threads=threads)
    assert counting.count(Verb.WRITE_AT).max_in_flight <= expected


def test_two_threads_are_a_budget() -> None:
    """With threads=2 at most two blocks are read and two are written at any time, however many files and blocks there are."""
    inner, target = MemoryStore(), CountingStore(MemoryStore())
    anyshard.save(inner, {"a": {"w": torch.ones(9_000_000)}, "b": {"w": torch.ones(1000)}, "c": {"w": torch.ones(1000)}})
    source = CountingStore(inner)
    ops.copy(source, target, threads=2)
    assert source.count(Verb.READ_INTO).max_in_flight <= 2
    assert target.count(Verb.WRITE_AT).max_in_flight <= 2


class DeafStore(MemoryStore):
    """A store that takes the condition of `create` and does not heed it."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(parallel_writes=True, guarded=None)

    def create(self, key: str, data: bytes, *, token: str) -> None:
        self.put(key, data, token=token)


def test_a_target_without_create_if_absent(files: dict[str, bytes]) -> None:
    """It is found out, the copy goes by the rules for such stores, and leaves nothing but the checkpoint."""
    target = DeafStore()
    ops.copy(MemoryStore(files), target)
    assert files == target.snapshot()


def test_a_rival_on_a_target_without_create_if_absent(files: dict[str, bytes]) -> None:
    """Another save that has made its index there keeps the copy from being published."""
    rival = index_name(1, make_attempt())
    target = DeafStore({rival: b"index"})
    with pytest.raises(CommitConflict):
        ops.copy(MemoryStore(files), target)
    assert manifest_name(1) not in target.snapshot()


def test_options_that_cannot_be(files: dict[str, bytes]) -> None:
    """Each is named, before anything is done."""
    target = MemoryStore()
    wrong: list[dict[str, Any]] = [{"verify": "none"}, {"threads": 0}, {"threads": 1.5}, {"timeout_s": 0}]
    for options in wrong:
        with pytest.raises(InvalidOption, match=next(iter(options))):
            ops.copy(MemoryStore(files), target, **options)
    assert {} == target.snapshot()


def test_a_copy_onto_itself_changes_nothing(files: dict[str, bytes], tmp_path: Path) -> None:
    """Source and target are one place: that is the same checkpoint."""
    write_tree(tmp_path, files)
    assert 0 == ops.copy(tmp_path, tmp_path).copied_nbytes
    assert files == read_tree(tmp_path)


def test_storage_that_hangs_ends_the_copy(files: dict[str, bytes]) -> None:
    """A write without an answer is named when `timeout_s` is over, and nothing is published."""
    go_on, inner = threading.Event(), MemoryStore()
    target = FaultStore(inner, [Rule(Verb.WRITE_AT, "data/model/*", do_before(lambda: go_on.wait(60)))])
    try:
        with pytest.raises(StorageStuck, match="write data/model/"):
            ops.copy(MemoryStore(files), target, timeout_s=1)
    finally:
        go_on.set()
    assert manifest_name(1) not in inner.snapshot()


def test_an_interrupt_ends_the_copy(files: dict[str, bytes]) -> None:
    """Ctrl-C is raised once all calls have come back; the next copy goes on from there."""
    inner = MemoryStore()
    rule = Rule(Verb.FINISH, "data/optimizer/*", do_before(lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        ops.copy(MemoryStore(files), FaultStore(inner, [rule]))
    assert manifest_name(1) not in inner.snapshot()
    ops.copy(MemoryStore(files), inner)
    assert files == inner.snapshot()


def test_the_page_shows_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of docs/copy.md runs as it stands."""
    page = (Path(__file__).parents[2] / "docs" / "copy.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert ", 3 files of " in capsys.readouterr().out

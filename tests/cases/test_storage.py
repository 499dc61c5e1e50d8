"""Cases from the field about files, space and names, on one process."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

import pytest
import torch

import anyshard
from anyshard.records.digests import digest_bytes
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, FaultStore, LatencyStore, Rule, Verb, fail


def make_state(fill: float, *, num: int = 4) -> dict[str, object]:
    return {"model": {f"w{i}": torch.full((8, 4), fill + i) for i in range(num)}, "step": int(fill)}


def loaded(place: object, *, num: int = 4) -> tuple[int, float]:
    """Step value and first element of what a place loads."""
    state = make_state(-1.0, num=num)
    anyshard.load(place, state)
    return state["step"], float(state["model"]["w0"][0, 0])


@pytest.mark.parametrize("shape", [(4, 4), (8, 4), (6, 4, 1), (4, 6)])
def test_b002_another_shape_is_an_error_and_changes_nothing(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A template of another shape is refused with both shapes, and keeps its elements."""
    anyshard.save(tmp_path / "a", {"model": {"w": torch.ones(6, 4), "b": torch.ones(2)}})
    live = {"model": {"w": torch.zeros(shape), "b": torch.zeros(2)}}
    with pytest.raises(anyshard.StateMismatch) as caught:
        anyshard.load(tmp_path / "a", live)
    assert [("model/w", str(shape) in str(caught.value), "(6, 4)" in str(caught.value))] == [
        (difference.address, True, True) for difference in caught.value.differences
    ]
    assert 0 == sum(int(tensor.count_nonzero()) for tensor in live["model"].values())


@pytest.mark.parametrize(
    ("verb", "key"),
    [(Verb.WRITE_AT, "data/model/*"), (Verb.FINISH, "data/step/*"), (Verb.CREATE, "index*"), (Verb.CREATE, "manifest*")],
)
def test_b009_b130_failed_overwrite_leaves_the_old_one(verb: Verb, key: str, tmp_path: Path) -> None:
    """An overwrite that fails at any file leaves the old checkpoint whole and removes its own files."""
    anyshard.save(tmp_path / "a", make_state(5.0))
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    broken = FaultStore(LocalStore(str(tmp_path / "a")), [Rule(verb, key, fail(anyshard.StorageError("broken", file=key)))])
    with pytest.raises(anyshard.StorageError):
        anyshard.save(broken, make_state(6.0), overwrite=True)
    assert 1 == len(broken.fired)
    assert (5, 5.0) == loaded(tmp_path / "a")
    assert before == sorted(path.name for path in (tmp_path / "a").rglob("*"))
    anyshard.save(tmp_path / "a", make_state(6.0), overwrite=True)
    assert (6, 6.0) == loaded(tmp_path / "a")


def test_b013_open_checkpoint_survives_an_overwrite(tmp_path: Path) -> None:
    """What was opened reads its own bytes after the step was saved over and the old files are gone."""
    anyshard.save(tmp_path / "a", make_state(5.0))
    old = anyshard.open(tmp_path / "a")
    assert 5.0 == old["model/w0"][0, 0]
    now = anyshard.SaveOptions(overwrite_grace_s=0)
    anyshard.save(tmp_path / "a", make_state(6.0), overwrite=True, options=now)
    assert 8.0 == old["model/w3"][0, 0]
    assert 9.0 == anyshard.open(tmp_path / "a")["model/w3"][0, 0]


def test_b037_reads_are_few_and_partial(tmp_path: Path) -> None:
    """A full load merges reads; loading 3 of 100 tensors reads about their bytes."""
    state = {"model": {f"w{i:03}": torch.full((100, 256), float(i)) for i in range(100)}}
    anyshard.save(tmp_path / "a", state)
    store = CountingStore(LocalStore(str(tmp_path / "a")))
    anyshard.load(store, {"model": {name: torch.zeros(100, 256) for name in state["model"]}})
    whole = store.count(Verb.READ_INTO)
    assert 100 * 100 * 256 * 4 <= whole.nbytes <= 1.05 * 100 * 100 * 256 * 4
    assert whole.calls <= 10
    report = anyshard.load(
        tmp_path / "a", {"model": {name: torch.zeros(100, 256) for name in state["model"]}}, only=["model/w01[0-2]"]
    )
    assert 3 == report.num_tensors
    assert report.read_nbytes <= report.nbytes + 2 * 256 * 1024


def test_b047_requests_grow_with_files_not_tensors() -> None:
    """Five hundred tensors cost a store no more calls than five."""
    calls = []
    for num in (5, 500):
        store = CountingStore(LatencyStore(MemoryStore(), {}, sleep=time.sleep))
        anyshard.save(store, make_state(1.0, num=num))
        calls.append(sum(store.count(verb).calls for verb in Verb))
    assert calls[0] == calls[1]


def test_b053_no_space_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    """ENOSPC in mid-save is StorageFull with the file and errno; nothing is published, nothing is left."""
    full = anyshard.StorageFull("no space", file="data/model", errno=errno.ENOSPC)
    store = FaultStore(LocalStore(str(tmp_path / "a")), [Rule(Verb.WRITE_AT, "data/model/*", fail(full))])
    with pytest.raises(anyshard.StorageFull) as caught:
        anyshard.save(store, make_state(5.0))
    assert errno.ENOSPC == caught.value.errno
    assert [] == [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    with pytest.raises(anyshard.CheckpointNotFound):
        anyshard.open(tmp_path / "a")


def test_b055_too_little_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that says how little room it has gets nothing written."""
    store = MemoryStore()
    monkeypatch.setattr(store, "free_nbytes", lambda: 1000)
    with pytest.raises(anyshard.StorageFull, match="1000 free"):
        anyshard.save(store, make_state(5.0))
    assert {} == store.snapshot()


def test_b064_missing_optimizer_file_is_named(tmp_path: Path) -> None:
    """A deleted optimizer blob is an error that names it, never a fresh start."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    anyshard.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    (blob,) = (tmp_path / "a" / "data" / "optimizer").iterdir()
    blob.unlink()
    with pytest.raises(anyshard.CheckpointDamaged, match=blob.name):
        anyshard.load(tmp_path / "a", {"model": model, "optimizer": optimizer})


def test_b139_unknown_feature_is_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint that requires what this release does not know is UnsupportedFormat with the feature's name."""
    anyshard.save(tmp_path / "a", make_state(5.0))
    manifest = tmp_path / "a" / "manifest-1.json"
    body = manifest.read_bytes().rsplit(b"\n", 2)[0].replace(b'"requires":[]', b'"requires":["codec:brotli"]') + b"\n"
    manifest.write_bytes(body + digest_bytes(body).encode() + b"\n")
    with pytest.raises(anyshard.UnsupportedFormat, match="codec:brotli"):
        anyshard.open(tmp_path / "a")


def test_b141_moved_directory_loads(tmp_path: Path) -> None:
    """A checkpoint holds no absolute path."""
    anyshard.save(tmp_path / "run" / "step_5", make_state(5.0))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (5, 5.0) == loaded(tmp_path / "moved" / "step_5")


def test_b143_copy_to_another_kind_of_store_is_complete(tmp_path: Path) -> None:
    """Files copied from a disk into an object-like store are the same checkpoint there."""
    anyshard.save(tmp_path / "a", make_state(5.0))
    files = {str(path.relative_to(tmp_path / "a")): path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert (5, 5.0) == loaded(MemoryStore(files))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert (5, 5.0) == loaded(tmp_path / "b")

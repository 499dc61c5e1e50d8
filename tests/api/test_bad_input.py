"""Whatever the user gets wrong is a typed error that says what to do, and nothing was changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anyshard
from anyshard.storage.memory import MemoryStore


def state(fill: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 4), fill)}, "step": 3}


def test_path_that_is_a_file(tmp_path: Path) -> None:
    """A file where the directory should be is InvalidPath, and keeps its content."""
    (tmp_path / "a").write_text("mine")
    with pytest.raises(anyshard.InvalidPath):
        anyshard.save(tmp_path / "a", state())
    with pytest.raises(anyshard.InvalidPath):
        anyshard.load(tmp_path / "a", state())
    assert "mine" == (tmp_path / "a").read_text()


def test_arguments_of_a_wrong_type(tmp_path: Path) -> None:
    """An app state that is no mapping, and the options of the other verb, are told apart from what was expected."""
    saving: Any = anyshard.SaveOptions()
    loading: Any = anyshard.LoadOptions()
    nothing: Any = None
    anyshard.save(tmp_path / "a", state())
    for verb, options in ((anyshard.save, loading), (anyshard.load, saving)):
        with pytest.raises(anyshard.InvalidOption, match="options: expected (Save|Load)Options, found (Load|Save)Options"):
            verb(tmp_path / "a", state(), options=options)
        with pytest.raises(anyshard.InvalidAppState, match="expected a mapping from names to objects .* found NoneType"):
            verb(tmp_path / "a", nothing)
    with pytest.raises(anyshard.InvalidOption, match="options: expected LoadOptions, found SaveOptions"):
        anyshard.open(tmp_path / "a", options=saving)


def test_opening_needs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun without init_process_group a save is refused before it touches anything; `open` concerns one process."""
    anyshard.save(tmp_path / "a", state())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(anyshard.InvalidOption, match="call init_process_group first"):
        anyshard.save(tmp_path / "b", state())
    assert 1.0 == anyshard.open(tmp_path / "a")["model/w"][0, 0]
    assert ["a"] == os.listdir(tmp_path)


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    """Saving into and loading from somebody else's directory is NotACheckpoint."""
    (tmp_path / "model.safetensors").write_bytes(b"theirs")
    for verb in (anyshard.save, anyshard.load):
        with pytest.raises(anyshard.NotACheckpoint, match="safetensors"):
            verb(tmp_path, state())
    assert ["model.safetensors"] == os.listdir(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    """A place where nothing is, is CheckpointNotFound, which is a FileNotFoundError; nothing is made there."""
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        anyshard.load(tmp_path / "a", state())
    assert [] == os.listdir(tmp_path)


def test_existing_checkpoint_is_kept(tmp_path: Path) -> None:
    """Saving over a checkpoint needs overwrite=True; without it nothing changes."""
    anyshard.save(tmp_path / "a", state(1.0))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        anyshard.save(tmp_path / "a", state(2.0))
    assert 1.0 == anyshard.open(tmp_path / "a")["model/w"][0, 0]


@pytest.mark.parametrize(
    "value",
    [object(), lambda: None, torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), [torch.zeros(1), object()]],
    ids=["object", "function", "meta", "sparse", "nested"],
)
def test_unsupported_value_writes_nothing(value: object, tmp_path: Path) -> None:
    """A value that cannot be saved is named by its address before anything is written."""
    with pytest.raises(anyshard.AnyshardError, match="extra/thing"):
        anyshard.save(tmp_path / "a", {**state(), "extra": {"thing": value, "t": torch.zeros(1)}})
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    "app_state", [[], {}, {"": 1}, {3: torch.zeros(1)}, None], ids=["list", "empty", "no name", "int name", "none"]
)
def test_app_state_of_another_kind(app_state: Any) -> None:
    """An app state is a mapping from names to something; an empty one saves, the rest is refused before anything is written."""
    store = MemoryStore()
    if app_state == {}:
        anyshard.save(store, app_state)
        assert () == anyshard.open(store).sections
        return
    with pytest.raises(anyshard.AnyshardError):
        anyshard.save(store, app_state)
    assert {} == store.snapshot()


@pytest.mark.parametrize("user", [{"loss": float("nan")}, {"x": object()}, {1: 2}, {"t": (1, 2)}])
def test_user_metadata_that_is_not_json(user: Any) -> None:
    """User metadata that JSON cannot hold is refused before anything is written."""
    store = MemoryStore()
    with pytest.raises(anyshard.AnyshardError, match="user"):
        anyshard.save(store, state(), options=anyshard.SaveOptions(user=user))
    assert {} == store.snapshot()


@pytest.mark.parametrize("step", [-1, 1.5, True, "7"])
def test_step_that_is_no_number(step: Any) -> None:
    """A step is a whole number."""
    with pytest.raises(anyshard.InvalidOption, match="step"):
        anyshard.save(MemoryStore(), state(), step=step)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step_100", 100),
        ("global_step0007", 7),
        ("final", None),
        ("v2/last", None),
        ("0", 0),
        ("a1b", None),
        ("v1.5", None),
        ("step_1e5", None),
        ("run2-step_100", 100),
        ("epoch=3", 3),
    ],
)
def test_step_of_the_path(name: str, expected: int | None, tmp_path: Path) -> None:
    """Without a step the number at the end of the last component counts."""
    assert expected == anyshard.save(tmp_path / name, state()).step


def test_damage_found_before_the_fill_changes_nothing(tmp_path: Path) -> None:
    """With verify="first" a damaged cell leaves every tensor as it was; without it the error says that it did not."""
    anyshard.save(tmp_path / "a", {"model": {"w": torch.ones(2**18)}})
    (blob,) = (tmp_path / "a" / "data" / "model").iterdir()
    data = bytearray(blob.read_bytes())
    data[5000] ^= 1
    blob.write_bytes(data)
    live = {"model": {"w": torch.full((2**18,), 5.0)}}
    with pytest.raises(anyshard.CheckpointDamaged, match="model/w"):
        anyshard.load(tmp_path / "a", live, verify="first")
    assert torch.equal(torch.full((2**18,), 5.0), live["model"]["w"])
    with pytest.raises(anyshard.LoadInterrupted, match="model/w") as caught:
        anyshard.load(tmp_path / "a", live)
    assert ("model/w",) == caught.value.addresses


def test_differences_are_all_listed_and_nothing_changes(tmp_path: Path) -> None:
    """Shape, dtype, missing and unexpected names are one error, found before anything changes."""
    saved = {"m": {"shape": torch.ones(3), "dtype": torch.ones(3), "gone": torch.ones(1), "same": torch.ones(2)}, "n": 1}
    anyshard.save(tmp_path / "a", saved)
    live = {"m": {"shape": torch.zeros(4), "dtype": torch.zeros(3).half(), "new": torch.zeros(1), "same": torch.zeros(2)}, "n": 2}
    with pytest.raises(anyshard.StateMismatch) as caught:
        anyshard.load(tmp_path / "a", live)
    assert {"m/shape", "m/dtype", "m/gone", "m/new"} == {difference.address for difference in caught.value.differences}
    assert 0 == live["m"]["same"].sum()
    assert 2 == live["n"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become nobody")
def test_no_permission(tmp_path: Path) -> None:
    """A directory that may not be written to is StorageDenied, which is a PermissionError."""
    script = (
        "import os, sys, torch, anyshard, anyshard.saving\n"
        "anyshard.save(sys.argv[1] + '/warm', {'a': 1})\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: anyshard.save(sys.argv[1] + '/a', {'a': 1})\n"
        "except PermissionError as error: print(type(error).__name__)\n"
    )
    os.chmod(tmp_path, 0o755)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert "StorageDenied\n" == done.stdout


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 8 MiB. Not below tmp_path: the mount of a killed run would stay, and every later pytest fail to tidy up there."""
    with tempfile.TemporaryDirectory(prefix="anyshard-disk-") as disk:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=False, capture_output=True)
        if mounted.returncode:
            pytest.skip("cannot mount here")
        try:
            yield Path(disk)
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_disk_full(small_disk: Path) -> None:
    """A full disk is StorageFull before a byte is written; the older checkpoint stays."""
    anyshard.save(small_disk / "a", state())
    with pytest.raises(anyshard.StorageFull, match="free"):
        anyshard.save(small_disk / "b", {"big": torch.zeros(4 * 2**20)})
    assert 3 == anyshard.open(small_disk / "a")["step"]
    assert [] == [path for path in (small_disk / "b").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("only", "model/w"),
        ("exclude", "model/w"),
        ("only", [5]),
        ("verify", "First"),
        ("strict", "no"),
        ("cast", 1),
    ],
)
def test_load_argument_of_another_kind_changes_nothing(name: str, value: Any) -> None:
    """A glob that is not in a list, an unknown mode or a truthy flag is refused, not guessed at."""
    store = MemoryStore()
    anyshard.save(store, state(1.0))
    live = state(5.0)
    with pytest.raises(anyshard.InvalidOption, match=name):
        anyshard.load(store, live, **{name: value})
    assert 5.0 == live["model"]["w"][0, 0]


@pytest.mark.parametrize("name", ["byte_budget", "threads", "timeout_s", "overwrite_grace_s", "user"])
@pytest.mark.parametrize("value", [-1, float("nan"), "4", None])
def test_save_option_of_another_kind(name: str, value: Any) -> None:
    """An option that cannot be is refused where it is made, by name."""
    with pytest.raises(anyshard.InvalidOption, match=name):
        anyshard.SaveOptions(**{name: value})


@pytest.mark.parametrize("text", ["abc", "", "0", "-1"])
def test_environment_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with another value than a number above 0 is named."""
    monkeypatch.setenv("ANYSHARD_STORAGE_THREADS", text)
    with pytest.raises(anyshard.InvalidOption, match="ANYSHARD_STORAGE_THREADS"):
        anyshard.SaveOptions()


def test_nothing_is_saved_that_cannot_be_loaded() -> None:
    """Steps, user metadata and names beyond what a reader takes are refused before anything is written."""
    deep: dict[str, Any] = {}
    for _ in range(31):
        deep = {"d": deep}
    store = MemoryStore()
    for wrong in ({"step": 2**62}, {"options": anyshard.SaveOptions(user=deep)}):
        with pytest.raises(anyshard.AnyshardError):
            anyshard.save(store, state(), **wrong)
    for name in ("n" * 70_000, "\ud800"):
        with pytest.raises(anyshard.AnyshardError):
            anyshard.save(store, {name: 1})
    assert {} == store.snapshot()


@pytest.mark.parametrize(
    "place", [Path("s3://bucket/step_1"), Path("file:///x/step_1"), "s3:/b", "file:x", "~nobody-here/x", "d/" * 3000]
)
def test_broken_url_is_no_directory(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL that pathlib has mangled, an unknown user and an endless path are refused, not made into directories."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(anyshard.InvalidPath):
        anyshard.save(place, state())
    assert [] == os.listdir(tmp_path)


def test_deep_state_is_refused() -> None:
    """A state nested beyond the limit is LimitExceeded or UnsupportedValue, whatever Python's stack says."""
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(anyshard.AnyshardError):
        anyshard.save(MemoryStore(), {"deep": deep, "t": {"deep": deep, "x": torch.zeros(1)}})


def test_warnings_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """State of another optimizer loads with a warning, which is in the report and in the log."""
    model, store = torch.nn.Linear(2, 2), MemoryStore()
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    anyshard.save(store, {"optimizer": adam, "model": model})
    caplog.clear()
    report = anyshard.load(store, {"optimizer": torch.optim.SGD(model.parameters(), momentum=0.9), "model": model})
    assert report.warnings
    assert set(report.warnings) == {record.getMessage().removeprefix(f"{report.url}: ") for record in caplog.records}

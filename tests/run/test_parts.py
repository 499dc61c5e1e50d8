"""Steps in parts saved by real worlds, on a directory and on S3; worlds and drivers that die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import anyshard
from anyshard import errors
from anyshard.run.parts import SplitStep, open_parts
from anyshard.run.step_info import Condition
from anyshard.storage.memory import MemoryStore
from anyshard.testing.launch import Launcher
from anyshard.testing.world import Worlds
from tests.run import parts_scripts, run_cases
from tests.run.parts_scenes import ROLES
from tests.run.parts_scripts import Storage, is_part, make_run
from tests.servers import S3Server

ROOT = Path(__file__).parents[2]

MakePlace = Callable[[], tuple[str, Storage]]


@pytest.fixture(params=["directory", "S3"])
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> MakePlace:
    """Makes a new place for runs, with the options to reach it."""
    if request.param == "directory":
        return lambda: (str(tmp_path / "run"), {})
    server: S3Server = request.getfixturevalue("seaweedfs")
    return lambda: (f"s3://{server.make_bucket()}/run", server.options)


def load_part(run: Any, role: str, *, step: int | None = None) -> tuple[int, bool]:
    """Load a part on one rank: of which step, and whether every byte is as it was saved."""
    state = {"model": {"w": torch.zeros(parts_scripts.NUM_WORDS)}, "step": -1}
    report = run.load(state, step=step, role=role)
    assert report.step == state["step"]
    return report.step, is_part(state["model"]["w"], role, report.step)


@pytest.mark.slow
@pytest.mark.parametrize("make_place", ["directory", pytest.param("S3", marks=pytest.mark.long)], indirect=True)
def test_one_of_two_worlds_dies_before_its_part(launch: Launcher, make_place: MakePlace) -> None:
    """The step is not published, the other part loads by name, the step before loads; the restart completes it."""
    place, storage = make_place()
    worlds = [launch(parts_scripts.save_parts, place, storage, role, [0, 100], role == "critic", size=2) for role in ROLES]
    with worlds[0] as actor, worlds[1] as critic:
        ended = [actor.wait(timeout_s=100), critic.wait(timeout_s=100)]
    assert ([0, 0], -signal.SIGKILL) == ([one.exit_code for one in ended[0]], ended[1][0].exit_code), ended
    run = make_run(place, storage)
    assert run.begin(0).commit(ROLES).is_new
    with pytest.raises(anyshard.CheckpointNotFound, match="not all of its parts are there: critic"):
        run.begin(100).commit(ROLES)
    assert [Condition.COMMITTED, Condition.PENDING] == [one.condition for one in run.steps()]
    assert [(0, True)] * 2 == [load_part(run, role) for role in ROLES]
    assert (100, True) == load_part(run, "actor", step=100)
    with pytest.raises(anyshard.CheckpointNotFound):
        load_part(run, "critic", step=100)
    run.close()
    with launch(parts_scripts.go_on, place, storage, "critic", 100, size=3) as critic:  # on other ranks
        values = [one.value for one in critic.wait(timeout_s=100)]
    assert [[0, True]] * 3 == [list(value[:2]) for value in values]
    driver = make_run(place, storage)
    assert ("critic", values[0][2]) == ((found := driver.begin(100).commit(ROLES)).parts[1].name, found.parts[1].attempt)
    assert [(100, True)] * 2 == [load_part(driver, role) for role in ROLES]
    driver.close()


@pytest.mark.slow
def test_a_driver_is_killed_at_each_call(make_place: MakePlace) -> None:
    """The step is published or not, never in part; the next driver makes the same of it. On S3 at some of the calls."""
    place, storage = make_place()
    command = [sys.executable, "-m", "tests.run.parts_scripts", place, json.dumps(dict(storage)), "9" if storage else "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment).stdout
    cases = [json.loads(line) for line in output.splitlines()]
    assert len(cases) > 3
    for case in cases:
        assert ["killed"] == case["end"]
        (seen,) = map(json.loads, case["seen"])
        attempts = case["attempts"]
        assert (seen["before"] in ([[], []], [attempts, attempts]), True, attempts) == (True, seen["same"], seen["after"]), case


@pytest.mark.slow
def test_a_part_is_saved_with_the_settings_of_its_run(worlds: Worlds, tmp_path: Path) -> None:
    """By the group of the run, here one rank of two, and with its options."""
    assert ["x", None] == worlds(2).run(run_cases.save_a_part_alone, str(tmp_path / "run"), timeout_s=60)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/roles.md, copied as it stands, runs in an empty directory, and the errors that it names exist."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/roles.md").read_text(encoding="ascii")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "roles.md", "exec"), found)
    assert (True, 100) == (found["published"].is_new, found["report"].step)
    assert set() == set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) - set(vars(errors))


def make_state(number: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((4,), number)}}


def begin(store: MemoryStore, step: int = 7) -> SplitStep:
    return open_parts(store, step)


def test_two_roles_of_one_world() -> None:
    """They are saved one after the other, in the background or not, and published with metrics."""
    store = MemoryStore()
    part = begin(store)
    pending = part.async_save("actor", make_state(1.0))
    part.save("critic", make_state(2.0))
    pending.committed()
    published = part.commit({"actor", "critic"}, metrics={"loss": 0.5})
    assert (("actor", "critic"), True, 7) == (part.roles(), published.is_new, published.step)
    assert {"metrics": {"loss": 0.5}} == json.loads(store.snapshot()["manifest-1.json"].split(b"\n")[0])["user"]


def test_a_role_is_not_saved_twice_by_mistake() -> None:
    """One process saves a role once, unless it says so; what another one left is replaced without a word."""
    store = MemoryStore()
    part = begin(store)
    part.save("actor", make_state())
    with pytest.raises(anyshard.CheckpointExists):
        part.save("actor", make_state())
    assert [2, 3] == [
        part.save("actor", make_state(), overwrite=True).generation,
        begin(store).save("actor", make_state()).generation,
    ]


def test_the_reports_attempt_says_which_part() -> None:
    """A driver that was told what was saved publishes exactly that."""
    store = MemoryStore()
    part = begin(store)
    attempts = {role: part.save(role, make_state()).attempt for role in ROLES}
    with pytest.raises(anyshard.CheckpointNotFound, match="critic: expected attempt aaaaaaaaaaaaa"):
        part.commit({**attempts, "critic": "a" * 13})
    assert attempts == {entry.name: entry.attempt for entry in part.commit(attempts).parts}


@pytest.mark.parametrize("roles", ["actor", [], {}, ["Actor"], [3], None])
def test_commit_takes_names_of_roles(roles: Any) -> None:
    """Anything else is refused at once."""
    with pytest.raises(anyshard.InvalidOption, match="role"):
        begin(MemoryStore()).commit(roles)


def test_an_option_of_the_save_is_kept() -> None:
    """Options given to the save of a part replace those of the run."""
    store = MemoryStore()
    options = anyshard.SaveOptions(user={"note": "x"})
    open_parts(store, 7, options=options).save("actor", make_state())
    open_parts(store, 7, options=options).save("critic", make_state(), options=anyshard.SaveOptions(user={"note": "y"}))
    records = [json.loads(store.snapshot()[f"parts/{role}/manifest-1.json"].split(b"\n")[0]) for role in ROLES]
    assert [{"note": "x"}, {"note": "y"}] == [record["user"] for record in records]


def test_what_is_published_prints_as_a_line() -> None:
    """Where it is and with which parts."""
    part = begin(MemoryStore(url="memory:run/step_7"))
    part.save("actor", make_state())
    assert str(part.commit(["actor"])).startswith("memory:run/step_7: published with actor, 0.0 MB")

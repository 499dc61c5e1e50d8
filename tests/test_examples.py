"""The examples run, and run again in the same directory: each start goes on where the last one ended. And pages on runs."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import anyshard

EXAMPLES, DOCS = Path(__file__).parents[1] / "examples", Path(__file__).parents[1] / "docs"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
TIMEOUT_S = 240


@contextmanager
def start(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A Python of its own, in a group of its own, of which nothing outlives the `with` block."""
    child = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # before the child is waited for, so the number is still its own
        child.communicate()


def run(*command: object) -> str:
    """What a Python prints that ends well."""
    with start(*command) as child:
        printed, _ = child.communicate(timeout=TIMEOUT_S)
    assert 0 == child.returncode, printed
    return printed


def find_code(page: Path) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def list_kept(place: Path) -> list[int]:
    """Numbers of the good steps of a run."""
    return [step.step for step in anyshard.Run(place).steps() if step.is_good]


def test_the_run_of_the_readme_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its script on a whole run, started twice, finds all done the second time, and keeps what its comment says."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in find_code(DOCS.parent / "README.md") if "anyshard.Run(" in block]
    reports = []
    for _ in range(2):
        found: dict[str, object] = {}
        exec(compile(code, "README.md", "exec"), found)
        reports.append(found["report"])
        assert "[50, 80, 90, 100]\n" == capsys.readouterr().out
    assert [None, 100] == [getattr(report, "step", None) for report in reports]
    assert ("model",) == anyshard.Run("runs/c").steps()[0].sections


def test_the_page_of_retention_says_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/retention.md runs in an empty directory; what it asserts is true, and stays so."""
    monkeypatch.chdir(tmp_path)
    (code,) = find_code(DOCS / "retention.md")
    exec(compile(code, "retention.md", "exec"), {})
    assert [100, 150, 200, 300, 400, 450, 500] == list_kept(Path("runs/a"))


@pytest.mark.parametrize("page", ["retention.md", "preemption.md", "roles.md"])
def test_names_of_pages_are_public(page: str) -> None:
    """Every policy, class and verb of a run that a page names is there."""
    text = (DOCS / page).read_text(encoding="ascii")
    names = set(re.findall(r"anyshard\.([A-Z]\w+)|`(Keep\w+|Protect|WeightsOnly|Preemption|[A-Z]\w+Report)\b", text))
    assert set() == {name for pair in names for name in pair if name} - set(anyshard.__all__)
    assert set() == set(re.findall(r"\brun\.(\w+)\(", text)) - set(dir(anyshard.Run))


def test_the_plain_loop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """examples/plain.py: a second start goes on after the last step of the first, and a third has nothing left to do."""
    printed = []
    for steps in ("40", "100", "100"):
        monkeypatch.setattr("sys.argv", ["plain.py", str(tmp_path), "--steps", steps])
        runpy.run_path(str(EXAMPLES / "plain.py"), run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines()[0])
    assert ["a new run", "going on after step 40", "going on after step 100"] == printed
    assert [60, 80, 100] == list_kept(tmp_path)


@pytest.mark.slow
def test_the_job_on_two_ranks_is_told_to_stop_and_goes_on(tmp_path: Path) -> None:
    """examples/fsdp2.py: after a SIGTERM to torchrun the step of the moment is saved; a start on one goes on right after it."""
    with start(*TORCHRUN, 2, EXAMPLES / "fsdp2.py", tmp_path, "--steps", 1_000_000) as child:
        assert child.stdout is not None
        next(line for line in child.stdout if line.startswith("step 10:"))
        child.send_signal(signal.SIGTERM)
        printed, _ = child.communicate(timeout=TIMEOUT_S)
    (last,) = map(int, re.findall(r"told to stop: step (\d+) is saved", printed))
    assert last == list_kept(tmp_path)[-1]
    again = run(*TORCHRUN, 1, EXAMPLES / "fsdp2.py", tmp_path, "--steps", last // 20 * 20 + 20)
    assert f"going on after step {last}" == again.splitlines()[0]
    assert last // 20 * 20 + 20 == list_kept(tmp_path)[-1]


@pytest.mark.long
def test_two_roles_go_on_after_the_death_of_one(tmp_path: Path) -> None:
    """examples/roles.py: the step in which the critic dies is not published; a second start goes on from the one before."""
    with start(EXAMPLES / "roles.py", tmp_path, "--critic-dies-at", 20) as child:
        printed, _ = child.communicate(timeout=TIMEOUT_S)
    assert (1, [10]) == (child.returncode, list_kept(tmp_path)), printed
    assert "step 20 is not published: critic died" in printed
    assert "going on from step 10" == run(EXAMPLES / "roles.py", tmp_path).splitlines()[0]
    assert [10, 20, 30] == list_kept(tmp_path)

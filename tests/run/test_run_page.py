"""docs/run.md: its example runs, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import anyshard

TEXT = (Path(__file__).parents[2] / "docs/run.md").read_text(encoding="ascii")


def test_the_example_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in the same directory: the second time there is nothing left to train."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    firsts = []
    for _ in range(2):
        found: dict[str, object] = {}
        exec(compile(code, "run.md", "exec"), found)
        firsts.append(found["first"])
    assert [1, 61] == firsts
    assert [30, 40, 50, 60] == [one.step for one in anyshard.Run("runs/a").steps()]


def test_names_exist() -> None:
    """Every class and verb that the page names is public."""
    classes = set(re.findall(r"`([A-Z][A-Za-z]+)\b", TEXT)) | set(re.findall(r"anyshard\.([A-Z]\w+)", TEXT))
    assert set() == classes - set(anyshard.__all__)
    verbs = set(re.findall(r"run\.(\w+)\(", TEXT)) | {"steps", "latest", "open", "pin", "unpin", "prune", "load", "close"}
    assert set() == verbs - set(dir(anyshard.Run))

"""docs/async.md: its example runs, and what it names is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import anyshard
from anyshard import errors, interval, options, pending, reports

TEXT = (Path(__file__).parents[1] / "docs/async.md").read_text(encoding="ascii")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, copied as it stands, runs in an empty directory; its last save is committed and was lazy."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    found: dict[str, object] = {}
    exec(compile(code, "async.md", "exec"), found)
    assert ["step_10", "step_15", "step_20", "step_5"] == sorted(path.name for path in (tmp_path / "runs/a").iterdir())
    report = found["report"]
    assert isinstance(report, anyshard.SaveReport)
    assert report.staging is not None
    assert report.staging.lazy_nbytes > 0


def test_errors_options_and_moments_exist() -> None:
    """Every error, option and method that the page names is one of the code."""
    classes = set(re.findall(r"`([A-Z][A-Za-z]+)`", TEXT))
    known = {name for module in (errors, reports, interval) for name in vars(module)}
    assert set() == classes - known
    methods = set(re.findall(r"`(?:pending\.)?(\w+)\(\)`", TEXT))
    assert {"staged", "durable", "committed", "result", "status"} == methods
    assert set() == methods - set(dir(pending.PendingSave))
    named = set(re.findall(r"`((?:max|exit|byte)_\w+)`", TEXT))
    assert {"max_in_flight", "exit_timeout_s", "byte_budget"} == named
    assert set() == named - {field.name for field in fields(options.SaveOptions)}

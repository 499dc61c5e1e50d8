"""What a type checker must see of the public surface; checked by mypy strict, never run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import anyshard


def check_verbs(url: str, path: Path, app_state: dict[str, Any]) -> None:
    """The verbs take strings, paths and live state, and return records."""
    assert_type(anyshard.save(url, app_state), anyshard.SaveReport)
    assert_type(anyshard.save(path, app_state, step=7, overwrite=True, options=anyshard.SaveOptions()), anyshard.SaveReport)
    assert_type(anyshard.load(url, app_state, only=("model/**",), exclude=["optimizer/**"]), anyshard.LoadReport)
    assert_type(anyshard.load(path, app_state, strict=False, cast=True, verify="first"), anyshard.LoadReport)
    assert_type(anyshard.escape("a*b"), str)


def check_async(url: str, app_state: dict[str, Any]) -> None:
    """A pending save gives the report of a save; a rehearsal has one of its own."""
    pending = anyshard.async_save(url, app_state, options=anyshard.SaveOptions(staging="lazy"))
    assert_type(pending, anyshard.PendingSave)
    assert_type(pending.staged(timeout_s=1.0), None)
    assert_type(pending.committed(), anyshard.SaveReport)
    assert_type(pending.status(), tuple[anyshard.RankStatus, ...])
    layout = anyshard.Layout(mesh={"tp": 2}, shard={"**": {"tp": 0}})
    assert_type(anyshard.prepare(url, app_state, also=[layout]), anyshard.PrepareReport)
    assert_type(anyshard.wait_all(timeout_s=1.0), None)


def check_checkpoint(url: str) -> None:
    """An open checkpoint says what it holds; a leaf may be a tensor or any value."""
    with anyshard.open(url) as checkpoint:
        assert_type(checkpoint, anyshard.Checkpoint)
        assert_type(checkpoint.step, int | None)
        assert_type(checkpoint.addresses(), tuple[str, ...])
        assert_type(checkpoint["model/weight"], Any)
    anyshard.open(url, options=anyshard.LoadOptions(threads=1), sinks=[anyshard.LoggingSink()]).close()


def check_run(url: str, app_state: dict[str, Any]) -> None:
    """A run is a context; policies of both kinds can be joined."""
    keep = (
        anyshard.KeepLast(3) | anyshard.KeepEvery(1000) & anyshard.KeepFor(3600) | anyshard.WeightsOnly(anyshard.KeepEvery(100))
    )
    every = anyshard.EverySteps(100) | anyshard.EveryMinutes(10)
    with anyshard.Run(url, keep=keep, every=every, preemption=anyshard.Preemption(deadline_s=60)) as run:
        assert_type(run, anyshard.Run)
        assert_type(run.restore_or_init(app_state), anyshard.LoadReport | None)
        assert_type(run.end_step(1, app_state, metrics={"loss": 0.5}), anyshard.PendingSave | None)
        assert_type(run.should_stop, bool)
        assert_type(run.save(2, app_state), anyshard.SaveReport)
        assert_type(run.async_save(3, app_state), anyshard.PendingSave)
        assert_type(run.load(app_state, step=2), anyshard.LoadReport)
        assert_type(run.steps(), tuple[anyshard.StepInfo, ...])
        assert_type(run.latest(), anyshard.StepInfo | None)
        assert_type(run.prune(dry_run=True), anyshard.PruneReport)
        assert_type(run.begin(4), anyshard.SplitStep)


def check_misspelling() -> None:
    """A name that is not there is an error before the program runs."""
    anyshard.restore  # type: ignore[attr-defined]  # noqa: B018 - looking it up is the point


class CountingSink:
    """A sink is whatever has `emit`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def emit(self, event: anyshard.Event) -> None:
        """Take one event."""
        self.names.append(event.name)


def check_sinks(url: str, app_state: Mapping[str, Any]) -> None:
    """Sinks of ours and of the user's are taken alike."""
    anyshard.save(url, app_state, sinks=[CountingSink(), anyshard.LoggingSink()])


def check_errors(error: anyshard.StateMismatch) -> None:
    """An error is the fitting built-in as well, and carries what it knows."""
    assert_type(error.differences, tuple[anyshard.Difference, ...])
    builtin: ValueError = error
    assert_type(error.differences[0].kind, anyshard.Mismatch)
    del builtin

"""Saves of a run that are under way: how long they are waited for, and who hears of their failures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from anyshard.errors import StillPending
from anyshard.pending import PendingSave
from anyshard.run import in_flight
from anyshard.run.in_flight import InFlight


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait for a save was, on a clock that only such waits advance; none of them ends."""
    waited: list[float] = []

    def wait(self: PendingSave, timeout_s: float | None = None) -> bool:
        del self
        waited.append(timeout_s or 0.0)
        return False

    monkeypatch.setattr(PendingSave, "wait_ended", wait)
    monkeypatch.setattr(in_flight, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    return waited


def make_stuck() -> InFlight:
    saves = InFlight()
    for step in (1, 2, 3):
        saves.add(step, PendingSave(f"memory:/step_{step}", step))
    return saves


def test_saves_that_are_stuck_share_one_deadline(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """However many there are, the last save of the run is not kept waiting for longer; each is told in the log."""
    assert not make_stuck().settle(1.0)
    assert [1.0, 0.0, 0.0] == waits
    assert 3 == sum("before the last save of the run" in record.getMessage() for record in caplog.records)


def test_the_end_of_a_run_waits_for_all_within_one_deadline(waits: list[float]) -> None:
    """And says that the first of them goes on."""
    with pytest.raises(StillPending, match="step_1"):
        make_stuck().finish(1.0)
    assert [1.0, 0.0, 0.0] == waits

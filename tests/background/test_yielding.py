"""Threads of a save in the background leave running cores to those that train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import anyshard


class PolicySink:
    """Notes by which rule the threads run that write."""

    def __init__(self) -> None:
        self.policies: set[int] = set()

    def emit(self, event: anyshard.Event) -> None:
        """Take one event."""
        if event.name == "save.block.written":
            self.policies.add(os.sched_getscheduler(0))


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the rule")
def test_who_writes_in_the_background_takes_no_running_core(tmp_path: Path) -> None:
    """All threads of an asynchronous save run by the rule for batches; those of a blocking save, and this one, do not."""
    state, sinks = {"x": torch.ones(1 << 20)}, (PolicySink(), PolicySink())
    anyshard.async_save(tmp_path / "step_1", state, sinks=[sinks[0]]).committed(60)
    anyshard.save(tmp_path / "step_2", state, sinks=[sinks[1]])
    assert ({os.SCHED_BATCH}, {os.SCHED_OTHER}) == (sinks[0].policies, sinks[1].policies)
    assert os.SCHED_OTHER == os.sched_getscheduler(0)

"""What a process keeps between calls: one that waits for its group holds up nobody else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import anyshard
from anyshard.checkpointer import Checkpointer
from anyshard.coord import torch_dist
from anyshard.coord.group import Group, make_lone_group
from anyshard.records.values import ValueRegistry

LONG_S = 30.0


def test_others_go_on_while_a_group_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's store may be slow to answer the first save of a group; whoever opens a checkpoint meanwhile does not wait."""
    state, checkpointer = {"model": {"w": torch.ones(3)}}, Checkpointer(registry=ValueRegistry())
    anyshard.save(tmp_path / "step_1", state)
    is_asked, answered = threading.Event(), threading.Event()

    def make_group(*_: object, **__: object) -> Group:
        is_asked.set()
        answered.wait(LONG_S)
        return make_lone_group()

    monkeypatch.setattr(torch_dist, "make_group", make_group)
    options = {"group": None, "options": anyshard.LoadOptions(), "sinks": ()}
    loading = threading.Thread(target=checkpointer.load, args=(tmp_path / "step_1", state), kwargs=options)
    loading.start()
    assert is_asked.wait(LONG_S)
    opening = threading.Thread(target=lambda: checkpointer.open(tmp_path / "step_1", options=anyshard.LoadOptions(), sinks=()))
    opening.start()
    opening.join(LONG_S / 3)
    has_opened = not opening.is_alive()
    answered.set()
    loading.join(LONG_S)
    assert has_opened

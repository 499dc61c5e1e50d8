"""Errors of one rank before the ranks agree (what it was called with) end the call on all ranks, at once and alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import anyshard
from anyshard.testing.world import Worlds
from tests.ranks.refusal_cases import IMPATIENT, tell

pytestmark = pytest.mark.slow

SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "a path of no kind": ("InvalidPath", {"place": None}),
    "an unknown scheme": ("InvalidPath", {"place": "s4://bucket/run"}),
    "a NUL in the path": ("InvalidPath", {"place": "/tmp/a\0b"}),
    "a step that is text": ("InvalidOption", {"step": "7"}),
    "a negative step": ("InvalidOption", {"step": -1}),
    "sinks that are a number": ("TypeError", {"sinks": 3}),
    "options of no kind": ("InvalidOption", {"options": 7}),
    "a state that is a list": ("InvalidAppState", {"app_state": [1]}),
}
LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "a path of no kind": ("InvalidPath", {"place": None}),
    "globs that are text": ("InvalidOption", {"only": "model/**"}),
    "options of a save": ("InvalidOption", {"options": IMPATIENT}),
    "no state": ("InvalidAppState", {"app_state": None}),
}


def call_with(place: str, verb: str, name: str, faulty: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Call a verb with arguments that are wrong on one rank, then rightly; how both calls end."""
    act: Callable[..., object] = anyshard.save if verb == "save" else anyshard.load
    wrong = (SAVES if verb == "save" else LOADS)[name][1] if dist.get_rank() == faulty else {}
    right = {"place": place, "app_state": {"model": {"w": torch.ones(3)}}}
    return tell(lambda: act(**{**right, **wrong})), tell(lambda: act(**right))


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("name", SAVES)
def test_a_save_that_one_rank_calls_wrongly(worlds: Worlds, tmp_path: Path, name: str, faulty: int) -> None:
    """All raise the error of that rank, although some could not know the path, and the next save works."""
    for (kind, text), after in worlds(2).run(call_with, str(tmp_path / "step_1"), "save", name, faulty):
        expected = SAVES[name][0]
        phase = "adapt" if "app_state" in SAVES[name][1] else "call"
        assert ("OperationFailed" if expected == "TypeError" else expected) == kind
        assert f"was given up on all 2 ranks:\n  rank {faulty}: {phase}: {expected}: " in text
        assert ("none", "") == after


@pytest.mark.parametrize("name", LOADS)
def test_a_load_that_one_rank_calls_wrongly(worlds: Worlds, tmp_path: Path, name: str) -> None:
    """So it is with a load; what is wrong with its state is found before the checkpoint is read."""
    anyshard.save(tmp_path / "step_1", {"model": {"w": torch.zeros(3)}})
    for (kind, text), after in worlds(2).run(call_with, str(tmp_path / "step_1"), "load", name, 1):
        assert (LOADS[name][0], ("none", "")) == (kind, after)
        assert f"the call was given up on all 2 ranks:\n  rank 1: call: {LOADS[name][0]}: " in text

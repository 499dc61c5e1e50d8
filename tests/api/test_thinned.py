"""Loads of a step that was thinned to weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import anyshard
from anyshard.commit.thinning import thin_step
from anyshard.storage.local import LocalStore


def make_state(seed: int) -> dict[str, object]:
    """A model and an optimizer that has state."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def thinned(tmp_path: Path) -> str:
    """The place of a step of which only the model is left."""
    place = str(tmp_path / "step_1")
    anyshard.save(place, make_state(1))
    thin_step(LocalStore(tmp_path / "step_1"), ["model"])
    return place


def test_weights_load_and_what_is_gone_is_named(thinned: str) -> None:
    """The model comes back as it was; a load of the whole state says since when the optimizer is gone, and changes nothing."""
    expected, state, untouched = make_state(1), make_state(2), make_state(2)
    with pytest.raises(anyshard.StateMismatch, match=r"thinned to model: optimizer is gone since 20.*load another step"):
        anyshard.load(thinned, state)
    assert all(map(torch.equal, untouched["model"].parameters(), state["model"].parameters()))  # type: ignore[attr-defined]
    anyshard.load(thinned, {"model": state["model"]})
    assert all(map(torch.equal, expected["model"].parameters(), state["model"].parameters()))  # type: ignore[attr-defined]


def test_a_load_that_is_not_strict_warns_of_what_is_gone(thinned: str) -> None:
    """With `strict=False` the report says what is gone."""
    report = anyshard.load(thinned, make_state(2), strict=False)
    assert ["optimizer is gone since"] == [
        "optimizer is gone since" for text in report.warnings if "optimizer is gone since" in text
    ]

"""Scenes of saves from a GPU: jobs whose state lies there, and copies that come late."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn

from anyshard.engine import stage as stage_module
from tests.background.scenes import State, contents, finish_all, gated, saved_now

__all__ = ["DEVICE", "LATE_CYCLES", "State", "contents", "finish_all", "gated", "make_late", "make_state", "saved_now", "train"]

DEVICE: Final = "cuda"
WIDTH: Final = 512  # a weight has 1 MiB
LATE_CYCLES: Final = 1_000_000_000  # half a second of a GPU at 2 GHz: long beside all that the tests do meanwhile

STEPS: Final[dict[str, dict[str, Any]]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "capturable": {"foreach": True, "capturable": True},
}


def make_state(how: str = "foreach", *, width: int = WIDTH) -> State:
    """A job that has made a step: two layers and an optimizer that makes its steps in one of torch's ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **STEPS[how])
    state: State = {"model": model, "optimizer": optimizer}
    train(state)
    return state


def train(state: State) -> None:
    """One more step, without waiting for the device."""
    weight = state["model"][0].weight
    state["optimizer"].zero_grad()
    state["model"](torch.ones(4, weight.shape[1], device=weight.device)).square().mean().backward()
    state["optimizer"].step()


def make_late(patch: pytest.MonkeyPatch) -> None:
    """Hold lazy copies on their stream, so that whatever is enqueued after the call comes before them."""
    remember: Callable[[Any], Any] = stage_module._DeviceRows.remember

    def hold(rows: Any) -> Any:
        found = remember(rows)
        with rows._stream._stream:
            torch.cuda._sleep(LATE_CYCLES)
        return found

    patch.setattr(stage_module._DeviceRows, "remember", hold)


def count_allocated() -> int:
    """Bytes of the device's memory that tensors have, once cycles are collected."""
    gc.collect()
    return torch.cuda.memory_allocated()

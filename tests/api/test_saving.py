"""What a save checks of itself before it commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import anyshard
from anyshard import snapshot
from anyshard.storage.memory import MemoryStore


@pytest.mark.parametrize(
    "change",
    [{"rank": 1}, {"name": "data/model/0.1-1-aaaaaaaaaaaaa.bin"}, None],
    ids=["another rank", "another blob", "none at all"],
)
def test_blobs_that_are_not_those_of_the_plan(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any] | None) -> None:
    """What a rank says that it has written is compared with the plan; nothing is committed, and the error names the blobs."""
    write_blobs, store = snapshot.write_blobs, MemoryStore()

    def write(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        blobs = write_blobs(*args, **kwargs)
        return () if change is None else tuple(replace(blob, **change) for blob in blobs)

    monkeypatch.setattr(snapshot, "write_blobs", write)
    with pytest.raises(anyshard.UnsupportedFormat, match="expected those of the plan, found .* data/model/0.0-1-.*same release"):
        anyshard.save(store, {"model": {"w": torch.ones(3)}})
    assert {} == store.snapshot()

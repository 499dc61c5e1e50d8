"""Values that need care: marks of another checkpoint, and torch objects that cannot be made here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyshard.errors import UnsupportedValue
from anyshard.records.values import TensorMark, Unregistered
from tests.adapters.roundtrip import give, keep


def test_a_mark_in_the_app_state_is_refused() -> None:
    """A tree from `Checkpoint.values` holds marks for its tensors; saved as they are they would point nowhere."""
    for extra, address in (({"a": [TensorMark("model/w", "tensor")]}, "extra/a/0"), (TensorMark("model/w", "bytes"), "extra")):
        with pytest.raises(UnsupportedValue, match=f"^{address}: .*checkpoint\\['model/w'\\]") as caught:
            keep({"extra": extra})
        assert address == caught.value.address


def test_values_that_this_torch_cannot_make_do_not_end_a_load() -> None:
    """A dtype that this torch lacks and a generator of an absent device are kept whole, with a warning or left out."""
    lost = {"dtype": Unregistered("torch.dtype", "float1", b""), "rng": Unregistered("torch.Generator", {"device": "no"}, b"")}
    kept = keep({"extra": lost, "x": torch.ones(2)})
    live: dict[str, Any] = {"extra": {}, "x": torch.zeros(2)}
    assert () == give(kept, live, exclude=["extra/**", "extra"]).warnings
    assert ({}, 2.0) == (live["extra"], live["x"].sum().item())
    (warning,) = give(kept, live).warnings
    assert "extra: holds a value of a type that is not registered here" in warning
    assert ["torch.dtype", "torch.Generator"] == [value.name for value in live["extra"].values()]

"""Handles: a range of a source is a source."""

from __future__ import annotations

import numpy as np
import pytest

from anyshard.records.handles import ArraySource, RangeSource


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_range_yields_its_bytes(is_transposed: bool) -> None:
    """Positions count from the start of the range, whatever the strides of the array behind it."""
    bits = np.arange(24, dtype="<u4").reshape(4, 6)
    bits = bits.T if is_transposed else bits
    expected = np.ascontiguousarray(bits).tobytes()[8:48]
    source = RangeSource(ArraySource(bits), 8, 40)
    out = bytearray(source.nbytes)
    source.read_into(0, memoryview(out)[:12])
    source.read_into(12, memoryview(out)[12:])
    assert (40, expected) == (source.nbytes, bytes(out))


@pytest.mark.parametrize(("start", "nbytes"), [(-4, 8), (0, 100), (92, 8), (8, -4)])
def test_a_range_lies_within_its_source(start: int, nbytes: int) -> None:
    """A range that is not part of the source is refused when it is made."""
    with pytest.raises(ValueError, match="expected a range of a source of 96 bytes"):
        RangeSource(ArraySource(np.zeros(24, dtype="<u4")), start, nbytes)

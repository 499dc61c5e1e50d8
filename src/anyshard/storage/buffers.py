"""Buffers as runs of bytes."""

from __future__ import annotations


def flat_bytes(buffer: memoryview) -> memoryview:
    """The same memory as single bytes in one dimension; a buffer that is not contiguous is a `TypeError`."""
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())  # cast refuses zeros in a shape

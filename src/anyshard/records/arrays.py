"""Logical dtypes as NumPy dtypes, for reading a checkpoint without torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import BITS_DTYPES

_PLAIN = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split()
_EXTENDED = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a dtype name; a type that NumPy and ml_dtypes lack comes as its raw bits (an unsigned integer)."""
    if name in _PLAIN:
        return np.dtype(name)
    if name in _EXTENDED:
        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extended
    return BITS_DTYPES[find_dtype(name).itemsize]

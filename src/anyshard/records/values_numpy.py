"""NumPy scalars and arrays as payloads of the value codec: a dtype name, lengths, and dense little-endian elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.records.arrays import numpy_dtype

_NAMES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128 "
    "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
NUMPY_DTYPES = {name: numpy_dtype(name) for name in _NAMES.split()}
SCALAR_TYPES = frozenset(dtype.type for dtype in NUMPY_DTYPES.values())
MAX_NDIM = 32


def name_numpy_dtype(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy dtype that values may have; raises `ValueError` for object, structured, text and foreign byte order."""
    if NUMPY_DTYPES.get(dtype.name) == dtype:
        return dtype.name
    raise ValueError(f"expected a numeric numpy dtype in native byte order, found {dtype!r}; convert the array with astype")


def is_numpy_scalar(value: object) -> bool:
    """Whether a value is exactly of one of NumPy's scalar types, not of a subclass."""
    return isinstance(value, np.generic) and type(value) is value.dtype.type


def take_scalar(value: np.generic) -> tuple[str, bytes]:
    """The payload of a NumPy scalar: dtype name and bytes."""
    return name_numpy_dtype(value.dtype), _to_bytes(np.asarray(value))


def take_array(value: NDArray[Any]) -> tuple[str, list[int], bytes]:
    """The payload of a NumPy array: dtype name, lengths and the elements in C order."""
    name = name_numpy_dtype(value.dtype)
    if value.ndim > MAX_NDIM:
        raise ValueError(f"expected at most {MAX_NDIM} dims, found {value.ndim}; reshape the array")
    return name, list(value.shape), _to_bytes(value)


def make_scalar(name: str, data: bytes) -> np.generic:
    """The NumPy scalar of a payload; raises `ValueError` where it is not well formed."""
    scalar: Any = make_array(name, [], data)[()]
    return scalar  # type: ignore[no-any-return]


def make_array(name: str, shape: list[int], data: bytes) -> NDArray[Any]:
    """The NumPy array of a payload, writable; raises `ValueError` where it is not well formed."""
    dtype = NUMPY_DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"expected the name of a numeric dtype, found {name[:40]!r}")
    if len(shape) > MAX_NDIM or any(type(length) is not int or not 0 <= length < 2**63 for length in shape):
        raise ValueError(f"expected at most {MAX_NDIM} lengths of at least 0, found {len(shape)} items")
    # math.prod has no overflow; NumPy's product of two lengths of 2^32 is 0.
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"expected {math.prod(shape) * dtype.itemsize} bytes for the shape, found {len(data)}")
    if name == "bool" and data.translate(None, b"\0\1"):
        raise ValueError("expected bools to be 0 or 1, found another byte")
    return np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def _to_bytes(array: NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

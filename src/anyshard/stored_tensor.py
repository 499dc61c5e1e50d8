"""A logical tensor of an open checkpoint: shape and dtype at once, bytes when they are asked for, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from numpy.typing import DTypeLike, NDArray

from anyshard.records.addresses import show
from anyshard.records.arrays import numpy_dtype
from anyshard.records.tables import NOT_AN_ALIAS, TensorTable

# Takes the row of a stored tensor, offsets and lengths, and gives the region's bits.
ReadBits: TypeAlias = Callable[[int, tuple[int, ...], tuple[int, ...]], NDArray[Any]]


class StoredTensor:
    """One logical tensor. Indexing reads, verified, only the bytes between the first and last index of each dim."""

    def __init__(self, tensors: TensorTable, row: int, *, read_bits: ReadBits) -> None:
        self._tensors = tensors
        self._row = row
        self._read_bits = read_bits

    @property
    def address(self) -> str:
        """Where it is in the checkpoint."""
        return self._tensors.addresses[self._row]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._tensors.shape(self._row)

    @property
    def dtype(self) -> str:
        """Name of the element type, torch's without `torch.`."""
        return self._tensors.dtypes[self._row]

    @property
    def tied_to(self) -> str | None:
        """The address whose bytes it shares, if it is a tied name."""
        alias_of = int(self._tensors.alias_of[self._row])
        return None if alias_of == NOT_AN_ALIAS else self._tensors.addresses[alias_of]

    def numpy(self) -> NDArray[Any]:
        """All of it as a NumPy array (bfloat16 and float8 by ml_dtypes; types that both lack as raw bits)."""
        return self._typed(self.bits())

    def bits(self, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> NDArray[Any]:
        """The raw bits of a region (default: all), as unsigned integers (complex128 for 16 bytes)."""
        alias_of = int(self._tensors.alias_of[self._row])
        row = self._row if alias_of == NOT_AN_ALIAS else alias_of
        whole = (0,) * len(self.shape) if offsets is None else tuple(offsets)
        return self._read_bits(row, whole, self.shape if lengths is None else tuple(lengths))

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """A part of it, by integers, slices and `...`."""
        bounds = [_bound(one, size) for one, size in zip(_expand(key, len(self.shape)), self.shape, strict=True)]
        bits = self.bits([low for low, _, _ in bounds], [length for _, length, _ in bounds])
        part: NDArray[Any] = self._typed(bits)[tuple(pick for _, _, pick in bounds)]
        return part

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001 - NumPy's protocol
        if copy is False:
            raise ValueError("a stored tensor has no array to share: its bytes are read for each caller")
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"<StoredTensor {show(self.address)} {self.dtype}{list(self.shape)}>"

    def _typed(self, bits: NDArray[Any]) -> NDArray[Any]:
        typed: NDArray[Any] = bits.view(numpy_dtype(self.dtype))
        return typed


def _expand(key: Any, ndim: int) -> list[Any]:
    """One index per dim."""
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = [at for at, one in enumerate(keys) if one is Ellipsis]
    if ellipses:
        keys[ellipses[0] : ellipses[0] + 1] = [slice(None)] * (ndim - len(keys) + 1)
    if len(keys) > ndim or len(ellipses) > 1:
        raise IndexError(f"expected at most {ndim} indices and one ellipsis, found {key!r}")
    return keys + [slice(None)] * (ndim - len(keys))


def _bound(key: Any, size: int) -> tuple[int, int, Any]:
    """First element, number of elements to read, and what to pick of those, for one dim."""
    if isinstance(key, slice):
        picked = range(*key.indices(size))
        if not picked:
            return 0, 0, slice(None)
        low, high = min(picked[0], picked[-1]), max(picked[0], picked[-1])
        return low, high - low + 1, slice(None, None, picked.step)
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise IndexError(f"expected integers, slices and an ellipsis, found {key!r}")
    at = key.__index__()
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of range for a dim of {size}")
    return at % size, 1, 0

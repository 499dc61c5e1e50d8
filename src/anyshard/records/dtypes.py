"""The closed table of element types that a checkpoint may hold.

Stored bytes are the elements in C order, little-endian, dense; complex numbers are (re, im). A stored element may carry
several values (`float4_e2m1fn_x2`: shapes count bytes). A reader that does not know a name can list, verify and copy it.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyshard.errors import UnsupportedFormat


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: its name (torch's, without `torch.`) and bytes per stored element."""

    name: str
    itemsize: int


_NAMES_BY_SIZE = {
    1: (
        "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
        "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
    ),
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}

DTYPES = {name: Dtype(name, size) for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
DTYPES["float4_e2m1fn_x2"] = Dtype("float4_e2m1fn_x2", 1)


def find_dtype(name: str) -> Dtype:
    """The entry for a dtype name, or an error that says the checkpoint needs a newer release."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedFormat(f"unknown dtype {name!r}: this release knows {', '.join(sorted(DTYPES))}") from None

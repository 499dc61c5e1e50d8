"""What the golden checkpoints of format version 1 hold. Never change it: add further goldens instead."""

from __future__ import annotations

import collections
import datetime
import pathlib

import numpy as np
import torch

TYPES = (
    "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
    "complex64 complex128 bool"
).split()


def fill(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """A tensor of a counter's bit pattern, times an odd constant, plus a seed: no two bytes alike for long."""
    kind = getattr(torch, dtype)
    nbytes = int(np.prod(shape)) * torch.empty(0, dtype=kind).element_size()
    raw = (np.arange(nbytes, dtype=np.uint64) * 2654435761 + seed) >> 8
    data = torch.from_numpy(raw.astype(np.uint8) & (1 if dtype == "bool" else 0xFF))
    return data.view(kind).reshape(shape) if nbytes else torch.empty(shape, dtype=kind)


def make_tensors() -> dict[str, object]:
    """Every dtype, ties, views, empty and 0-d tensors, a name that needs escapes, an array stored as an extent."""
    weight = fill((7, 5), "float32", 1)
    return {
        **{dtype: fill((3, 4), dtype, 10 + i) for i, dtype in enumerate(TYPES)},
        "weight": weight,
        "zz_tied": weight,
        "aa_tied": weight,
        "transposed": fill((6, 4), "float32", 2).t(),
        "scalar": fill((), "float32", 3),
        "empty": fill((0, 4), "float32", 4),
        "empty_inside": fill((3, 0), "bfloat16", 4),
        "a/b~c": fill((2, 2), "int32", 5),
        "large": fill((300, 257), "float32", 6),
        "array": np.arange(20000, dtype=np.int64),
        "list": [fill((2,), "uint8", 7), 5],
        1: fill((2,), "uint8", 8),
        "1": fill((2,), "uint8", 9),
    }


def make_values() -> dict[str, object]:
    """Every kind of value."""
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**63, -(2**63), 2**64 - 1, 2**100, -(2**100)],
        "floats": [0.5, -0.0, float("inf"), 1e-310],
        "complex": 1 + 2j,
        "text": "gr\u00fc\u00dfe",
        "bytes": b"\x00\xff",
        "tuple": (1, (2, "x")),
        "set": {3, 1, 2},
        "frozenset": frozenset({"b", "a"}),
        "keys": {1: "int", "1": "str", None: "none", (1, 2): "tuple", 0.5: "float"},
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({3: 2, 7: 1}),
        "defaultdict": collections.defaultdict(list, {"a": [1]}),
        "deque": collections.deque([1, 2], maxlen=5),
        "range": range(1, 10, 3),
        "slice": slice(1, None, 2),
        "bytearray": bytearray(b"ab"),
        "path": pathlib.PurePosixPath("runs/a"),
        "scalar": np.float32(1.5),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "datetime": datetime.datetime(2026, 11, 29, 12, 30, 1, 5, tzinfo=datetime.UTC),
        "timedelta": datetime.timedelta(days=-1, seconds=5),
    }


def make_state(seed: int = 0) -> dict[str, object]:
    """The app state of most goldens."""
    return {"tensors": make_tensors(), "values": make_values(), "step": 100 + seed, "marker": fill((9,), "int64", 100 + seed)}


ROLES = {"actor": 1, "critic": 2}


def make_role(seed: int) -> dict[str, object]:
    """The app state of one part of the golden in parts."""
    return {"model": {"weight": fill((4, 3), "float32", 50 + seed)}, "step": seed}

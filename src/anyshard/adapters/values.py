"""How small torch objects are stored as values: dtypes, sizes, devices, random generators."""

from __future__ import annotations

from typing import Any

import torch

from anyshard.adapters.tensors import dtype_name
from anyshard.records.values import RegisteredType


def torch_types() -> tuple[RegisteredType, ...]:
    """The entries that a registry is extended with so that it knows torch's dtypes, sizes, devices and generators too."""
    return (
        RegisteredType("torch.dtype", torch.dtype, dtype_name, _find_dtype),
        RegisteredType("torch.Size", torch.Size, list, torch.Size),
        RegisteredType("torch.device", torch.device, str, torch.device),
        RegisteredType("torch.Generator", torch.Generator, _take_generator, _make_generator),
    )


def _find_dtype(name: str) -> torch.dtype:
    # Any dtype may stand in a value, also one whose tensors cannot be stored. Only names of dtypes are looked at.
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"this torch has no dtype {name!r}")


def _take_generator(generator: torch.Generator) -> dict[str, object]:
    return {"device": str(generator.device), "state": generator.get_state().numpy().tobytes()}


def _make_generator(fields: Any) -> torch.Generator:
    generator = torch.Generator(device=fields["device"])
    generator.set_state(torch.frombuffer(bytearray(fields["state"]), dtype=torch.uint8))
    return generator

"""A checkpoint in a dict: adapters, the value codec and plain bytes, without plans, engine or storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyshard.adapters.capture import capture
from anyshard.adapters.target import LoadTarget, plan_load
from anyshard.adapters.values import torch_types
from anyshard.options import LoadOptions
from anyshard.records.captured import Stored, StoredRun
from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import BITS_DTYPES, Destination
from anyshard.records.tables import TensorTable
from anyshard.records.values import ValueRegistry, decode_value, encode_value

REGISTRY = ValueRegistry().extended(torch_types())


@dataclass(frozen=True, slots=True)
class Kept:
    """What a checkpoint would hold."""

    tensors: TensorTable
    data: Mapping[str, bytes]
    values: Mapping[str, bytes]
    warnings: tuple[str, ...]

    @property
    def trees(self) -> dict[str, Any]:
        """The decoded value trees."""
        return {name: decode_value(data, registry=REGISTRY, file=name) for name, data in self.values.items()}


def keep(app_state: Mapping[str, object]) -> Kept:
    """Save an app state, reading each source in two parts."""
    captured = capture(app_state, registry=REGISTRY)
    tensors = captured.shards.tensors
    addresses = [tensors.addresses[row] for row in captured.shards.tensor]
    data = {}
    for address, row, source in zip(addresses, captured.shards.tensor, captured.sources, strict=True):
        itemsize = find_dtype(tensors.dtypes[row]).itemsize
        whole = bytearray(source.nbytes)
        middle = source.nbytes // itemsize // 2 * itemsize
        for start, stop in ((0, middle), (middle, source.nbytes)):
            if stop > start:
                source.read_into(start, memoryview(whole)[start:stop])
        data[address] = bytes(whole)
    values = {name: encode_value(tree, address=name, registry=REGISTRY) for name, tree in captured.trees.items()}
    return Kept(tensors, data, values, captured.warnings)


def plan(kept: Kept, app_state: Mapping[str, object], **options: Any) -> LoadTarget:
    """Plan a load of what was kept."""
    trees = kept.trees
    asked = {name: tree for name, tree in trees.items() if name in app_state}
    stored = Stored(kept.tensors, asked, tuple(trees))
    return plan_load(app_state, stored, options=LoadOptions(**options), registry=REGISTRY, checkpoint="kept")


def give(kept: Kept, app_state: Mapping[str, object], **options: Any) -> LoadTarget:
    """Load what was kept; ties are compared as the caller of the adapters has to."""
    target = plan(kept, app_state, **options)
    for one, other in target.ties:
        assert _read_run(kept, one) == _read_run(kept, other), f"{one.address} and {other.address} differ"
    for row, destination in enumerate(target.destinations):
        tensor = int(target.wanted.tensor[row])
        address = target.wanted.tensors.addresses[tensor]
        _fill(destination, kept.data[address], target.wanted.tensors, tensor)
    target.apply()
    return target


def _read_run(kept: Kept, run: StoredRun) -> bytes:
    row = kept.tensors.rows[run.address]
    bits = np.frombuffer(kept.data[run.address], dtype=BITS_DTYPES[find_dtype(kept.tensors.dtypes[row]).itemsize])
    return bits.reshape(kept.tensors.shape(row)).transpose(run.dims).reshape(-1)[run.start : run.stop].tobytes()


def _fill(destination: Destination, data: bytes, tensors: TensorTable, tensor: int) -> None:
    memory = destination.memory()
    if memory is not None:
        memory[:] = data
        return
    shape = tensors.shape(tensor)
    bits = np.frombuffer(data, dtype=BITS_DTYPES[find_dtype(tensors.dtypes[tensor]).itemsize]).reshape(shape)
    destination.place(tuple(slice(0, n) for n in shape), bits)

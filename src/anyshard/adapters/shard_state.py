"""Optimizer state that belongs to one shard of a parameter and not to the whole: it loads onto an equal shard only."""

from __future__ import annotations

from functools import partial
from typing import Final, TypeGuard

import torch

from anyshard.adapters.intake import Intake
from anyshard.adapters.optimizers import is_per_shard, shard_key
from anyshard.adapters.placements import is_sharded
from anyshard.adapters.recognise import holds
from anyshard.adapters.tensors import is_dtensor
from anyshard.records.addresses import component, join_address
from anyshard.records.values import collect_marks

# Stands for state of which this rank has nothing: no shard, or none like the stored ones.
NO_SHARD: Final = object()


def take_shards(node: object, live: object, param: torch.Tensor, *, address: str, intake: Intake) -> object:
    """The stored state of a parameter with what belongs to this rank's shard in place of what was stored shard by shard.

    Where that is nothing, `NO_SHARD` stands, and a difference is recorded unless this rank has no part of the parameter.
    """
    if not isinstance(node, dict) or _is_by_shard(node):
        return _take_shard(node, live, param, address=address, intake=intake)
    entries = live if isinstance(live, dict) else {}
    places = {name: join_address(address, component(name, within=address)) for name in node}
    return {
        name: _take_shard(entry, entries.get(name), param, address=places[name], intake=intake) for name, entry in node.items()
    }


def _take_shard(node: object, live: object, param: torch.Tensor, *, address: str, intake: Intake) -> object:
    if not _is_by_shard(node):
        if not _is_for_shard(node, live, param, intake):
            return node
        expected, found = "state of this rank's shard", "state of the whole parameter"
    else:
        key = shard_key(param, address)
        if key in node:
            return node[key]
        if is_dtensor(param) and not key:
            return NO_SHARD
        expected = f"state of the shard '{key}'" if key else "state of the whole parameter"
        found = "state that was stored shard by shard under another layout"
    intake.findings.refuse(address, expected=expected, found=f"{found}; leave out the state of this parameter with exclude=")
    return NO_SHARD


def _is_for_shard(node: object, live: object, param: torch.Tensor, intake: Intake) -> bool:
    """Whether an entry, as it is live or else as it would be made, is what an optimizer keeps for a shard."""
    if live is not None:
        return holds(live, partial(is_per_shard, param=param))
    shapes = {intake.filler.shape_of(mark) for mark in collect_marks(node) if mark.kind == "tensor"}
    return is_dtensor(param) and is_sharded(param) and not shapes <= {(), tuple(param.shape)}


def _is_by_shard(node: object) -> TypeGuard[dict[str, object]]:
    return isinstance(node, dict) and bool(node) and all(isinstance(key, str) and key.startswith("~shard ") for key in node)

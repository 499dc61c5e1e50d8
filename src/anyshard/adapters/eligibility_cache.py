"""Knows what may be lazy of an app state whose capture has found the very tensors of an earlier one where they were."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TypeAlias, final

import numpy as np
import torch

from anyshard.adapters.memory_ranges import list_plain, locate
from anyshard.adapters.ownership import find_objects, find_obstacle, list_holdings, list_modules, list_optimizers
from anyshard.adapters.recognise import Kind, recognise
from anyshard.adapters.stability import Eligibility, find_eligible
from anyshard.records.captured import Captured
from anyshard.records.values import ValueRegistry

_KEPT = 4  # as many as captures are kept

Optimizers: TypeAlias = Sequence[torch.optim.Optimizer]
Embeddings: TypeAlias = Sequence[torch.nn.Embedding | torch.nn.EmbeddingBag]


@final
class EligibilityCache:
    """What was found of the last app states. Holds no tensor, module or optimizer. For one thread at a time."""

    def __init__(self) -> None:
        self.num_hits = 0
        self._kept: list[_Record] = []

    def find(self, app_state: Mapping[str, object], captured: Captured, registry: ValueRegistry) -> Eligibility:
        """What `find_eligible` gives."""
        if captured.memory is None:
            return find_eligible(app_state, captured, registry)
        objects = [found for value in app_state.values() for found in find_objects(value, registry)]
        optimizers = list_optimizers(objects)
        record = next((kept for kept in self._kept if kept.memory is captured.memory), None)
        if record is not None and (known := record.match(optimizers, captured)) is not None:
            self.num_hits += 1
            return known
        found = find_eligible(app_state, captured, registry)
        if record is None or record.is_good:
            others = [kept for kept in self._kept if kept.memory is not captured.memory]
            self._kept = [_Record(found, captured, objects=objects, registry=registry), *others][:_KEPT]
        return found


@final
class _Record:
    """What was found once, and what it depends on besides the facts that the capture has compared.

    These are which tensors modules and optimizers have, where these lie, and which objects hold them.
    """

    def __init__(self, found: Eligibility, captured: Captured, *, objects: Sequence[object], registry: ValueRegistry) -> None:
        assert captured.memory is not None
        optimizers, modules = list_optimizers(objects), list_modules(objects)
        self.memory = captured.memory
        self._unknown: list[int] = np.flatnonzero(self.memory.address == 0).tolist()
        self._found = replace(found, optimizers=())
        self._numbers = [optimizers.index(owner) for owner in found.optimizers]
        self._optimizers = list(map(weakref.ref, optimizers))
        embeddings = [module for module in modules if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
        self._embeddings = list(map(weakref.ref, embeddings))
        owned = set(map(id, _list_params(optimizers)))
        self._strange = [weakref.ref(module) for module in modules if not owned.issuperset(map(id, _params_of(module)))]
        self.is_good = (
            not found.is_lazy[self._unknown].any()
            and all(recognise(optimizer, registry, "") is Kind.OPTIMIZERS for optimizer in optimizers)
            and not _owns_others(optimizers, captured)
        )
        self._facts = self._measure(optimizers, captured) if self.is_good else ()

    def match(self, optimizers: Optimizers, captured: Captured) -> Eligibility | None:
        """What was found, if it is still so."""
        if not self.is_good or [id(ref()) for ref in self._optimizers] != list(map(id, optimizers)):
            return None
        if self._measure(optimizers, captured) != self._facts:
            return None
        return replace(self._found, optimizers=tuple(optimizers[number] for number in self._numbers))

    def _measure(self, optimizers: Optimizers, captured: Captured) -> tuple[object, ...]:
        modules = [module for ref in self._strange if (module := ref()) is not None]
        embeddings = [module for ref in self._embeddings if (module := ref()) is not None]
        params = _list_params(optimizers)
        strange = chain.from_iterable(map(_params_of, modules))
        return (
            list(map(find_obstacle, optimizers)),
            [getattr(param, "_fsdp_flattened", False) for param in params],
            list(map(attrgetter("requires_grad"), chain(params, strange))),
            _list_renormed(embeddings),
            [type(captured.sources[row]) for row in self._unknown],
        )


def _list_params(optimizers: Optimizers) -> list[torch.Tensor]:
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def _params_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [param for param in vars(module)["_parameters"].values() if param is not None]


def _owns_others(optimizers: Optimizers, captured: Captured) -> bool:
    """Whether optimizers own tensors that are no rows: of these the capture knows nothing."""
    tensors = [getattr(source, "tensor", None) for source in captured.sources]
    rows = {id(tensor): row for row, tensor in enumerate(tensors) if tensor is not None}
    return any(holding.others for holding in list_holdings(optimizers, rows).values())


def _list_renormed(embeddings: Embeddings) -> list[object]:
    """Which embeddings a forward pass changes, and where their weights lie."""
    starts, stops = locate(list_plain([module.weight for module in embeddings if module.max_norm is not None]))
    return [[module.max_norm is not None for module in embeddings], starts.tolist(), stops.tolist()]

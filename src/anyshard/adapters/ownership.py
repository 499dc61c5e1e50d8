"""What belongs to the optimizers of an app state, and why some of them cannot be waited for.

An optimizer owns its parameters and the tensors of its state: nothing but its steps is meant to change them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from anyshard.adapters.memory_ranges import list_locals, list_plain
from anyshard.adapters.recognise import unwrap
from anyshard.records.values import ValueRegistry, is_container, iterate_leaves

FREE: Final = ""  # no obstacle
FSDP1: Final = "FSDP1 (FullyShardedDataParallel), which moves what it shards"
FROZEN: Final = "frozen parameters, which anything may change but a step"


@dataclass(slots=True)
class Holding:
    """What optimizers own that have one obstacle in common: rows of what was captured, and plain tensors that are no such row.

    Rows are found by identity. Most tensors are rows, of which all is known, while a tensor would have to be asked where it lies.
    The owners are the numbers of the optimizers, parallel to both lists.
    """

    rows: list[int] = field(default_factory=list)
    row_owners: list[int] = field(default_factory=list)
    others: list[torch.Tensor] = field(default_factory=list)
    other_owners: list[int] = field(default_factory=list)

    def add(self, tensors: Sequence[torch.Tensor], rows: Mapping[int, int], owner: int) -> None:
        """Add tensors of one optimizer; `rows` has the rows by the ids of their tensors."""
        others = self._add_rows(tensors, rows, owner)
        if others:
            others = list_plain(self._add_rows(list_locals(others), rows, owner))
            self.others += others
            self.other_owners += [owner] * len(others)

    def _add_rows(self, tensors: Sequence[torch.Tensor], rows: Mapping[int, int], owner: int) -> list[torch.Tensor]:
        """Add those that are rows; the others."""
        found = list(map(rows.get, map(id, tensors)))
        known = [row for row in found if row is not None]
        self.rows += known
        self.row_owners += [owner] * len(known)
        if len(known) == len(found):
            return []
        return [tensor for tensor, row in zip(tensors, found, strict=True) if row is None]


def find_objects(value: object, registry: ValueRegistry) -> Iterator[object]:
    """All leaves of a part of an app state but tensors and registered values, out of their wrappers."""
    for leaf in iterate_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            inner = unwrap(leaf)
            if not registry.find_type(type(inner)):
                yield inner


def find_optimizers(app_state: Mapping[str, object], registry: ValueRegistry) -> tuple[torch.optim.Optimizer, ...]:
    """All optimizers of an app state, each once."""
    return list_optimizers(found for value in app_state.values() for found in find_objects(value, registry))


def list_optimizers(objects: Iterable[object]) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers among objects, each once."""
    return tuple({id(found): found for found in objects if isinstance(found, torch.optim.Optimizer)}.values())


def list_modules(objects: Iterable[object]) -> list[torch.nn.Module]:
    """The modules among objects and all within them, each once; `Module.modules` takes some times as long."""
    found = {id(module): module for module in objects if isinstance(module, torch.nn.Module)}
    pending = list(found.values())
    while pending:
        for module in vars(pending.pop())["_modules"].values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                pending.append(module)
    return list(found.values())


def list_holdings(optimizers: Sequence[torch.optim.Optimizer], rows: Mapping[int, int]) -> Mapping[str, Holding]:
    """What the optimizers own by the obstacle that keeps it from being lazy, `FREE` for none.

    `rows` has the rows of what was captured by the ids of their tensors, which are alive.
    """
    holdings: defaultdict[str, Holding] = defaultdict(Holding)
    for number, optimizer in enumerate(optimizers):
        for obstacle, tensors in _list_owned(optimizer).items():
            holdings[obstacle].add(tensors, rows, number)
    return holdings


def find_obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Why nothing that an optimizer owns may be lazy; `FREE` if there is no reason."""
    name = type(optimizer).__name__
    if "_optimizer_step_pre_hooks" not in vars(optimizer) or not getattr(optimizer.step, "hooked", False):
        return f"of {name}, an optimizer whose steps run no hooks"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"of {name} with capturable=True, whose steps run no hooks where a graph of them is replayed"
    if all(callable(getattr(optimizer, switch, None)) for switch in ("train", "eval")):
        return f"of {name}, an optimizer that changes parameters outside of its steps too, in train() and eval()"
    return FREE


def _list_owned(optimizer: torch.optim.Optimizer) -> Mapping[str, list[torch.Tensor]]:
    common = find_obstacle(optimizer)
    owned: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    obstacles: dict[int, str] = {}
    for group in getattr(optimizer, "param_groups", ()):  # an optimizer without hooks may lack anything
        for param in group["params"]:
            # The mark of a flat parameter, and of those that FSDP1 shows in its stead (use_orig_params).
            obstacle = common or (FSDP1 if getattr(param, "_fsdp_flattened", False) else FREE)
            obstacles[id(param)] = obstacle
            owned[obstacle or (FREE if param.requires_grad else FROZEN)].append(param)
    for key, state in getattr(optimizer, "state", {}).items():
        owned[obstacles.get(id(key), common)].extend(_list_tensors(state))
    return owned


def _list_tensors(state: object) -> list[torch.Tensor]:
    """The tensors in the state of one parameter, which nearly always is a dict of tensors."""
    tensors: list[torch.Tensor] = []
    for value in state.values() if type(state) is dict else (state,):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif is_container(value):
            tensors.extend(leaf for leaf in iterate_leaves(value) if isinstance(leaf, torch.Tensor))
    return tensors

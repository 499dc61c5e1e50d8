"""Loads optimizers: groups matched by the parameters they hold, state by FQN, missing state made from the checkpoint.

torch's own `load_state_dict` is not used: it casts moments to the parameter's dtype and matches by position. No step is
pretended. Options that describe the implementation (fused, foreach, ...) stay as the live optimizer has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, final

import torch

from anyshard.adapters.fills import Make, NewTensor
from anyshard.adapters.intake import Intake, Phase, Settle, keep
from anyshard.adapters.nested import describe_node, is_tensor, load_container
from anyshard.adapters.optimizers import LiveGroup, label_groups, name_groups
from anyshard.adapters.recognise import holds
from anyshard.adapters.shard_state import NO_SHARD, take_shards
from anyshard.adapters.step_hooks import is_own_hook
from anyshard.adapters.survey import ModuleNames
from anyshard.adapters.tensors import dtype_name, is_dtensor, local_tensor
from anyshard.errors import Mismatch
from anyshard.records.addresses import component, join_address, show
from anyshard.records.values import (
    TensorMark,
    collect_marks,
    encode_value,
    is_container,
    list_components,
    list_items,
    map_marks,
)

_DECAY = "decoupled_weight_decay"  # what makes an AdamW of an Adam
# What says how a live optimizer works rather than how far it has come.
IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable", _DECAY})
# What torch's schedulers put into groups.
_SCHEDULER_OPTIONS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    label: str
    options: Mapping[str, object]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _StoredOptimizer:
    state: Mapping[str, object]
    groups: Mapping[str, _StoredGroup]
    other: Mapping[str, object]

    def list_empty(self) -> list[_StoredGroup]:
        """The groups without parameters, whose labels are `~` and their position, by position."""
        return sorted(
            (group for group in self.groups.values() if not group.params), key=lambda group: (len(group.label), group.label)
        )


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], node: object, address: str, *, modules: ModuleNames, intake: Intake
) -> None:
    """Plan the load of the optimizers under one name from their stored tree."""
    stored = _read_tree(node)
    if stored is None:
        intake.findings.refuse(address, expected="an optimizer's state by parameter name", found=describe_node(node))
        return
    loader = _OptimizerLoader(stored, address, intake)
    groups = name_groups(optimizers, address, modules)
    loader.compare_kinds(optimizers)
    loader.load_groups(groups)
    loader.load_state(groups)
    loader.load_other(optimizers)
    loader.refuse_surplus({name for group in groups for name in group.names})
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    hooks = [hook for optimizer in optimizers for name in names for hook in vars(optimizer).get(name, {}).values()]
    if not all(map(is_own_hook, hooks)):
        intake.findings.warn(f"{show(address)}: the hooks of the optimizer's load_state_dict are not run")


def _read_tree(node: object) -> _StoredOptimizer | None:
    if not isinstance(node, dict) or not {"state", "param_groups"} <= node.keys() <= {"state", "param_groups", "other"}:
        return None
    state, groups, other = node["state"], node["param_groups"], node.get("other", {})
    if not (isinstance(state, dict) and isinstance(groups, dict) and isinstance(other, dict)):
        return None
    if not all(isinstance(label, str) and _is_group(group) for label, group in groups.items()):
        return None
    read = {label: _StoredGroup(label, group["options"], tuple(group["params"])) for label, group in groups.items()}
    return _StoredOptimizer(state, read, other)


def _is_group(group: object) -> bool:
    if not isinstance(group, dict) or group.keys() != {"options", "params"}:
        return False
    options, params = group["options"], group["params"]
    return isinstance(options, dict) and isinstance(params, dict) and all(isinstance(name, str) for name in (*params, *options))


@final
class _OptimizerLoader:
    """Plans groups, then state; all changes are actions that run after the fill."""

    def __init__(self, stored: _StoredOptimizer, address: str, intake: Intake) -> None:
        self._stored = stored
        self._address = address
        self._intake = intake
        self._findings = intake.findings
        self._group_of = {name: group for group in stored.groups.values() for name in group.params}

    def compare_kinds(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warn where the stored options look as if another class of optimizer had been saved; they are loaded all the same."""
        own = {option for optimizer in optimizers for group in optimizer.param_groups for option in group}
        kept = {option for optimizer in optimizers for option in optimizer.defaults}
        ours = sorted(kept - IMPLEMENTATION_OPTIONS)
        theirs = sorted({option for group in self._stored.groups.values() for option in group.options} - IMPLEMENTATION_OPTIONS)
        if self._stored.groups and (set(theirs) - own - _SCHEDULER_OPTIONS or set(ours) - set(theirs)):
            kinds = "/".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
            self._findings.warn(
                f"{show(self._address)}: the options of the live {kinds} ({', '.join(ours)}) are not those that were stored "
                f"({', '.join(theirs)}), maybe by another class of optimizer; stored ones were set, others stay"
            )

    def load_groups(self, groups: Sequence[LiveGroup]) -> None:
        """Give each live group the options of the stored group that holds its parameters; empty ones go by position.

        That is the position among all groups, or among the empty ones where no empty group was stored at that one.
        """
        empty, places = self._stored.list_empty(), count()
        for label, group in zip(label_groups(groups), groups, strict=True):
            address = join_address(self._address, "param_groups", component(label, within=self._address))
            source = self._find_group(group, address) if group.names else _pick_empty(empty, label, next(places))
            if source is not None:
                self._load_options(group, source, address)

    def _find_group(self, group: LiveGroup, address: str) -> _StoredGroup | None:
        sources = {self._group_of[name].label: name for name in group.names if name in self._group_of}
        if not sources:
            return None
        first, *others = sorted(sources, key=str.encode)
        for other in others:
            differing = self._compare_options(self._stored.groups[first].options, self._stored.groups[other].options, address)
            if differing:
                found = f"{sources[first]} in the stored group of {first} and {sources[other]} in that of {other}"
                self._findings.differ(
                    Mismatch.GROUP,
                    address,
                    expected=f"parameters stored with equal options in {address}",
                    found=f"{found}, with different {', '.join(differing)}",
                )
        return self._stored.groups[first]

    def _compare_options(self, one: Mapping[str, object], other: Mapping[str, object], address: str) -> list[str]:
        """The selected options that differ as they are stored. The bytes of tensors in them are tied, to be compared later."""
        differing = []
        for key in sorted((one.keys() | other.keys()) - IMPLEMENTATION_OPTIONS):
            if self._findings.selection.takes_whole(join_address(address, component(key))):
                if key in one and key in other and self._describe_value(one[key]) == self._describe_value(other[key]):
                    for pair in zip(collect_marks(one[key]), collect_marks(other[key]), strict=True):
                        self._intake.filler.tie(pair)
                else:
                    differing.append(key)
        return differing

    def _describe_value(self, node: object) -> bytes:
        """A stored value as bytes, with kind, dtype and shape in place of tensors."""
        filler = self._intake.filler
        plain = map_marks(node, lambda mark: ("mark", mark.kind, filler.dtype_of(mark), filler.shape_of(mark)))
        return encode_value(plain, address=self._address, registry=self._intake.registry)

    def _load_options(self, group: LiveGroup, source: _StoredGroup, address: str) -> None:
        for option, node in source.options.items():
            at = join_address(address, component(option))
            if option in group.options and option in IMPLEMENTATION_OPTIONS:
                if option == _DECAY and node != group.options[option]:
                    self._findings.warn(f"{show(at)}: stays {group.options[option]} as in the live optimizer, {node} was stored")
                continue
            if self._findings.selection.takes_whole(at):
                self._findings.match(at)
                settle = self._load_slot(group.options.get(option), node, at, new_tensor=_make_on(group.params))
                self._intake.later(Phase.OPTIMIZERS, partial(_set_item, group.options, option, settle))

    def load_state(self, groups: Sequence[LiveGroup]) -> None:
        """Plan the state of every live parameter."""
        for group in groups:
            for param, name in zip(group.params, group.names, strict=True):
                self._load_param(group, param, name)

    def _load_param(self, group: LiveGroup, param: torch.Tensor, name: str) -> None:
        at = join_address(self._address, "state", component(name))
        state, is_stored = group.optimizer.state, name in self._stored.state
        if not is_stored and name not in self._group_of:
            if self._findings.selection.takes_whole(at):
                self._findings.miss(at, found="a parameter that the stored optimizer does not have")
            return
        self._findings.match(at)
        if is_stored:
            node = take_shards(self._stored.state[name], state.get(param), param, address=at, intake=self._intake)
            settle = self._load_entry(state.get(param), node, at, new_tensor=_make_like(param, group))
            self._intake.later(Phase.OPTIMIZERS, partial(_set_item, state, param, settle))
        elif param in state and self._findings.selection.takes_whole(at):
            # The checkpoint has this parameter and no state for it: it had not been stepped yet.
            self._intake.later(Phase.OPTIMIZERS, partial(state.pop, param, None))

    def _load_entry(self, live: Any, node: object, address: str, *, new_tensor: NewTensor) -> Settle:
        if not isinstance(node, dict) or not isinstance(live, (dict, type(None))):
            if not self._findings.selection.takes_whole(address):
                return lambda: _ABSENT if live is None else live
            return self._load_slot(live, node, address, new_tensor=new_tensor)
        slots: dict[object, Settle] = {}
        for key, child in node.items():
            at = join_address(address, component(key, within=address))
            if self._findings.selection.takes_whole(at):
                slots[key] = self._load_slot((live or {}).get(key), child, at, new_tensor=new_tensor)
        if not live and 0 < len(slots) < len(node):
            self._findings.differ(
                Mismatch.MISSING,
                address,
                expected="all parts of a state that the live optimizer does not have yet, or none",
                found=f"{', '.join(str(key) for key in node if key not in slots)} not selected",
            )
        for key in [key for key in live or {} if key not in node]:
            at = join_address(address, component(key, within=address))
            if self._findings.selection.takes_whole(at):
                self._findings.miss(at)
        return partial(_settle_entry, live, slots, is_whole=len(slots) == len(node))

    def _load_slot(self, live: Any, node: object, address: str, *, new_tensor: NewTensor) -> Settle:
        """One option or one entry of a parameter's state. A 0-d tensor and a number stand for each other."""
        filler = self._intake.filler
        if node is NO_SHARD:
            return keep(_ABSENT if live is None else live)
        if isinstance(live, torch.Tensor):
            if isinstance(node, (int, float)) and live.ndim == 0:
                return self._load_number(live, node, address)
            filler.fill(node, live, address)
            return keep(live)
        if type(live) in (int, float) and isinstance(node, TensorMark) and filler.shape_of(node) == ():
            return partial(_take_number, type(live), filler.make(node, new_tensor=new_tensor))
        if holds(live, is_tensor) and self._fits(live, node):
            return load_container(live, node, address, visit=partial(self._visit_slot, new_tensor), intake=self._intake)
        return filler.make(node, new_tensor=new_tensor)

    def _load_number(self, live: torch.Tensor, number: float, address: str) -> Settle:
        self._findings.match(address)
        taken = _as_tensor(number, live.dtype)
        if taken is None:
            found = f"the {type(number).__name__} {number}"
            self._findings.differ(Mismatch.DTYPE, address, expected=dtype_name(live.dtype), found=found)
            return keep(live)
        return partial(_fill_number, live, local_tensor(live, address), taken)

    def _visit_slot(self, new_tensor: NewTensor, live: Any, node: object, address: str) -> Settle:
        return self._load_slot(live, node, address, new_tensor=new_tensor)

    def _fits(self, live: Any, node: object) -> bool:
        """Whether nested state has the stored structure, so that it can be filled; if not, it is made anew."""
        if isinstance(live, torch.Tensor):
            return self._intake.filler.fits(node, live)
        if not is_container(live):
            return not collect_marks(node)
        if type(node) is not type(live) or list_components(node, address="") != list_components(live, address=""):
            return False
        pairs = zip(list_items(live), list_items(node), strict=True)
        return all(self._fits(item, child) for (_, item), (_, child) in pairs)

    def load_other(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Replace state that belongs to no parameter, entry by entry: in the optimizer that has it, else in the first."""
        states: list[dict[Any, Any]] = [optimizer.state for optimizer in optimizers]
        for key, node in self._stored.other.items():
            at = join_address(self._address, "other", component(key))
            if self._findings.selection.takes_whole(at):
                state = next((state for state in states if key in state), states[0])
                settle = self._load_slot(state.get(key), node, at, new_tensor=_make_on(()))
                self._intake.later(Phase.OPTIMIZERS, partial(_set_item, state, key, settle))
        self._miss_other({key: None for state in states for key in state if isinstance(key, str)})

    def _miss_other(self, keys: Iterable[str]) -> None:
        for key in keys:
            at = join_address(self._address, "other", component(key))
            if key not in self._stored.other and self._findings.selection.takes_whole(at):
                self._findings.miss(at)

    def refuse_surplus(self, names: set[str]) -> None:
        """Record stored parameters that no live optimizer has."""
        for name in sorted({*self._group_of, *self._stored.state} - names):
            at = join_address(self._address, "state", component(name))
            if self._findings.selection.takes_whole(at):
                self._findings.surprise(at)


_ABSENT = object()


def _pick_empty(stored: Sequence[_StoredGroup], label: str, place: int) -> _StoredGroup | None:
    same = [group for group in stored if group.label == label]
    return next(iter(same or stored[place:]), None)


def _set_item(target: Any, key: object, settle: Settle) -> None:
    value = settle()
    if value is not _ABSENT:
        target[key] = value


def _settle_entry(live: dict[object, Any] | None, slots: Mapping[object, Settle], *, is_whole: bool) -> object:
    """The entry of one parameter; one that was absent stays so if nothing of it is selected."""
    if live is None and not slots and not is_whole:
        return _ABSENT
    entry = {} if live is None else live
    entry.update({key: value for key, settle in slots.items() if (value := settle()) is not _ABSENT})
    return entry


def _as_tensor(number: float, dtype: torch.dtype) -> torch.Tensor | None:
    """A number as a 0-d tensor; None for a float as an integer, and for an integer out of range."""
    if isinstance(number, float) and not (dtype.is_floating_point or dtype.is_complex):
        return None
    try:
        made = torch.tensor(number, dtype=dtype, device="cpu")
        is_whole = dtype.is_floating_point or dtype.is_complex or made.item() == number
    except (RuntimeError, ValueError, OverflowError):
        return None
    return made if is_whole else None


def _fill_number(live: torch.Tensor, local: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(local.is_inference()):
        local.detach().copy_(number)
    return live


def _take_number(kind: type, make: Make) -> Any:
    """A stored number in the kind of the live one, if that loses nothing, else as it was stored."""
    number = make().item()
    try:
        taken = kind(number)
    except (TypeError, ValueError, OverflowError):
        return number
    return taken if taken == number else number


def _make_on(params: Sequence[torch.Tensor]) -> NewTensor:
    """Tensors that belong to a group lie on the device of its parameters, 0-d ones on the CPU."""
    device = params[0].device if params else torch.device("cpu")

    def make(mark: TensorMark, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        del mark
        return torch.empty(shape, dtype=dtype, device=device if shape else "cpu")

    return make


def _make_like(param: torch.Tensor, group: LiveGroup) -> NewTensor:
    """New state of a parameter: laid out as the parameter where shapes are equal, counters where the optimizer wants them."""
    on_device = group.options.get("capturable") or group.options.get("fused")

    def make(mark: TensorMark, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        is_step = shape == () and mark.address.endswith("/step")
        if shape == tuple(param.shape) and not is_step:
            return _empty_like(param, dtype, mark.address)
        is_counter = shape == () and not on_device
        return torch.empty(shape, dtype=dtype, device="cpu" if is_counter else param.device)

    return make


def _empty_like(param: torch.Tensor, dtype: torch.dtype, address: str) -> torch.Tensor:
    local = torch.empty_like(local_tensor(param, address).detach(), dtype=dtype)
    if not is_dtensor(param):
        return local
    # torch's own would ask the placements for the local shape, which for uneven shards may be another than the parameter's.
    mesh, placements = param.device_mesh, param.placements
    return type(param).from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())

"""The record of a whole app state: takes one that has not changed apart again, quickly. Holds no tensor, module or optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
import torch

from anyshard.adapters.capture import Capturer, States, TakenApart
from anyshard.adapters.collect import Collector, Leaf, Taken
from anyshard.adapters.node_record import record_node
from anyshard.adapters.overlaps import overlaps_itself
from anyshard.adapters.placements import regions_of
from anyshard.adapters.replay import Changed, Replay
from anyshard.adapters.survey import survey_parts
from anyshard.adapters.tensor_facts import TensorFacts
from anyshard.adapters.tensors import HostSource, is_dtensor, source_of, source_of_known, synchronise
from anyshard.adapters.watch import Watch
from anyshard.records.addresses import component
from anyshard.records.captured import Captured, MemoryFacts
from anyshard.records.constant_trees import ConstantTrees
from anyshard.records.handles import Slices, Source
from anyshard.records.tables import ShardTable
from anyshard.records.values import ValueRegistry

# Of leaves that are taken anew: dtype, shape and regions by address, and which of them are one tensor.
_FreshFacts: TypeAlias = tuple[dict[str, object], list[list[str]]]

_FRESH = -1  # the slot of a row whose leaf is taken anew


@dataclass(frozen=True, slots=True)
class Member:
    """Which rank of how many takes an app state apart, and the types that its values may have."""

    rank: int
    world_size: int
    registry: ValueRegistry


@final
class Frame:
    """The record of an app state that was taken apart. Raises `Changed` if there can be none."""

    def __init__(self, app_state: Mapping[str, object], taken: TakenApart) -> None:
        self._watch = watch = Watch()
        trees, collector = taken.captured.trees, taken.collector
        self._nodes = {
            name: record_node(value, trees[name], component(name), surveyed=taken.surveyed, watch=watch)
            for name, value in app_state.items()
        }
        self._keys = [key for node in self._nodes.values() for key in node.list_keys()]
        addresses = [address for node in self._nodes.values() for address in node.list_addresses()]
        by_address = {address: known for known in collector.tensors.values() for address in known.addresses}
        held = [by_address[address] for address in addresses]
        self._facts = TensorFacts([known.tensor for known in held], watch)
        self._storages = {known.local.untyped_storage().data_ptr() for known in held if known.local.numel()}
        self._ids = {id(known.tensor) for known in held}
        self._devices = {known.local.device for known in held}
        known_addresses = frozenset(addresses)
        fresh = [each for each in collector.tensors.values() if not known_addresses.issuperset(each.addresses)]
        self._check_fresh(fresh)
        self._fresh = _list_facts({at: leaf for at, leaf in collector.leaves.items() if at not in known_addresses}, fresh)
        self._rows = _Rows(taken.captured.shards, addresses, held)
        constants = (tree for node in self._nodes.values() for tree in node.list_constants())
        self.constants = ConstantTrees(constants)
        memory = self._rows.memory
        self._captured = replace(taken.captured, sources=(), trees={}, per_rank={}, constants=self.constants, memory=memory)

    def replay(self, app_state: Mapping[str, object], member: Member, states: States) -> Captured:
        """The app state as it is now, taken apart; raises `Changed` if it is not that of the record.

        What statefuls gave as their state is put into `states`.
        """
        replay = Replay(member.registry)
        for name, node in self._nodes.items():
            node.match(app_state[name], replay)
        if replay.keys != self._keys or list(map(type, replay.keys)) != list(map(type, self._keys)):
            raise Changed("other keys")
        self._facts.match_objects(replay.tensors)
        if not self._watch.is_intact:
            raise Changed("other objects in the places of dead ones")
        surveyed = survey_parts(replay.fresh, member.registry)
        capturer = Capturer(surveyed, member.rank, states)
        replay.collector = capturer.collector
        replay.trees = {address: capturer.visit(value, address) for address, value in replay.fresh.items()}
        trees = {name: node.build(app_state[name], replay) for name, node in self._nodes.items()}
        per_rank = capturer.take_own(member.world_size, self._captured.mesh)
        leaves = self._take_leaves(capturer.collector)
        locals_ = self._facts.match_memory(replay.tensors)  # last, for the user's methods were called until now
        sources = self._rows.make_sources(locals_, leaves)
        return replace(self._captured, sources=sources, trees=trees, per_rank=per_rank)

    def _take_leaves(self, collector: Collector) -> dict[str, Leaf]:
        """What was taken anew, if it has the form that it had."""
        fresh = list(collector.tensors.values())
        self._check_fresh(fresh)
        if _list_facts(collector.leaves, fresh) != self._fresh:
            raise Changed("other tensors in what was taken anew")
        synchronise(self._devices.union(each.local.device for each in fresh))
        return collector.leaves

    def _check_fresh(self, fresh: Iterable[Taken]) -> None:
        """What may be tied to other tensors, or lie on their memory, is left to the slow way."""
        storages = set[int]()
        for each in fresh:
            if id(each.tensor) in self._ids or overlaps_itself(each.local):
                raise Changed("a tensor in a state that is taken anew")
            if each.local.numel():
                place = each.local.untyped_storage().data_ptr()
                if place in storages or place in self._storages:
                    raise Changed("tensors that may share memory")
                storages.add(place)


def _list_facts(leaves: Mapping[str, Leaf], tensors: Iterable[Taken]) -> _FreshFacts:
    facts: dict[str, object] = {
        address: (leaf.dtype, leaf.shape, [(tuple(offsets), tuple(lengths)) for offsets, lengths, _ in leaf.regions])
        for address, leaf in leaves.items()
    }
    return facts, sorted(sorted(each.addresses) for each in tensors)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Make many objects that nobody drops: the garbage collector would look at all there is, for some 0.3 s, and free none."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@final
class _Rows:
    """Where the source of each row of a shard table comes from: a tensor of the record, or a leaf that is taken anew."""

    def __init__(self, shards: ShardTable, addresses: list[str], held: list[Taken]) -> None:
        slots = {address: slot for slot, address in enumerate(addresses)}
        names = [shards.tensors.addresses[tensor] for tensor in shards.tensor.tolist()]
        position = (np.arange(len(names)) - np.searchsorted(shards.tensor, shards.tensor)).tolist()  # among rows of one tensor
        self._slots = [slots.get(name, _FRESH) for name in names]
        self._fresh = [(row, names[row], position[row]) for row, slot in enumerate(self._slots) if slot == _FRESH]
        known = [(row, slot) for row, slot in enumerate(self._slots) if slot != _FRESH]
        self._cuts: dict[int, Slices] = {}  # of known rows that are not the whole of a local tensor, by their order
        for order, (row, slot) in enumerate(known):
            if is_dtensor(tensor := held[slot].tensor):
                cut = regions_of(tensor, names[row]).slices(position[row])
                if cut != tuple(slice(0, length) for length in held[slot].local.shape):
                    self._cuts[order] = cut
        # Which of both it is was looked up by the type and the device of the tensors, which are facts.
        is_host = all(type(each.local) in (torch.Tensor, torch.nn.Parameter) and each.local.is_cpu for each in held)
        self._make: Callable[..., Source] = HostSource if is_host else source_of_known
        locals_ = [held[slot].local for _, slot in known]
        self._names = [names[row] for row, _ in known]
        self._known_slots = [slot for _, slot in known]
        self._places, self._nbytes = [local.data_ptr() for local in locals_], [local.nbytes for local in locals_]
        self.memory = self._locate([row for row, _ in known], locals_)

    def _locate(self, rows: list[int], locals_: list[torch.Tensor]) -> MemoryFacts:
        """Where the rows lie. Nothing is known of cuts, which are made anew each time, nor of fresh ones."""
        address = np.zeros(len(self._slots), dtype=np.int64)
        is_host, is_dense = np.zeros((2, len(self._slots)), dtype=np.bool_)
        for order, (row, local) in enumerate(zip(rows, locals_, strict=True)):
            if order not in self._cuts:
                address[row], is_host[row] = local.data_ptr(), local.is_cpu
                is_dense[row] = local.is_contiguous() and not (local.is_conj() or local.is_neg())
        return MemoryFacts(address, is_host, is_dense)

    def make_sources(self, locals_: list[torch.Tensor], leaves: Mapping[str, Leaf]) -> tuple[Source, ...]:
        """A source for each row."""
        tensors = map(locals_.__getitem__, self._known_slots)
        with _without_collections():
            made = list(map(self._make, tensors, self._names, self._places, self._nbytes))
        for order, cut in self._cuts.items():
            made[order] = source_of(locals_[self._known_slots[order]].detach()[cut], self._names[order])
        if not self._fresh:
            return tuple(made)
        fresh, known = {row: leaves[address].regions[position][2] for row, address, position in self._fresh}, iter(made)
        return tuple(fresh[row] if slot == _FRESH else next(known) for row, slot in enumerate(self._slots))

"""What a capture depends on of tensors: which places hold the same one, and how each lies in memory and in its mesh.

Tensors are compared by their ids and by all of these facts, so it does not matter whether a dead one has left its id to another:
equal ids mean that the same places hold the same tensor as before. They must not be known by weak references, for torch refuses
to exchange a tensor that has one, as `Module.to` does with DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any, TypeAlias, final

import torch

from anyshard.adapters.replay import Changed
from anyshard.adapters.tensors import is_dtensor, is_wrapper
from anyshard.adapters.watch import Watch

_Ask: TypeAlias = Callable[[torch.Tensor], Any]

# Whatever `tensor.data = other`, which leaves the object, may change. First what changes most often, for the first that differs
# ends the comparison.
_FACTS: tuple[_Ask, ...] = (
    torch.Tensor.data_ptr,
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    lambda tensor: tensor.untyped_storage().nbytes(),
    attrgetter("dtype"),
    attrgetter("device"),
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)


# So many at once: asked for one fact of all 10,000, each tensor is out of the processor's cache when asked for the next.
_CHUNK = 128


def _measure(tensors: Sequence[torch.Tensor]) -> list[list[list[Any]]]:
    # No torch.Size, which the garbage collector would look at again and again.
    chunks = (tensors[start : start + _CHUNK] for start in range(0, len(tensors), _CHUNK))
    return [
        [[tuple(fact) if isinstance(fact, torch.Size) else fact for fact in map(ask, chunk)] for ask in _FACTS]
        for chunk in chunks
    ]


def _are_same(tensors: Sequence[torch.Tensor], facts: Sequence[Sequence[Sequence[Any]]]) -> bool:
    # Without an object that lives on for each of them, for there may be 100,000, and in C, for the same reason.
    for start, known in zip(range(0, len(tensors), _CHUNK), facts, strict=True):
        chunk = tensors[start : start + _CHUNK]
        if not all(all(map(eq, map(ask, chunk), fact)) for ask, fact in zip(_FACTS, known, strict=True)):
            return False
    return True


@final
class TensorFacts:
    """The facts of tensors in a given order. Holds none of them."""

    def __init__(self, tensors: Sequence[torch.Tensor], watch: Watch) -> None:
        """Raises `Changed` for a tensor subclass that may change in other ways."""
        self._sharded = [place for place, tensor in enumerate(tensors) if is_dtensor(tensor)]
        if any(is_wrapper(tensor) and not is_dtensor(tensor) for tensor in tensors):
            raise Changed("a tensor subclass")
        self._ids = list(map(id, tensors))
        locals_ = self._list_locals(tensors)
        if any(map(is_wrapper, locals_)):
            raise Changed("a DTensor over a tensor subclass")
        self._types, self._local_types = list(map(type, tensors)), list(map(type, locals_))
        self._facts = _measure(locals_)
        self._placements = self._list_placements(tensors)
        watch.note([tensors[place].device_mesh for place in self._sharded])  # type: ignore[attr-defined]

    def match_objects(self, tensors: Sequence[torch.Tensor]) -> None:
        """Return if these are the tensors, or might be those of dead ones; else raise `Changed`."""
        if list(map(id, tensors)) != self._ids or list(map(type, tensors)) != self._types:
            raise Changed("another tensor")

    def match_memory(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The plain tensors in which these lie here, which `match_objects` has found to be the same, if all else is as it was."""
        if self._list_placements(tensors) != self._placements:
            raise Changed("other placements")
        locals_ = self._list_locals(tensors)
        try:
            is_same = list(map(type, locals_)) == self._local_types and _are_same(locals_, self._facts)
        except (RuntimeError, NotImplementedError) as error:  # of one without memory, which the slow way refuses by its address
            raise Changed("a tensor without memory") from error
        if not is_same:
            raise Changed("other memory")
        return locals_

    def _list_locals(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        locals_: list[Any] = list(tensors)
        with torch.no_grad():  # else each is a new node of the autograd graph
            for place in self._sharded:
                locals_[place] = locals_[place].to_local()
        return locals_

    def _list_placements(self, tensors: Sequence[Any]) -> list[object]:
        sharded = [tensors[place] for place in self._sharded]
        return [(tensor.shape, tensor.dtype, tensor.placements, id(tensor.device_mesh)) for tensor in sharded]

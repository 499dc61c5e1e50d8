"""How an app state that was taken apart before is taken apart again: what is compared, and what is taken anew.

Each node of the app state has a record of how it was. First all are compared with what is there now (`match`), by which nothing
is called but hooks that torch's own `state_dict` would call; then the trees are made (`build`). Where a node is not as before
`Changed` is raised, and the whole app state is taken apart as if it were the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, final

import torch

from anyshard.adapters.collect import Collector
from anyshard.records.values import ValueRegistry


class Changed(Exception):
    """Something is not as it was, or cannot be compared."""


@final
class Replay:
    """One time of it. `tensors` and `keys` are those of all matched nodes in order; `fresh` are the nodes that are taken anew."""

    def __init__(self, registry: ValueRegistry) -> None:
        self.registry = registry
        self.tensors: list[torch.Tensor] = []
        self.keys: list[object] = []
        self.fresh: dict[str, object] = {}
        self.trees: dict[str, object] = {}  # of `fresh`, known when trees are built
        self.collector = Collector()  # of leaves that are taken anew


class Node(Protocol):
    """The record of one node. `match` comes first for all nodes, then `build` for all, on one thread, with the same values."""

    def match(self, value: object, replay: Replay) -> None:
        """Put the node's tensors at the end of `replay.tensors`, in the order in which they were recorded; else `Changed`.

        Tensors are not compared here, nor is what stands in their places, nor keys: the frame compares all of them at once.
        """
        ...

    def build(self, value: object, replay: Replay) -> object:
        """The tree of the node."""
        ...

    def list_addresses(self) -> list[str]:
        """The addresses of the node's tensors, in the order in which `match` lists them."""
        ...

    def list_keys(self) -> list[object]:
        """The keys that `match` puts at the end of `replay.keys`."""
        ...

    def list_constants(self) -> Iterator[object]:
        """The largest subtrees that `build` gives again and again, or the marks in those that it makes anew."""
        ...

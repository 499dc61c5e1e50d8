"""Loads plain nested state: tensors are filled, values are replaced, containers keep their identity where they can.

A live node without tensors is one value and takes the stored node whole. A container with tensors is compared key by key.
"""

from __future__ import annotations

import argparse
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.intake import Intake, Settle, keep
from anyshard.adapters.recognise import holds
from anyshard.records.addresses import join_address, show
from anyshard.records.values import (
    LARGE_VALUE_NBYTES,
    TensorMark,
    is_container,
    list_components,
    list_items,
    map_leaves,
    rebuild_container,
)

Visit: TypeAlias = Callable[[Any, object, str], Settle]


def load_value(live: object, node: object, address: str, intake: Intake) -> Settle:
    """Replace a value by the stored node, whole; mutable containers and arrays that fit keep their identity."""
    if not intake.findings.selection.takes_whole(address):
        return keep(live)
    intake.findings.replaced_values.append(address)
    make = intake.take_whole(node, address, arrays=_list_arrays(live, address))
    return lambda: settle(live, make(), set())


def _list_arrays(live: object, address: str) -> dict[str, NDArray[Any]]:
    """The large arrays in a live value by address; those can be filled without a copy."""
    arrays: dict[str, NDArray[Any]] = {}

    def note(leaf: object, at: str) -> object:
        if _is_large_array(leaf):
            arrays[at] = cast("NDArray[Any]", leaf)
        return leaf

    # Values may have keys that no address can hold, so nothing is walked without need.
    if holds(live, _is_large_array):
        map_leaves(live, note, address=address)
    return arrays


def _is_large_array(value: object) -> bool:
    return type(value) is np.ndarray and value.nbytes >= LARGE_VALUE_NBYTES


def settle(live: Any, new: Any, settled: set[int]) -> Any:
    """What stands in place of `live`: `live` itself with the content of `new` if it can change in place, else `new`.

    `settled` are the ids of what was given content already: an object that the app state holds twice takes one content.
    """
    if live is new or id(live) in settled:
        return new
    settled.add(id(live))
    if _is_same_tuple_class(live, new):
        return rebuild_container(live, [settle(old, item, settled) for old, item in zip(live, new, strict=True)])
    if not is_changed_in_place(live, new):
        return new
    _SETTLERS[type(live)](live, new, settled)
    return live


def is_changed_in_place(live: Any, new: Any) -> bool:
    """Whether an object takes the content of a stored one and stays itself: all that can change do, if their form allows."""
    if type(live) is not type(new) or type(live) not in _SETTLERS:
        return False
    if isinstance(live, np.ndarray):
        return live.shape == new.shape and live.dtype == new.dtype and live.flags.writeable
    if isinstance(live, bytearray):
        return len(live) == len(new)  # one of which a memoryview exists cannot change its length
    return not isinstance(live, deque) or live.maxlen == new.maxlen


def _settle_sequence(live: Any, new: Any, settled: set[int]) -> None:
    kept = [settle(old, item, settled) for old, item in zip(live, new, strict=False)]
    rest = list(new)[len(kept) :]
    live.clear()
    live.extend(kept + rest)


def _settle_dict(live: dict[Any, Any], new: dict[Any, Any], settled: set[int]) -> None:
    merged = {key: settle(live[key], item, settled) if key in live else item for key, item in new.items()}
    live.clear()
    live.update(merged)


def _settle_namespace(live: Any, new: Any, settled: set[int]) -> None:
    _settle_dict(vars(live), vars(new), settled)


def _settle_set(live: set[Any], new: set[Any], settled: set[int]) -> None:
    del settled
    live.clear()
    live.update(new)


def _settle_array(live: Any, new: Any, settled: set[int]) -> None:
    del settled
    live[...] = new


def _settle_bytes(live: bytearray, new: bytearray, settled: set[int]) -> None:
    del settled
    live[:] = new


_SETTLERS: dict[type, Callable[[Any, Any, set[int]], None]] = {
    **dict.fromkeys((list, deque), _settle_sequence),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), _settle_dict),
    **dict.fromkeys((types.SimpleNamespace, argparse.Namespace), _settle_namespace),
    set: _settle_set,
    bytearray: _settle_bytes,
    np.ndarray: _settle_array,
}


def _is_same_tuple_class(live: Any, new: Any) -> bool:
    """A named tuple comes back as a record; the live object knows the class, so nothing has to be looked up."""
    fields = getattr(live, "_fields", None)
    return isinstance(live, tuple) and isinstance(new, tuple) and fields is not None and fields == getattr(new, "_fields", None)


def load_container(live: Any, node: object, address: str, *, visit: Visit, intake: Intake) -> Settle:
    """Load a container with tensors or objects in it, item by item; `visit` loads one item."""
    names, items = list_components(live, address=address), list_items(live)
    stored = _list_stored(live, node, address)
    if stored is None:
        intake.findings.refuse(address, expected=f"a {type(live).__name__}", found=describe_node(node))
        return keep(live)
    places = []
    for name, (key, item) in zip(names, items, strict=True):
        at = join_address(address, name)
        if name in stored:
            places.append((key, item, visit(item, stored.pop(name), at)))
        else:
            miss(item, at, intake)
    for name in stored:
        at = join_address(address, name)
        if intake.findings.selection.takes_whole(at):
            intake.findings.surprise(at)
    return lambda: _replace_items(live, [(key, item, make()) for key, item, make in places])


def _list_stored(live: object, node: object, address: str) -> dict[str, object] | None:
    if not is_container(node) or _is_sequence(node) != _is_sequence(live):
        return None
    return dict(zip(list_components(node, address=address), (item for _, item in list_items(node)), strict=True))


def _is_sequence(container: object) -> bool:
    """Whether items go by position; those of all other containers go by key."""
    return isinstance(container, (list, tuple, deque))


def _replace_items(live: Any, settled: list[tuple[Any, object, object]]) -> Any:
    changed = {key: new for key, old, new in settled if new is not old}
    if not changed:
        return live
    if isinstance(live, tuple):
        return rebuild_container(live, [changed.get(position, item) for position, item in enumerate(live)])
    target = live if hasattr(live, "__setitem__") else vars(live)
    for key, new in changed.items():
        target[key] = new
    return live


def miss(live: object, address: str, intake: Intake) -> None:
    """Record that the checkpoint has nothing for a live item; below a container with tensors each leaf is named."""
    if not holds(live, is_tensor):
        if intake.findings.selection.takes_whole(address):
            intake.findings.miss(address)
        return

    def miss_leaf(leaf: object, at: str) -> object:
        if isinstance(leaf, torch.Tensor):
            intake.filler.miss(leaf, at)
        elif intake.findings.selection.takes_whole(at):
            intake.findings.miss(at)
        return leaf

    map_leaves(live, miss_leaf, address=address)


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def describe_node(node: object) -> str:
    """A stored node in a message."""
    return f"a stored {node.kind}" if isinstance(node, TensorMark) else f"a stored {show(type(node).__name__)}"

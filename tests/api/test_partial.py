"""A load that takes a part of a checkpoint touches that part only; one that ends half-way says so, however it ended."""

from __future__ import annotations

import re

import pytest
import torch

import anyshard
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, do_before


def make_state(value: float) -> dict[str, object]:
    """Two sections, one of them a bare tensor."""
    return {"model": {"w": torch.full((3,), value)}, "optimizer": {"m": torch.full((2,), value)}, "t": torch.full((1,), value)}


def save_with_damage(section: str) -> MemoryStore:
    """A checkpoint in which the blob of a section is damaged."""
    store = MemoryStore()
    anyshard.save(store, make_state(1.0))
    files = store.snapshot()
    return MemoryStore({name: bytes(len(data)) if name.startswith(f"data/{section}/") else data for name, data in files.items()})


@pytest.mark.parametrize(
    "chosen", [{"only": ["model/**"]}, {"only": ["m*/w", "t"]}, {"exclude": ["optimizer/**"]}, {"exclude": ["opti*/**", "x"]}]
)
def test_section_that_is_left_out_is_not_opened(chosen: dict[str, list[str]]) -> None:
    """Damage in a section that the globs leave out does not matter."""
    live = make_state(0.0)
    anyshard.load(save_with_damage("optimizer"), live, options=anyshard.LoadOptions(**chosen))  # type: ignore[arg-type]
    assert (3.0, 0.0) == (live["model"]["w"].sum(), live["optimizer"]["m"].sum())  # type: ignore[index]


@pytest.mark.parametrize("chosen", [{"only": ["**/w"]}, {"exclude": ["t/**"]}, {"only": ["t"]}])
def test_section_that_may_be_meant_is_opened(chosen: dict[str, list[str]]) -> None:
    """Where a glob may reach into a section its damage is found; `t/**` does not mean the tensor `t`."""
    with pytest.raises(anyshard.CheckpointDamaged):
        anyshard.load(save_with_damage("t"), make_state(0.0), options=anyshard.LoadOptions(**chosen))  # type: ignore[arg-type]


def test_tied_tensor_of_a_section_that_is_left_out() -> None:
    """What is tied across sections is loaded, whichever of the names its bytes are stored under."""
    tensor, store = torch.ones(3), MemoryStore()
    anyshard.save(store, {"a": {"w": tensor}, "b": {"w": tensor}})
    for only in ("a/**", "b/**"):
        live = {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3)}}
        anyshard.load(store, live, only=[only])
        assert 3.0 == live["a"]["w"].sum() + live["b"]["w"].sum()
    live = {"b": {"w": torch.zeros(3)}}
    anyshard.load(store, live)
    assert 3.0 == live["b"]["w"].sum()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupted_fill_says_what_is_undefined() -> None:
    """Ctrl-C during the fill stays Ctrl-C, and says that the app state is half new."""
    inner = MemoryStore()
    anyshard.save(inner, {"model": {"w": torch.ones(3)}})
    store = FaultStore(inner, [Rule(Verb.READ_INTO, "data/model/*", do_before(interrupt), nth=4)])
    with pytest.raises(KeyboardInterrupt) as caught:
        anyshard.load(store, {"model": {"w": torch.zeros(3)}})
    (note,) = caught.value.__notes__
    assert "(model/w). Load a checkpoint in full before you use it." in note


def test_comparing_ties_opens_nothing_twice() -> None:
    """A load of two names into one place compares them in the blobs that it has open."""
    inner, one = MemoryStore(), torch.zeros(3)
    anyshard.save(inner, {"a": {"x": torch.ones(3), "y": torch.ones(3)}})
    store = CountingStore(inner)
    anyshard.load(store, {"a": {"x": one, "y": one}})
    assert (3.0, 1) == (one.sum(), store.count(Verb.OPEN_BLOB).calls)


def test_index_that_no_reader_would_take_is_refused_before_anything_is_written() -> None:
    """Addresses that are too long for the index are found before the storage is touched."""
    store = CountingStore(MemoryStore())
    with pytest.raises(anyshard.LimitExceeded, match="shorten"):
        anyshard.save(store, {"a": {"w" * (2 << 20): torch.ones(1)}})
    assert (0, 0) == (store.count(Verb.CREATE).calls, store.count(Verb.PREPARE).calls)


def test_space_that_is_missing_is_the_space_that_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gives the figure that was compared with what is free."""
    store = MemoryStore()
    monkeypatch.setattr(store, "free_nbytes", lambda: 1 << 20)
    with pytest.raises(anyshard.StorageFull) as caught:
        anyshard.save(store, {"a": {"w": torch.ones(100)}})
    expected, nbytes, free = map(int, re.findall(r"[0-9]+", caught.value.strerror or ""))
    assert (1 << 20, (1 << 20) + nbytes) == (free, expected)


def test_excluded_tensor_section_is_not_opened() -> None:
    """A section that is one tensor is left out by its own name."""
    live = make_state(0.0)
    anyshard.load(save_with_damage("t"), live, exclude=["t"])
    assert (3.0, 0.0) == (live["model"]["w"].sum(), live["t"].sum())  # type: ignore[index,attr-defined]

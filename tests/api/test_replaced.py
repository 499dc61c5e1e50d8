"""Readers of a checkpoint that is saved over, or deleted, while they read it."""

from __future__ import annotations

import pytest
import torch

import anyshard
from anyshard import ops
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before

NO_GRACE = anyshard.SaveOptions(overwrite_grace_s=0)
WINDOWS = [(Verb.READ, "manifest-*"), (Verb.READ, "index-*"), (Verb.OPEN_BLOB, "data/a/*"), (Verb.OPEN_BLOB, "data/b/*")]


class Overwriter:
    """Saves over a store with rising numbers, leaving nothing of what was there."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.number = 0
        self.act()

    def act(self) -> None:
        self.number += 1
        tensor = torch.full((3,), float(self.number))
        anyshard.save(self.store, {"a": {"w": tensor}, "b": {"w": tensor}}, overwrite=True, options=NO_GRACE)

    def meddling(self, verb: Verb, pattern: str, *, times: int) -> Store:
        """The store with a save over it right before some of the reader's calls, seen from the reader."""
        return FaultStore(self.store, [Rule(verb, pattern, do_before(self.act), times=times)])


@pytest.mark.parametrize(("verb", "pattern"), WINDOWS)
@pytest.mark.parametrize("times", [1, 4])
def test_load_begins_afresh(verb: Verb, pattern: str, times: int) -> None:
    """A load that loses its files to other saves reads the newest checkpoint, whole."""
    overwriter, live = Overwriter(), {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3)}}
    anyshard.load(overwriter.meddling(verb, pattern, times=times), live)
    assert (1 + times, 2 * 3 * (1 + times)) == (overwriter.number, live["a"]["w"].sum() + live["b"]["w"].sum())


@pytest.mark.parametrize(("verb", "pattern"), WINDOWS[:2])
def test_open_begins_afresh(verb: Verb, pattern: str) -> None:
    """So does an open."""
    overwriter = Overwriter()
    with anyshard.open(overwriter.meddling(verb, pattern, times=3)) as checkpoint:
        assert [4.0] * 3 == checkpoint["a/w"].numpy().tolist()


@pytest.mark.parametrize(("verb", "pattern"), WINDOWS[1:])
def test_load_gives_up_at_last(verb: Verb, pattern: str) -> None:
    """Where every try is overtaken the error says that it was saved over, and nothing has changed."""
    overwriter, live = Overwriter(), {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3)}}
    with pytest.raises(anyshard.CheckpointReplaced, match="saved over"):
        anyshard.load(overwriter.meddling(verb, pattern, times=1000), live)
    assert 0 == live["a"]["w"].sum() + live["b"]["w"].sum()


@pytest.mark.parametrize(("verb", "pattern"), WINDOWS)
def test_deleted_while_it_is_read(verb: Verb, pattern: str) -> None:
    """A checkpoint that was deleted meanwhile is not found."""
    store = Overwriter().store
    meddling = FaultStore(store, [Rule(verb, pattern, do_before(lambda: ops.delete(store)))])
    with pytest.raises(anyshard.CheckpointNotFound, match="deleted"):
        anyshard.load(meddling, {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3)}})


def test_section_that_is_touched_too_late() -> None:
    """What was read of an open checkpoint stays; a section that is first touched when its files are gone says so."""
    overwriter = Overwriter()
    checkpoint = anyshard.open(overwriter.store)
    assert 1.0 == checkpoint["a/w"][0]
    overwriter.act()
    assert 1.0 == checkpoint["a/w"][1]
    with pytest.raises(anyshard.CheckpointReplaced, match="open it again"):
        checkpoint["b/w"].numpy()

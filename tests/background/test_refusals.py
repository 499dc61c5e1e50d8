"""Calls that cannot begin, by two ranks as threads: one operation of the group, whose end all ranks are known to have heard."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from anyshard.async_saving import Background
from anyshard.coord.group import Group
from anyshard.coord.looks import Patience
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.errors import InvalidOption, OperationFailed
from tests.background.scenes import SOON_S
from tests.coord.thread_ranks import make_groups, run_ranks, save


def refuse(group: Group) -> Background:
    """Refuse a call, and return when that has ended."""
    background = Background(group, lambda _: nullcontext(), lambda _: None)
    background.refuse(InvalidOption("no such option"), SOON_S, subject="save 1")
    background.saver.await_idle(SOON_S)
    return background


def meet(group: Group) -> Any:
    """Make the call that the other rank refuses, and do not say that its end was heard."""
    with pytest.raises(OperationFailed, match="no such option"), group.agree("save 1", patience=Patience(SOON_S)) as agreement:
        agreement.hear("begin")
    return group


def test_the_end_of_the_process_knows_who_has_not_heard() -> None:
    """The coordinator that has refused a call can tell that the other rank may still ask how it ended."""
    groups = make_groups(2, MemoryKeyValueStore().clone)
    run_ranks([lambda: save(groups[0], "save 0"), lambda: save(groups[1], "save 0")])
    background, _ = run_ranks([lambda: refuse(groups[0]), lambda: meet(groups[1])])
    assert (1,) == background.saver._last.find_unheard()


def test_ranks_that_refuse_have_heard_of_it() -> None:
    """If all ranks refuse a call, nobody waits for any of them at the end."""
    groups = make_groups(2, MemoryKeyValueStore().clone)
    run_ranks([lambda: save(groups[0], "save 0"), lambda: save(groups[1], "save 0")])
    first, second = run_ranks([lambda: refuse(groups[0]), lambda: refuse(groups[1])])
    assert [(), ()] == [background.saver._last.find_unheard() for background in (first, second)]

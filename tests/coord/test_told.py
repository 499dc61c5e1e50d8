"""Words of progress and of the end: who told what, who has heard, from any thread, with the store lost, and what they leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from anyshard.coord.agreement import Agreement
from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.errors import KeyValueStoreLost
from tests.coord.conftest import Connect, connect_tcp, serve_tcp
from tests.coord.thread_ranks import LONG, SHORT, make_groups, run_group, save

Kept = dict[int, Agreement]
Act = Callable[[Group, Agreement], object]


def run_operation(groups: list[Group], act: Act, subject: str = "save 1") -> tuple[Kept, list[Any]]:
    """The agreements of one operation, which are over, and what `act` gave on each rank before they were decided."""
    kept: Kept = {}

    def run(group: Group) -> object:
        with group.agree(subject, patience=LONG) as agreement:
            kept[group.rank] = agreement
            result = act(group, agreement)
            agreement.post("done", b"done")
            if group.is_coordinator:
                agreement.collect("done")
            agreement.decide()
            return result

    return kept, run_group(groups, run)


def tell_twice(group: Group, agreement: Agreement) -> None:
    """Every rank but the last tells two words."""
    if group.rank < group.size - 1:
        agreement.tell(b"staged %d" % group.rank)
        agreement.tell(b"durable %d" % group.rank)


def test_the_latest_word_of_each_rank_is_listed(connect: Connect) -> None:
    """Every rank sees what each told last, and nothing of one that was silent; also when the operation is over."""
    kept, _ = run_operation(make_groups(3, connect), tell_twice)
    assert [(b"durable 0", b"durable 1", None)] * 3 == [kept[rank].list_told() for rank in range(3)]


def test_words_of_one_operation_are_not_those_of_another() -> None:
    """The next operation begins with nothing told, and the words of the last one are still there."""
    groups = make_groups(2, MemoryKeyValueStore().clone)
    first, _ = run_operation(groups, lambda group, agreement: agreement.tell(b"%d" % group.rank))
    second, _ = run_operation(groups, lambda *_: None, "save 2")
    assert [(b"0", b"1"), (None, None)] == [kept[0].list_told() for kept in (first, second)]


def test_other_threads_may_tell_and_list() -> None:
    """Over a connection, threads that tell and list all the while disturb neither messages nor each other."""
    server = serve_tcp()
    groups = make_groups(2, lambda: connect_tcp(server))

    def act(group: Group, agreement: Agreement) -> bool:
        is_over = threading.Event()
        found: list[tuple[bytes | None, ...]] = []

        def look() -> None:
            while not is_over.is_set() or not found:
                agreement.tell(b"word %d" % group.rank)
                found.append(agreement.list_told())

        thread = threading.Thread(target=look)
        thread.start()
        for number in range(50):
            agreement.post(f"part-{number}", b"post" * 1000)
            if group.is_coordinator:
                agreement.announce(f"answer-{number}", b"".join(agreement.collect(f"part-{number}")))
            assert b"post" * 2000 == agreement.hear(f"answer-{number}")
        is_over.set()
        thread.join(30)
        return all(told[group.rank] == b"word %d" % group.rank for told in found)

    assert [True, True] == run_operation(groups, act)[1]


def test_who_has_not_acknowledged() -> None:
    """The coordinator sees who has heard of the end, whether they say so in the operation or after it."""
    kept, _ = run_operation(make_groups(4, MemoryKeyValueStore().clone), lambda *_: None)
    assert (1, 2, 3) == kept[0].find_unheard()
    for rank in (0, 2, 3, 2):
        kept[rank].acknowledge()
    assert (1,) == kept[0].find_unheard()
    kept, _ = run_operation(make_groups(2, MemoryKeyValueStore().clone), lambda _, agreement: agreement.acknowledge())
    assert () == kept[0].find_unheard()


def test_a_failure_is_acknowledged_too(connect: Connect) -> None:
    """Ranks that have heard of the failure of another one can say so when they have left the operation."""
    groups, kept = make_groups(2, connect), Kept()

    def act(group: Group) -> None:
        begun = partial(kept.__setitem__, group.rank)  # for the failure may be there before this rank comes
        with group.agree("save 1", patience=LONG, begun=begun) as agreement:
            if group.is_coordinator:
                agreement.fail("write", OSError("disk"))
            agreement.hear("plan")

    run_group(groups, act)
    kept[1].acknowledge()
    assert () == kept[0].find_unheard()


def test_words_are_deleted_with_the_operation() -> None:
    """However many operations tell and acknowledge, as many keys are in the store; a word after the end leaves none."""
    store = MemoryKeyValueStore()
    groups, counts = make_groups(3, store.clone), []
    for step in range(12):
        kept, _ = run_operation(groups, tell_twice, f"save {step}")
        for rank in range(3):
            kept[rank].acknowledge()
            kept[rank].tell(b"too late")
        assert (b"durable 0", b"durable 1", None) == kept[0].list_told()
        counts.append(len(store.keys()))
    assert [counts[5]] * 7 == counts[5:]
    for step in range(6):
        run_group(groups, lambda group, step=step: save(group, f"plain {step}"))
    names = store.keys()
    assert [] == [name for name in names if "/told." in name or "/heard." in name]


def test_a_rank_alone() -> None:
    """A group of one rank hears its own words, and waits for nobody's."""
    kept, _ = run_operation([make_lone_group()], lambda _, agreement: agreement.tell(b"staged"))
    assert ((b"staged",), ()) == (kept[0].list_told(), kept[0].find_unheard())


class BrokenStore(MemoryKeyValueStore):
    """A store that is lost, or frozen, once `is_broken` is set."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self.is_broken = threading.Event()
        self.thawed = threading.Event()
        self._hangs = hangs

    @property
    def can_hang(self) -> bool:
        return self._hangs

    def _break(self) -> None:
        if self.is_broken.is_set() and self._hangs:
            self.thawed.wait(30)
        elif self.is_broken.is_set():
            raise KeyValueStoreLost("expected an answer, found none", {})

    def set(self, key: str, value: bytes) -> None:
        self._break()
        super().set(key, value)

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        self._break()
        return super().get_many(keys)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_lost_store_takes_words_in_time(hangs: bool) -> None:
    """Telling and acknowledging raise nothing, listing raises `KeyValueStoreLost`, all within the bound of an answer."""
    store = BrokenStore(hangs=hangs)
    groups, kept = make_groups(2, store.clone), Kept()

    def act(group: Group) -> None:
        with group.agree("save 1", patience=SHORT) as agreement:
            kept[group.rank] = agreement
            if group.is_coordinator:
                agreement.announce("plan", b"plan")
            elif agreement.hear("plan"):
                store.is_broken.set()
            store.is_broken.wait(30)
            agreement.tell(b"word")
            agreement.list_told()

    began_s = time.monotonic()
    assert [KeyValueStoreLost] * 2 == list(map(type, run_group(groups, act)))
    kept[1].acknowledge()
    with pytest.raises(KeyValueStoreLost):
        kept[0].find_unheard()
    assert time.monotonic() - began_s < 10
    store.thawed.set()

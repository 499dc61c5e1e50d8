"""Ranks as threads: groups over one key-value store, and a function run as every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from anyshard.coord.agreement import Agreement
from anyshard.coord.group import Group
from anyshard.coord.looks import Patience
from anyshard.coord.protocol import KeyValueStore
from anyshard.errors import OperationFailed

SHORT = Patience(timeout_s=0.4)
LONG = Patience(timeout_s=30)
JOIN_S = 60


def make_groups(size: int, connect: Callable[[], KeyValueStore]) -> list[Group]:
    """One group per rank, as each process of a job makes it."""
    return [Group(rank, tuple(range(size)), connect()) for rank in range(size)]


def run_ranks(ranks: list[Callable[[], Any]]) -> list[Any]:
    """What each rank returns, or the exception that it raised."""
    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = ranks[rank]()
        except BaseException as error:  # noqa: BLE001 - what a rank raised is what the test is about
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread for thread in threads if thread.is_alive()], "a rank hangs"
    return results


def run_group(groups: list[Group], act: Callable[[Group], Any]) -> list[Any]:
    """`act` as every rank of a group."""
    return run_ranks([lambda group=group: act(group) for group in groups])


def save(group: Group, subject: str = "save 1", *, patience: Patience = LONG, fault: str = "", faulty: int = -1) -> Any:
    """The messages of a save: every kind once. Rank `faulty` fails in phase `fault`."""

    def work(agreement: Agreement, phase: str) -> None:
        with agreement.phase(phase):
            if fault == phase and group.rank == faulty:
                raise ValueError(f"{phase} went wrong")

    with group.agree(subject, patience=patience, is_made_once=True) as agreement:
        work(agreement, "capture")
        agreement.fetch(agreement.share(b"what all ranks have alike"))
        agreement.post("table", b"table %d" % group.rank)
        if group.is_coordinator:
            tables = agreement.collect("table")
            work(agreement, "plan")
            agreement.hand_out("plan", [table + b" planned" for table in tables])
        plan = agreement.receive("plan")
        work(agreement, "write")
        agreement.post("durable", plan)
        if group.is_coordinator:
            durable = agreement.collect("durable")
        agreement.decide()
        if group.is_coordinator:
            work(agreement, "publish")
            agreement.announce("published", b"; ".join(durable))
        return agreement.hear("published")


def failures(results: list[Any]) -> list[dict[int, str]]:
    """What each rank's error says about who failed."""
    assert all(isinstance(result, OperationFailed) for result in results), results
    return [result.failures for result in results]

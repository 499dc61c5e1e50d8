"""The status of a save from any thread: phase, bytes, file, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import anyshard
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before
from tests.background import scenes
from tests.background.scenes import SOON_S, gated, make_small

NBYTES = 3 * 40 * 5 * 4


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


@pytest.mark.parametrize(
    ("verb", "key", "phase"),
    [
        (Verb.LIST, "*", "begin"),
        (Verb.PREPARE, "*", "begin"),
        (Verb.CREATE_BLOB, "data/*", "write"),
        (Verb.WRITE_AT, "data/*", "write"),
        (Verb.CREATE, "index*", "commit"),
        (Verb.CREATE, "manifest*", "publish"),
    ],
)
def test_the_phase_in_which_a_save_is(verb: Verb, key: str, phase: str) -> None:
    """While a storage does not answer, the status says in which phase the save is, and for a growing time."""
    place = gated("memory:a/step_1", verb, key)
    anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()
    (first,), (second,) = pending.status(), pending.status()
    assert (0, phase, phase) == (first.rank, first.phase, second.phase)
    assert 0 <= first.phase_s <= second.phase_s < SOON_S
    place.gate.set()
    pending.committed(SOON_S)
    assert second.phase_s < SOON_S


def test_bytes_and_file_grow_with_the_writing() -> None:
    """Bytes done of all, and the file last written to; when the save is over all are done, and the status stays."""
    gate, arrived = threading.Event(), threading.Event()

    def stop() -> None:
        arrived.set()
        gate.wait(SOON_S)

    inner = MemoryStore(url="memory:a/step_1")
    store = FaultStore(inner, [Rule(Verb.FINISH, "data/model/*", do_before(stop))])
    seen = []

    class Sink:
        def emit(self, event: anyshard.Event) -> None:
            if event.name == "save.block.written":
                seen.append(event.nbytes)

    pending = anyshard.async_save(store, make_small("a"), sinks=[Sink()])
    assert arrived.wait(SOON_S)
    (status,) = pending.status()
    assert NBYTES <= status.written_nbytes <= status.nbytes
    assert status.file.startswith("data/")
    gate.set()
    report = pending.committed(SOON_S)
    (last,) = pending.status()
    assert (report.nbytes, report.nbytes) == (last.nbytes, last.written_nbytes)
    assert sum(seen) == report.written_nbytes


def test_a_status_before_and_after() -> None:
    """Behind another save it has not begun; after a failure it says in which phase that was."""
    first, second = gated("memory:a/step_1"), gated("memory:b/step_1")
    anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))
    pendings = [anyshard.async_save(place.store, make_small("a")) for place in (first, second)]
    first.await_arrival()
    (status,) = pendings[1].status()
    assert ("begin", 0, 0, "") == (status.phase, status.written_nbytes, status.nbytes, status.file)
    first.gate.set()
    second.gate.set()
    anyshard.wait_all(SOON_S)
    full = FaultStore(
        MemoryStore(url="memory:a/step_2"), [Rule(Verb.FINISH, "*", do_before(lambda: (_ for _ in ()).throw(OSError("gone"))))]
    )
    pending = anyshard.async_save(full, make_small("a"))
    with pytest.raises(OSError, match="gone"):
        pending.committed(SOON_S)
    assert "write" == pending.status()[0].phase

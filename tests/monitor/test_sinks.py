"""Where events go: the log, a file of JSON lines, a list."""

from __future__ import annotations

import io
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anyshard.monitor.events import Emitter, Event
from anyshard.monitor.sinks import JsonLinesSink, LoggingSink, RecordingSink

EVENT = Event("save.blob.durable", "op1", 3, 12.5, nbytes=4096, file="data/a")


def emitter(*sinks: JsonLinesSink | LoggingSink | RecordingSink) -> Emitter:
    return Emitter(sinks, operation="op1", rank=3)


@pytest.mark.parametrize(
    ("name", "level"), [("save.failed", logging.WARNING), ("save.end", logging.INFO), ("save.blob.durable", logging.DEBUG)]
)
def test_log_level_follows_the_kind_of_event(caplog: pytest.LogCaptureFixture, name: str, level: int) -> None:
    """Failures are warnings, ends of operations are information, the rest is for debugging."""
    with caplog.at_level(logging.DEBUG, logger="anyshard.events"):
        LoggingSink().emit(Event(name, "op1", 0, 0.0))
    assert [("anyshard.events", level)] == [(record.name, record.levelno) for record in caplog.records]


def test_log_line_has_the_fields_that_are_set(caplog: pytest.LogCaptureFixture) -> None:
    """The line begins with the name and leaves out what is None."""
    logger = logging.getLogger("mine")
    with caplog.at_level(logging.DEBUG, logger="mine"):
        LoggingSink(logger).emit(EVENT)
    assert ["save.blob.durable operation=op1 rank=3 time_s=12.5 nbytes=4096 file=data/a"] == caplog.messages


def test_json_line_has_the_fields_that_are_set() -> None:
    """One line of JSON for each event, without members that are None."""
    stream = io.StringIO()
    JsonLinesSink(stream).emit(EVENT)
    expected = {"name": "save.blob.durable", "operation": "op1", "rank": 3, "time_s": 12.5, "nbytes": 4096, "file": "data/a"}
    assert (expected, 1) == (json.loads(stream.getvalue()), stream.getvalue().count("\n"))


def test_json_lines_are_appended(tmp_path: Path) -> None:
    """Two sinks on one path add to it, and a line is there as soon as `emit` returned."""
    path = tmp_path / "events.jsonl"
    with JsonLinesSink(path) as first, JsonLinesSink(str(path)) as second:
        first.emit(EVENT)
        second.emit(EVENT)
        first.emit(EVENT)
        assert len(path.read_text().splitlines()) == 3


def test_strange_text_stays_on_its_line(tmp_path: Path) -> None:
    """Line breaks, other alphabets and undecodable file names do not break a line or the sink."""
    detail = "a\nb\u2028\u00fc\udcff"
    with JsonLinesSink(tmp_path / "events.jsonl") as sink:
        sink.emit(Event("save.failed", "op1", 0, 0.0, detail=detail))
    lines = (tmp_path / "events.jsonl").read_bytes().split(b"\n")
    assert (2, detail) == (len(lines), json.loads(lines[0])["detail"])


def test_json_lines_of_threads_do_not_mix(tmp_path: Path) -> None:
    """Lines of four threads are all whole."""
    path = tmp_path / "events.jsonl"
    with JsonLinesSink(path) as sink, ThreadPoolExecutor(4) as pool:
        events = emitter(sink)
        list(pool.map(lambda number: events.event("save.block", nbytes=number, detail="x" * 5000), range(200)))
    assert set(range(200)) == {json.loads(line)["nbytes"] for line in path.read_text().splitlines()}


def test_stream_of_the_caller_is_left_open() -> None:
    """Leaving the sink closes a file that it opened, not a stream that it was given."""
    stream = io.StringIO()
    with JsonLinesSink(stream):
        pass
    assert not stream.closed


def test_recording_keeps_events_in_order() -> None:
    """All events of an emitter are kept, stamped with operation and rank."""
    sink = RecordingSink()
    with emitter(sink).span("save", nbytes=5):
        emitter(sink).event("save.step", file="a")
    assert ("save.begin", "save.step", "save.end") == sink.names()
    assert {("op1", 3)} == {(event.operation, event.rank) for event in sink.events}


def test_span_of_a_failure_names_the_error() -> None:
    """A span that fails ends with `failed`, its duration and the error, and the error passes."""
    sink = RecordingSink()
    with pytest.raises(KeyError), emitter(sink).span("save"):
        raise KeyError("mine")
    last = sink.events[-1]
    assert ("save.failed", "KeyError: 'mine'", True) == (last.name, last.detail, last.duration_s is not None)


def test_failing_sink_disturbs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sink that fails is logged; the other sinks get the event and the operation goes on."""
    closed = JsonLinesSink(tmp_path / "events.jsonl")
    closed.close()
    kept = RecordingSink()
    emitter(closed, kept).event("save.begin")
    assert (("save.begin",), 1) == (kept.names(), len(caplog.records))

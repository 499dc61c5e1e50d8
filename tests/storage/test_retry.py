"""When requests are made again, and what is said about it."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator

import pytest

from anyshard.errors import StorageDenied, StorageUnavailable
from anyshard.monitor.events import Emitter, Event
from anyshard.storage.retry import Judge, Request, Retrier, RetryPolicy, Verdict

REQUEST = Request("read", "s3://b/run/a", "a")


class Renewing(Judge):
    """Takes a PermissionError as credentials that have expired."""

    def __init__(self) -> None:
        self.num_renewals = 0

    def judge(self, error: Exception) -> Verdict:
        return Verdict.RENEW if isinstance(error, PermissionError) else super().judge(error)

    def renew(self, started_s: float) -> None:
        self.num_renewals += 1


class Recorder:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def failing(*errors: Exception) -> Callable[[], str]:
    """A request that fails with these errors in turn, then succeeds."""
    rest: Iterator[Exception] = iter(errors)

    def send() -> str:
        for error in rest:
            raise error
        return "done"

    return send


def make(policy: RetryPolicy | None = None, judge: Judge | None = None) -> tuple[Retrier, list[float]]:
    """A retrier that does not really wait, and the pauses it would have made."""
    pauses: list[float] = []
    return Retrier(policy or RetryPolicy(), judge or Judge(), pause=pauses.append), pauses


def test_passing_faults_are_retried() -> None:
    """A TLS error, a reset and a time-out are each followed by another attempt (B049)."""
    retrier, pauses = make()
    errors = (ssl.SSLError("bad record mac"), ConnectionResetError("reset"), TimeoutError("late"))
    assert (retrier.run(failing(*errors), REQUEST), len(pauses)) == ("done", 3)


def test_a_refusal_is_final() -> None:
    """An error that would come again is raised at once as it is (B049)."""
    retrier, pauses = make()
    with pytest.raises(StorageDenied, match="no"):
        retrier.run(failing(StorageDenied("no", file="a")), REQUEST)
    assert pauses == []


def test_attempts_are_bounded() -> None:
    """After the last attempt the error says what was tried, how often, and why the last one failed."""
    retrier, pauses = make(RetryPolicy(max_attempts=3))
    with pytest.raises(StorageUnavailable, match="could not read s3://b/run/a: attempts: 3, .*refused 3") as caught:
        retrier.run(failing(*(ConnectionError(f"refused {number}") for number in range(1, 9))), REQUEST)
    assert (len(pauses), caught.value.attempts, caught.value.file) == (2, 3, "a")
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def test_pauses_grow_and_are_spread() -> None:
    """Each pause lies between 0 and a limit that doubles up to the longest one."""
    retrier, pauses = make(RetryPolicy(max_attempts=13, budget_s=1e6, first_pause_s=1.0, longest_pause_s=8.0))
    retrier.run(failing(*(ConnectionError("refused") for _ in range(12))), REQUEST)
    limits = [min(8.0, 2.0**number) for number in range(12)]
    assert all(0.0 <= pause <= limit for pause, limit in zip(pauses, limits, strict=True))
    assert len(set(pauses)) == len(pauses)


def test_the_budget_is_shared() -> None:
    """What one request has waited is missing to the next one, which then ends early and says so."""
    retrier, pauses = make(RetryPolicy(max_attempts=10_000, budget_s=20.0, first_pause_s=5.0, longest_pause_s=5.0))
    for _ in range(2):
        with pytest.raises(StorageUnavailable, match="retry_budget_s"):
            retrier.run(failing(*(ConnectionError("refused") for _ in range(9_000))), REQUEST)
    assert 10.0 < sum(pauses) <= 20.0


def test_a_success_gives_the_budget_back() -> None:
    """Faults that heal at once never end an operation, however many there are and however long it takes."""
    retrier, pauses = make(RetryPolicy(budget_s=1.0, first_pause_s=0.3))
    for _ in range(1000):
        retrier.run(failing(ConnectionError("reset")), REQUEST)
    assert (len(pauses), sum(pauses) > 100.0) == (1000, True)


def test_expired_credentials_are_renewed() -> None:
    """Credentials that have expired are made anew before the next attempt; fresh ones that are refused as well are final."""
    judge = Renewing()
    retrier, _ = make(judge=judge)
    assert (retrier.run(failing(PermissionError("expired")), REQUEST), judge.num_renewals) == ("done", 1)
    with pytest.raises(PermissionError, match="expired"):
        retrier.run(failing(*(PermissionError("expired") for _ in range(9))), REQUEST)


def test_retries_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each one is an event and a line at DEBUG, all together are one warning when the retrier is let go of."""
    recorder = Recorder()
    retrier = Retrier(RetryPolicy(), Judge(), events=Emitter([recorder], operation="o", rank=0), pause=lambda _: None)
    with caplog.at_level(logging.DEBUG, logger="anyshard.storage.retry"):
        for _ in range(2):
            retrier.run(failing(ConnectionError("refused"), ConnectionError("refused")), REQUEST)
        assert {"DEBUG"} == {record.levelname for record in caplog.records}
        del retrier
    assert [("storage.retry", "a")] * 4 == [(event.name, event.file) for event in recorder.events]
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "requests made again: 4" in warning.getMessage()


def test_silence_where_nothing_was_retried(caplog: pytest.LogCaptureFixture) -> None:
    """No summary without a retry."""
    retrier, _ = make()
    retrier.run(failing(), REQUEST)
    retrier.log_summary()
    assert caplog.records == []

"""The lease of a run: a small file that says who is at work on it, so that a second writer hears so early and clearly.

It is advice. It licenses nobody to delete or to publish, and whoever takes it wrongly harms nothing: what keeps steps whole are
the generations of their records. Ages are by the store's clock, and a holder that is alive is told by what it writes.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, final

from anyshard.errors import AnyshardError, BlobExists, BlobNotFound, CheckpointDamaged, InvalidOption, RunInUse, StorageUnguarded
from anyshard.records.names import make_attempt
from anyshard.records.strict_json import decode_object, encode_object
from anyshard.storage.protocol import Store
from anyshard.threads import start_thread

logger = logging.getLogger(__name__)

KEY: Final = "lease.json"
TTL_S: Final = 60.0

_MAX_NBYTES = 1 << 16
_MAX_TTL_S = 600.0  # however long another writer says that its lease is good for
_TRIES = 5
_PATIENCE_S = 5.0  # with a refresh that hangs
_UNSET_JOBS = ("", "none")  # torchrun's run id where nobody has given one


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Who holds a run: `place` is the boot and the namespace in which `pid` means something, `count` rises with each refresh."""

    incarnation: str
    host: str
    place: str
    pid: int
    job: str
    run_id: str
    ttl_s: float
    count: int = 0

    def encode(self) -> bytes:
        """As JSON."""
        return encode_object(asdict(self)) + b"\n"


def decode_lease(data: bytes) -> LeaseRecord | None:
    """The record, or None if these bytes are none."""
    try:
        members = decode_object(data.removesuffix(b"\n"), file=KEY)
        texts = {name: members.text(name) for name in ("incarnation", "host", "place", "job", "run_id")}
        numbers = {name: members.integer(name, minimum=0) for name in ("pid", "count")}
        ttl_s = members.values.get("ttl_s")
    except CheckpointDamaged:
        return None
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or ttl_s <= 0:
        return None
    return LeaseRecord(**texts, pid=numbers["pid"], count=numbers["count"], ttl_s=float(ttl_s))


def check_ttl(ttl_s: object) -> float:
    """For how many seconds a lease may be good."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= _MAX_TTL_S:
        raise InvalidOption(f"lease_ttl_s: expected a number of seconds above 0, at most {_MAX_TTL_S:g}, found {ttl_s!r}")
    return float(ttl_s)


def describe_self(ttl_s: float) -> LeaseRecord:
    """The record that this process would write: a new incarnation."""
    jobs = (os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("SLURM_JOB_ID", ""))
    job = next((job for job in jobs if job not in _UNSET_JOBS), "")
    return LeaseRecord(make_attempt(), socket.gethostname(), _find_place(), os.getpid(), job, "", float(ttl_s))


def _find_place() -> str:
    """Where the number of this process has a meaning; hosts and containers may share a name. Empty if it cannot be found out."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lease as it was found; `record` is None if it cannot be read."""

    data: bytes
    record: LeaseRecord | None
    age_s: float

    def describe(self) -> str:
        if self.record is None:
            return f"an unreadable {KEY}, written {self.age_s:.0f} s ago"
        job = f" of job {self.record.job}" if self.record.job else ""
        return f"process {self.record.pid} on host {self.record.host}{job}, which last wrote its lease {self.age_s:.0f} s ago"


@final
class Lease:
    """The lease of one Run, on the coordinator. Taken once, refreshed by a thread of its own until it is released or lost."""

    def __init__(self, store: Store, own: LeaseRecord, *, pause: Callable[[float], None] = time.sleep) -> None:
        self.is_held = False
        self._store = store
        self._own = own
        self._run_id = own.run_id
        self._pause = pause
        self._lost_to: _Seen | None = None
        self._replaced: set[str] = set()  # incarnations that it was taken from
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def take(self, run_id: str = "") -> None:
        """Return holding the lease; raises `RunInUse` if another writer is alive, as soon as that shows.

        It is free if it is not there, was not refreshed within its time, or is of a process that has died on this host. Else this
        waits for a sign of life, at most until its time is over; if it is of this job, which may have been started again on
        another host, no longer than a living writer needs to give one.
        """
        if self.is_held:
            return
        self._run_id = run_id
        self._store.prepare([])
        for _ in range(_TRIES):
            seen = self._look()
            if seen is None:
                if self._create():
                    self._hold()
                    return
            elif self._is_free(seen) or self._outlasts(seen):
                if seen.record is not None:
                    self._replaced.add(seen.record.incarnation)
                self._put()
                self._hold()
                return
        raise self._in_use(seen)

    def update(self, run_id: str) -> None:
        """Let the lease say from now on which run it is about."""
        self._run_id = run_id

    def refresh(self) -> None:
        """Write the lease anew, unless another writer has it by now, which is noted."""
        with self._lock:
            if self.is_held and not self._is_lost():
                self._own = replace(self._own, count=self._own.count + 1)
                self._put()

    def check(self) -> None:
        """Raise `RunInUse` if this Run has had the lease and another writer has it now. Storage that cannot tell is no reason."""
        if not self.is_held:
            return
        if self._lock.acquire(timeout=_PATIENCE_S):  # else a refresh hangs, which is no reason for a save to hang as well
            try:
                with suppress(AnyshardError):
                    self._is_lost()
            finally:
                self._lock.release()
        if self._lost_to is not None:
            raise self._in_use(self._lost_to)

    def abandon(self) -> None:
        """Stop refreshing, so that it is free after its time: for a Run that was dropped without being closed. Asks nothing."""
        self._ended.set()

    def release(self) -> None:
        """Stop refreshing, and remove the lease if it is still ours. Never raises."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                logger.warning("%s: %s is left, for its refresh hangs: a restart may wait for it", self._store.url, KEY)
                return
        if not self.is_held:
            return
        try:
            if not self._is_lost():
                self._store.delete([KEY])
        except AnyshardError as error:
            logger.warning("%s: %s could not be removed, so a restart may wait for it: %s", self._store.url, KEY, error)
        self.is_held = False

    # --------------------------------------------------------------------------------------------------------------- parts

    def _hold(self) -> None:
        """Begin to refresh. Two writers may have come at the same moment; then the one whose record does not stay has lost."""
        found = self._look()
        if found is not None and self._is_rival(found):
            raise self._in_use(found)
        self.is_held = True
        self._thread = threading.Thread(target=self._keep, name="anyshard-lease", daemon=True)
        start_thread(self._thread)

    def _keep(self) -> None:
        while not self._ended.wait(self._own.ttl_s / 3):
            try:
                self.refresh()
            except AnyshardError as error:
                logger.warning("%s: %s could not be refreshed: %s", self._store.url, KEY, error)
            except Exception:  # the border of the thread: whatever a store of the user's raises
                logger.exception("%s: %s could not be refreshed", self._store.url, KEY)
            if self._lost_to is not None:
                logger.error("%s", self._in_use(self._lost_to))
                return

    def _create(self) -> bool:
        """Write the lease where there is none; false if another writer was quicker."""
        try:
            self._store.create(KEY, self._encode(), token=self._own.incarnation)
        except BlobExists:
            return False
        except StorageUnguarded:
            self._put()
        return True

    def _put(self) -> None:
        self._store.put(KEY, self._encode(), token=self._own.incarnation)

    def _encode(self) -> bytes:
        return replace(self._own, run_id=self._run_id).encode()

    def _is_lost(self) -> bool:
        if self._lost_to is None and not self._is_own(self._read()):
            seen = self._look()
            if seen is not None and self._is_rival(seen):
                self._lost_to = seen
            elif seen is not None and not self._is_own(seen.data):
                self._put()  # over a refresh that came late, of the writer that it was taken from, who is told so
        return self._lost_to is not None

    def _is_own(self, data: bytes | None) -> bool:
        record = None if data is None else decode_lease(data)
        return record is not None and record.incarnation == self._own.incarnation

    def _is_rival(self, seen: _Seen) -> bool:
        """Whether a lease is of another writer, and not of one that this one has taken the place of."""
        return not self._is_own(seen.data) and (seen.record is None or seen.record.incarnation not in self._replaced)

    def _read(self) -> bytes | None:
        with suppress(BlobNotFound):
            return self._store.read(KEY, max_nbytes=_MAX_NBYTES)
        return None

    def _look(self) -> _Seen | None:
        """The lease as it is now; None if there is none."""
        data = self._read()
        if data is None:
            return None
        written_s = [entry.modified_s for entry in self._store.list("").entries if entry.key == KEY]
        return _Seen(data, decode_lease(data), max(0.0, self._store.now_s() - written_s[0]) if written_s else 0.0)

    def _ttl_s(self, seen: _Seen) -> float:
        return self._own.ttl_s if seen.record is None else min(seen.record.ttl_s, _MAX_TTL_S)

    def _is_free(self, seen: _Seen) -> bool:
        """Whether its holder is known not to be at work any more."""
        record = seen.record
        if record is None or seen.age_s > self._ttl_s(seen):
            return seen.age_s > self._ttl_s(seen)
        return self._is_here(record) and not _is_alive(record.pid)

    def _is_here(self, record: LeaseRecord) -> bool:
        """Whether a record is of a process that this one can see."""
        return record.place == self._own.place != ""

    def _outlasts(self, seen: _Seen) -> bool:
        """Wait for a sign of life of the holder, which raises `RunInUse`; true if there was none until its time was over."""
        ttl_s, record = self._ttl_s(seen), seen.record
        left_s, pause_s = 1.25 * ttl_s - seen.age_s, ttl_s / 20
        if record is not None and record.job == self._own.job != "" and not self._is_here(record):
            left_s = min(left_s, ttl_s / 2)  # one that lives refreshes it three times in its time
        logger.info("%s: waiting at most %.0f s for %s, to see whether it is alive", self._store.url, left_s, seen.describe())
        while left_s > 0:
            self._pause(pause_s)
            left_s -= pause_s
            found = self._look()
            if found is None:
                return False  # released: look again
            if found.data != seen.data:
                raise self._in_use(found)
        return True

    def _in_use(self, seen: _Seen | None) -> RunInUse:
        holder = "others that come and go" if seen is None else seen.describe()
        return RunInUse(
            f"{self._store.url}: expected to be the only writer of this run, found {holder}. Nothing was written. End that "
            f"job or wait for its end, or save to another directory; if it is dead for sure, remove {KEY} there",
            host=seen.record.host if seen is not None and seen.record is not None else "",
            pid=seen.record.pid if seen is not None and seen.record is not None else 0,
        )


def _is_alive(pid: int) -> bool:
    """Whether a process of this number runs on this host; one that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1] != ["Z"]
    return True

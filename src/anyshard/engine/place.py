"""Place: from the verified bytes of one read to the destinations."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from anyshard.engine.bell import Bell
from anyshard.errors import StorageStuck
from anyshard.records.handles import BITS_DTYPES, Destination
from anyshard.records.load_plan import LoadPlan

# NumPy copies let other threads run and cost 1 us more to start than a slice assignment, which does not.
_BIG_NBYTES = 64 * 1024
_POLL_S = 0.1


class Placer:
    """Copies the pieces of a plan's reads to where they belong, until it is closed. Thread-safe: pieces never overlap."""

    def __init__(self, plan: LoadPlan, destinations: Sequence[Destination]) -> None:
        self._plan = plan
        self._destinations = destinations
        self._memories = [destination.memory() for destination in destinations]
        self._num_placing = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._bell = Bell()

    def place(self, read: int, data: memoryview) -> bool:
        """Copy every piece of the read, whose bytes are `data`; false, and nothing copied, if the placer is closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._num_placing += 1
        try:
            self._place(read, data)
        finally:
            with self._lock:
                self._num_placing -= 1
            self._bell.ring()
        return True

    def close(self, timeout_s: float) -> None:
        """From here on nothing is placed: a thread that a failed load left behind must not write over what comes after it.

        Raises `StorageStuck` if a copy that has begun does not end in time (to a device that hangs, say).
        """
        with self._lock:
            self._is_closed = True
        deadline_s = time.monotonic() + timeout_s
        while self._num_placing:  # copies in memory, which end soon
            if time.monotonic() >= deadline_s:
                raise StorageStuck(
                    f"expected {self._num_placing} copies into the app state to end within {timeout_s:.1f} s, found that they go "
                    "on: its tensors may still change. Use it no more; check its devices, then begin a new process",
                    file="",
                )
            self._bell.wait(min(_POLL_S, timeout_s))

    def _place(self, read: int, data: memoryview) -> None:
        plan, start = self._plan, int(self._plan.reads.start[read])
        first, last = int(plan.reads.first_piece[read]), int(plan.reads.first_piece[read + 1])
        rows = slice(first, last)
        columns = (plan.pieces.wanted, plan.pieces.wanted_position, plan.pieces.position, plan.pieces.nbytes)
        pieces = zip(range(first, last), *(column[rows].tolist() for column in columns), strict=True)
        for piece, wanted, target, position, nbytes in pieces:
            memory = self._memories[wanted]
            if target < 0 or memory is None:
                self._place_steps(piece, data, start)
            else:
                _copy(memory[target : target + nbytes], data[position - start : position - start + nbytes])

    def _place_steps(self, piece: int, data: memoryview, start: int) -> None:
        plan = self._plan
        destination = self._destinations[int(plan.pieces.wanted[piece])]
        itemsize = int(plan.items.itemsize[plan.pieces.item[piece]])
        for step in plan.place_steps(piece):
            bits = np.frombuffer(data, BITS_DTYPES[itemsize], step.nbytes // itemsize, step.position - start).reshape(step.shape)
            destination.place(step.where, bits[step.inside])


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _BIG_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

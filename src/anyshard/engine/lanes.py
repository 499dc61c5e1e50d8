"""Lanes: several blobs written at once to a store that takes each of them front to back only, one write after the other.

The pieces of a blob wait in its lane, and one thread at a time takes them out. Threads never wait for a piece: one that finds
its lane empty leaves it, and is called again by the next piece. So however few blocks there are, each of them is on its way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from anyshard.engine.crew import Crew
from anyshard.engine.sending import Piece, Sending


@dataclass(slots=True, eq=False)
class Lane:
    """The pieces of one try at a blob, in their order. What it says changes under the lock of its `Lanes`."""

    sending: Sending
    pieces: deque[Piece] = field(default_factory=deque)
    is_open: bool = False
    is_running: bool = False


@final
class Lanes:
    """At most `num_open` lanes are open at once, the others wait in the order in which they were added.

    A lane stays open until its try is over. All methods are called by the thread that owns the crew, which must have as many
    threads. No piece is ever lost: that of a try that is over is released.

    The `num_blocks` blocks that there are go to open lanes first, and no lane gets more than its share as long as others want
    some: the blobs that end first would else leave all blocks to the slowest. Those for lanes that wait are kept until these
    are open. Nobody waits for them: they are given only while every lane before has a block, or needs none any more, and what
    an open lane has is written and free again.
    """

    def __init__(self, crew: Crew, num_open: int, *, num_blocks: int) -> None:
        self._crew = crew
        self._num_free = num_open
        self._share = max(1, num_blocks // num_open)
        self._waiting: deque[Lane] = deque()
        self._lock = threading.Lock()

    @property
    def have_room(self) -> bool:
        """Whether the next lane that is added will be open at once."""
        return self._num_free > 0

    def add(self, sending: Sending) -> Lane:
        """A new lane without pieces, open if there is room."""
        lane = Lane(sending)
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                lane.is_open = True
            else:
                self._waiting.append(lane)
        return lane

    def put(self, lane: Lane, piece: Piece) -> None:
        """Have a piece written after those that were put before it."""
        with self._lock:
            is_in_vain = lane.sending.is_over and not lane.is_running
            if not is_in_vain:
                lane.pieces.append(piece)
            has_to_start = lane.is_open and not lane.is_running and not is_in_vain
            lane.is_running |= has_to_start
        if is_in_vain:
            lane.sending.release(piece)
        if has_to_start:
            self._crew.submit(partial(self._run, lane))

    def have_shares(self, lanes: Sequence[Lane]) -> bool:
        """Whether none of these lanes should get a further block now, if there are others."""
        return all(lane.sending.num_blocks >= self._share for lane in lanes)

    def choose(self, lanes: Sequence[Lane]) -> int:
        """Which of these lanes, in the order in which they were added, should get the next block."""
        with self._lock:
            return min(range(len(lanes)), key=lambda i: self._rank(lanes[i]))

    def _rank(self, lane: Lane) -> tuple[bool, bool, int]:
        """Lanes without their share first, open ones before others; of these the one that runs out of pieces soonest."""
        sending = lane.sending
        return sending.num_blocks >= self._share, not lane.is_open, sending.num_expected if lane.is_open else 0

    def _run(self, lane: Lane) -> None:
        """Write what is in a lane, and once its blob is over what is in the lane that takes its place."""
        current: Lane | None = lane
        while current is not None:
            current = self._write_next(current)

    def _write_next(self, lane: Lane) -> Lane | None:
        with self._lock:
            if not lane.pieces and lane.sending.is_over:
                lane.is_running = lane.is_open = False
                if (following := self._open_next()) is None:
                    return None
                lane = following
            lane.is_running = bool(lane.pieces)
            if not lane.pieces:
                return None
            piece = lane.pieces.popleft()
        lane.sending.send(piece)
        return lane

    def _open_next(self) -> Lane | None:
        if not self._waiting:
            self._num_free += 1
            return None
        lane = self._waiting.popleft()
        lane.is_open = True
        return lane

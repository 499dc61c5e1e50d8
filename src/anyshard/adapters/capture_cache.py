"""Takes an app state apart quickly if it has the structure and the very tensors that it had at the last save."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeAlias, final

from anyshard.adapters.capture import States, take_apart
from anyshard.adapters.capture_frame import Frame, Member
from anyshard.adapters.replay import Changed
from anyshard.adapters.survey import check_app_state
from anyshard.records.captured import Captured
from anyshard.records.values import ValueRegistry

_KEPT = 4  # app states with other sections, as many as plans are kept

_Key: TypeAlias = tuple[tuple[str, ...], int, int]


@final
class CaptureCache:
    """The records of the last app states by the names of their sections. Holds no tensor, module or optimizer.

    Several threads may use it at once, for app states of their own.
    """

    def __init__(self) -> None:
        self.num_hits = 0
        self._frames: dict[_Key, Frame] = {}
        self._lock = threading.Lock()

    def capture(
        self, app_state: Mapping[str, object], *, registry: ValueRegistry, rank: int = 0, world_size: int = 1
    ) -> Captured:
        """What `capture` gives. If it is as it was the `shards` are the same object, and so are the `constants` in the trees.

        No method of the user's objects is called more often than by `capture`.
        """
        check_app_state(app_state)
        key, member = (tuple(app_state), rank, world_size), Member(rank, world_size, registry)
        states: States = {}
        frame = self._frames.get(key)
        if frame is not None:
            try:
                captured = frame.replay(app_state, member, states)
            except (Changed, RecursionError):
                pass
            else:
                self.num_hits += 1
                return captured
        return self._take_anew(app_state, key, registry, states)

    def _take_anew(self, app_state: Mapping[str, object], key: _Key, registry: ValueRegistry, states: States) -> Captured:
        _, rank, world_size = key
        taken = take_apart(app_state, registry=registry, rank=rank, world_size=world_size, states=states)
        try:
            frame = Frame(app_state, taken)
        except (Changed, RecursionError):
            with self._lock:
                self._frames.pop(key, None)
            return taken.captured
        self._keep(key, frame)
        return replace(taken.captured, constants=frame.constants)

    def _keep(self, key: _Key, frame: Frame) -> None:
        with self._lock:
            self._frames.pop(key, None)
            self._frames[key] = frame
            for oldest in list(islice(self._frames, max(len(self._frames) - _KEPT, 0))):
                del self._frames[oldest]

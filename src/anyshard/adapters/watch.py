"""Knows objects again without keeping them alive: by their ids, as long as none of them has died."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, final


@final
class Watch:
    """Watches over objects whose ids somebody has noted. An id is theirs and nobody else's while `is_intact`."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._deaths: list[weakref.ref[Any]] = []

    @property
    def is_intact(self) -> bool:
        """Whether all objects are alive. To be asked after ids were compared: then they were alive meanwhile."""
        return not self._deaths

    def note(self, objects: Sequence[object]) -> list[int]:
        """The ids of these objects, which are watched from now on; None, which lives for ever, may be among them."""
        self._add(item for item in objects if item is not None)
        return list(map(id, objects))

    def _add(self, objects: Iterable[object]) -> None:
        for item in objects:
            if id(item) not in self._refs:
                self._refs[id(item)] = weakref.ref(item, self._deaths.append)

"""Images: a blob's bytes from the head to the last extent, as they lie in the arena, so that they are written from there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anyshard.engine.arena import Arena
from anyshard.engine.slots import BlobSlots, tabulate_slots
from anyshard.records.layout import align_up
from anyshard.records.tables import IntColumn, SavePlan

_PAGE_NBYTES = 4096  # what direct I/O needs of memory


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where the images of a plan's blobs lie in an arena; made once per plan, holds no tensor.

    An image is the bytes [0, end of the last extent) of a blob to the letter: 64 bytes of head, extents, zeros in the gaps. It
    begins at `start` of the arena, at a whole page, and is `nbytes` long (without extents: the head alone). The extent of row i
    of the plan's shard table is the `row_nbytes[i]` bytes at `row_position[i]` of the arena; both are 0 for a row without
    elements, which no blob has. `slots` is what the tails say. An arena needs `total_nbytes`, one page at least.
    """

    start: tuple[int, ...]
    nbytes: tuple[int, ...]
    row_position: IntColumn
    row_nbytes: IntColumn
    total_nbytes: int
    slots: tuple[BlobSlots, ...]


def lay_out_images(plan: SavePlan) -> ImageLayout:
    """Put the images of all blobs one behind the other, in the plan's order."""
    slots = tuple(tabulate_slots(plan.shards, of) for of in plan.blobs)
    row_position, row_nbytes = (np.zeros(len(plan.shards), dtype=np.int64) for _ in range(2))
    starts, end = [], 0
    for blob in slots:
        row_position[blob.rows], row_nbytes[blob.rows] = end + blob.position, blob.nbytes
        starts.append(end)
        end = align_up(end + blob.end, _PAGE_NBYTES)
    nbytes = tuple(blob.end for blob in slots)
    return ImageLayout(tuple(starts), nbytes, row_position, row_nbytes, max(end, _PAGE_NBYTES), slots)


@dataclass(frozen=True, slots=True)
class Images:
    """The images of one plan in an arena. Raises `ValueError` if it is too small for them."""

    layout: ImageLayout
    arena: Arena

    def __post_init__(self) -> None:
        if (found := len(self.arena.memory)) < self.layout.total_nbytes:
            raise ValueError(f"expected an arena of {self.layout.total_nbytes} bytes, found {found}")

    def memory(self, blob: int) -> memoryview:
        """The image of one blob."""
        start = self.layout.start[blob]
        return self.arena.memory[start : start + self.layout.nbytes[blob]]

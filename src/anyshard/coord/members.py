"""Who takes part: the ranks of a group in order, and which of them this process is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COORDINATOR = 0  # the first rank of a group decides what has to be decided once

_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Members:
    """`ranks[i]` is the number in the job of rank `i` of the group; `rank` is this process in the group."""

    rank: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), f"rank {self.rank} of {len(self.ranks)}"
        assert len(set(self.ranks)) == len(self.ranks), "a rank stands twice in a group"

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this process makes the global decisions."""
        return self.rank == COORDINATOR

    @property
    def job_rank(self) -> int:
        """This process's number in the job."""
        return self.ranks[self.rank]

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks of the group but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def describe(self, ranks: Iterable[int]) -> str:
        """Ranks of the group for a message, by their numbers in the job."""
        numbers = [str(self.ranks[rank]) for rank in ranks]
        more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:_SHOWN])}{more}"

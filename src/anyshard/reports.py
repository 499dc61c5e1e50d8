"""What a save or load tells its caller when it is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed save: where, which generation and attempt, how much and how long. `warnings` are worth a look.

    `num_tensors` and `nbytes` are of all ranks together, `written_nbytes` is what this rank wrote. `plan_was_cached` says that
    the structure was that of an earlier save, so that nothing had to be planned. `differing_values` are addresses of plain values
    that were not the same on all ranks (that of the first rank is stored); `num_differing_buffers` counts modules' buffers.
    """

    url: str
    step: int | None
    generation: int
    attempt: str
    num_tensors: int
    nbytes: int
    duration_s: float
    written_nbytes: int
    plan_was_cached: bool
    differing_values: tuple[str, ...] = ()
    num_differing_buffers: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A finished load: what was filled on this rank and what was not. All tuples hold addresses, but `warnings`.

    `nbytes` counts bytes filled, `read_nbytes` bytes fetched. `missing` and `unexpected` are empty after a strict load;
    `not_asked_for` are top-level names of the checkpoint that the app state does not have; `created` are tensors
    and arrays that were newly made, as there was none to fill: in state that an optimizer lacked, in values, for statefuls;
    `replaced_values` are values that took their stored value.
    """

    url: str
    step: int | None
    generation: int
    attempt: str
    num_tensors: int
    nbytes: int
    read_nbytes: int
    duration_s: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    not_asked_for: tuple[str, ...] = ()
    replaced_values: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

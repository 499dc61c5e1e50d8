"""What a save, a load or a rehearsal tells its caller when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_SHOWN = 6  # lines of a kind
_SHOWN_LOADS = 9
_NAMED = 3  # addresses in a line
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


@dataclass(frozen=True, slots=True)
class StagingReport:
    """How an asynchronous save was staged on this rank.

    `nbytes` were staged in all into an arena of `arena_nbytes`, `lazy_nbytes` of them after the call had returned. `eager` says
    why the rest was not, by addresses; it is empty if that was not asked for.
    """

    nbytes: int
    lazy_nbytes: int
    arena_nbytes: int
    eager: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed save: where, which generation and attempt, how much and how long. `warnings` are worth a look.

    `num_tensors` and `nbytes` are of all ranks together, `written_nbytes` is what this rank wrote. `plan_was_cached` says that
    the structure was that of an earlier save, so that nothing had to be planned. `differing_values` are addresses of plain values
    that were not the same on all ranks (that of the first rank is stored); `num_differing_buffers` counts modules' buffers.
    `stall_s` is how long the caller was held: all of `duration_s` for `save`, the call for `async_save` and what steps of
    optimizers have waited for a lazy snapshot. `staging` is None for `save`.
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
    stall_s: float = 0.0
    staging: StagingReport | None = None

    def __str__(self) -> str:
        warnings = "".join(f"\n  {warning}" for warning in self.warnings)
        return (
            f"{self.url}: {self.num_tensors} tensors, {self.nbytes / 1e6:.1f} MB saved in {self.duration_s:.3f} s, which held "
            f"the caller for {self.stall_s:.3f} s{warnings}"
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A finished load: what was filled on this rank and what was not. All tuples hold addresses, but `warnings`.

    `nbytes` counts bytes filled, `read_nbytes` bytes fetched. `missing` and `unexpected` are empty after a strict load;
    `not_asked_for` are top-level names of the checkpoint that the app state does not have; `created` are tensors
    and arrays that were newly made, as there was none to fill: in state that an optimizer lacked, in values, for statefuls;
    `replaced_values` are values that took their stored value. `skipped` are newer steps of the run that could not be loaded, and
    why.
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
    skipped: tuple[tuple[int, str], ...] = ()

    @property
    def next_step(self) -> int:
        """The number of the step that follows the one that was loaded; 0 if that has none."""
        return 0 if self.step is None else self.step + 1

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        lists = ("missing", "unexpected", "not_asked_for", "created")
        counts = "".join(f", {len(found)} {name}" for name in lists if (found := getattr(self, name)))
        warnings = "".join(f"\n  {warning}" for warning in self.warnings)
        return (
            f"{self.url}: {step}, {self.num_tensors} tensors, {self.nbytes / 1e6:.1f} MB filled on this rank in "
            f"{self.duration_s:.3f} s{counts}{warnings}"
        )


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """What a load of the rehearsed checkpoint would read on the rank of a layout that has the most to read.

    `layout` is "today" or a layout's mesh in words. `num_blobs` are those that tensors are read from.
    """

    layout: str
    num_ranks: int
    wanted_nbytes: int
    read_nbytes: int
    num_blobs: int

    @property
    def read_amplification(self) -> float:
        """Bytes read by bytes wanted."""
        return self.read_nbytes / self.wanted_nbytes if self.wanted_nbytes else 1.0


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """A rehearsal that found no fault: what saves will cost, and what loads of them. Printed, it is a page; `as_dict` is JSON.

    `num_tensors`, `nbytes`, `num_files` and `loads` are of one checkpoint of all ranks, `smallest_rank_nbytes` and
    `largest_rank_nbytes` what the ranks write that have least and most of it. `needed_nbytes` is for `num_steps` checkpoints,
    `free_nbytes` None if the storage cannot tell. `staging` is of this rank. Rates are bytes a second: `copy_rate` of this rank
    into its arena, `write_rate` of all ranks together into the storage. `stall_s` and `duration_s` are what an `async_save` is
    expected to hold the slowest rank up, and to take in all; `num_steps_between` is how many training steps that is, if their
    time was given: to save more often than that is to wait for saves. `warnings` are worth a look.
    """

    url: str
    num_ranks: int
    num_tensors: int
    nbytes: int
    smallest_rank_nbytes: int
    largest_rank_nbytes: int
    num_files: int
    num_steps: int
    needed_nbytes: int
    free_nbytes: int | None
    staging: StagingReport
    copy_rate: float
    write_rate: float
    stall_s: float
    duration_s: float
    num_steps_between: int | None = None
    loads: tuple[LoadForecast, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        report = asdict(self)
        report["staging"]["eager"] = {reason: list(addresses) for reason, addresses in self.staging.eager.items()}
        report["loads"] = [{**asdict(load), "read_amplification": load.read_amplification} for load in self.loads]
        return {**report, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        return "\n".join(self._list_lines())

    def _list_lines(self) -> Iterator[str]:
        """Few enough lines for a page."""
        staging, free = self.staging, "unknown" if self.free_nbytes is None else _in_words(self.free_nbytes)
        yield f"rehearsal of saves to {self.url}: no fault found"
        yield f"  ranks         {self.num_ranks}"
        yield f"  checkpoint    {_in_words(self.nbytes)} in {self.num_tensors} tensors and their values, {self.num_files} files"
        yield f"  per rank      {_in_words(self.smallest_rank_nbytes)} to {_in_words(self.largest_rank_nbytes)}"
        yield f"  space         {_in_words(self.needed_nbytes)} needed for {self.num_steps} checkpoint(s), {free} free"
        yield f"  arena         {_in_words(staging.arena_nbytes)} on this rank, filled at {_in_words(self.copy_rate)}/s"
        yield f"  storage       {_in_words(self.write_rate)}/s by all ranks together, sync included"
        yield f"  async_save    stall {self.stall_s:.3g} s, durable and committed after {self.duration_s:.3g} s"
        if self.num_steps_between is not None:
            yield f"                that is {self.num_steps_between} training step(s): save no more often"
        eager_nbytes, lazy_nbytes = staging.nbytes - staging.lazy_nbytes, staging.lazy_nbytes
        yield f"  staged        {_in_words(eager_nbytes)} at the call, {_in_words(lazy_nbytes)} while training goes on"
        yield from _cut([f"    at the call because {reason}: {_name_some(at)}" for reason, at in staging.eager.items()])
        for load in self.loads[:_SHOWN_LOADS]:
            yield _describe(load)
        yield from _cut([f"  warning       {warning}" for warning in self.warnings])


def _describe(load: LoadForecast) -> str:
    read, wanted = _in_words(load.read_nbytes), _in_words(load.wanted_nbytes)
    most = f"{read} read for {wanted} ({load.read_amplification:.2f}x) from {load.num_blobs} blob(s)"
    return f"  load          {load.layout}, {load.num_ranks} rank(s): at most {most}"


def _cut(lines: Sequence[str]) -> list[str]:
    more = [f"    ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _name_some(addresses: Sequence[str]) -> str:
    more = f" and {len(addresses) - _NAMED} more" if len(addresses) > _NAMED else ""
    return ", ".join(addresses[:_NAMED]) + more


def _in_words(nbytes: float) -> str:
    """A number of bytes for people: three digits and a unit."""
    size, units = float(nbytes), iter(_UNITS)
    unit = next(units)
    while size >= 999.5 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"

"""Compares what several ranks hold alike before a save is committed: replicas of tensors, modules' buffers, plain values.

A rank reads what it holds once, when it holds it still, and keeps digests. It posts one per set of what the same ranks hold; only
where they differ the coordinator asks all for the digests of single addresses, so as to say which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray

from anyshard.agreed_plan import AgreedPlan, GlobalPlan, Structure
from anyshard.coord.agreement import Agreement
from anyshard.coord.looks import Rarely
from anyshard.engine.samples import Sampling, digest_rows, digest_sets, list_row_digests, make_seed
from anyshard.errors import InvalidAppState
from anyshard.own_values import digest_own_values, name_own_values
from anyshard.planning.owners import PartDifference, compare_parts
from anyshard.planning.part_sets import digest_part_sets
from anyshard.planning.replica_check import compare_sets, explain
from anyshard.planning.replicas import NO_SET
from anyshard.records.captured import Captured
from anyshard.records.handles import Source
from anyshard.records.rank_messages import Answer, Durable, Question, read_message
from anyshard.records.replica_digests import (
    decode_row_digests,
    decode_set_digests,
    encode_row_digests,
    encode_set_digests,
)
from anyshard.records.value_parts import OWN_PARTS, PartList, decode_part_list, encode_part_list, list_leaves
from anyshard.records.values import ValueRegistry

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Strictness:
    """Whether replicas are compared, in full or by samples, and whether differing values are an error."""

    is_off: bool
    in_full: bool
    refuses_values: bool

    @classmethod
    def of(cls, replica_check: str, on_differing_values: str, *, is_first: bool) -> Strictness:
        """At the first save of a structure everything is compared in full and nothing is passed over."""
        return cls(
            is_off=replica_check == "off",
            in_full=is_first or replica_check == "full",
            refuses_values=is_first or on_differing_values == "error",
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds that others may hold too, as it was when it was read. No tensors.

    `rows` has the digest of each of the rank's rows that is in a replica set, and nothing if replicas are not compared. `parts`
    are those of its value trees, and behind them what is per rank, in the order of `AgreedPlan.part_set`. `leaves` gives the
    parts of the value trees by single values, and is asked only if values differ.
    """

    rows: Mapping[int, bytes]
    parts: PartList
    leaves: Callable[[], PartList]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a rank reads what it holds.

    Ranks must read alike: under the same `subject`, which chooses the places of samples, and equally strictly. `check`, called at
    most once a second, ends the reading by an exception. `later` marks rows that `hold` leaves to `hold_rest`.
    """

    subject: str
    strictness: Strictness
    check: Callable[[], None]
    later: NDArray[np.bool_] | None = None


def hold(captured: Captured, plan: AgreedPlan, *, structure: Structure, registry: ValueRegistry, reading: Reading) -> Held:
    """What this rank holds now: later changes of its tensors make no difference, only `leaves` still reads the captured trees.

    No tensor is read if replicas are not compared, or if nobody else holds what this rank does.
    """
    own = name_own_values(captured)
    if _shares_own_values(captured, plan):
        own = digest_own_values(_watch(captured, reading), registry=registry, has_bytes=not reading.strictness.is_off)
    rows = _digest_rows(captured, plan, reading, is_left_out=reading.later)
    parts = PartList({**structure.parts.parts, **own.parts})
    return Held(rows, parts, partial(list_leaves, captured.trees, registry=registry))


def hold_rest(held: Held, captured: Captured, plan: AgreedPlan, *, reading: Reading) -> Held:
    """The same with the rows that `hold` has left out, as they are now."""
    if reading.later is None:
        return held
    return replace(held, rows={**held.rows, **_digest_rows(captured, plan, reading, is_left_out=~reading.later)})


def _digest_rows(
    captured: Captured, plan: AgreedPlan, reading: Reading, *, is_left_out: NDArray[np.bool_] | None
) -> dict[int, bytes]:
    local = plan.local
    replica_set = local.replica_set if is_left_out is None else np.where(is_left_out, NO_SET, local.replica_set)
    if reading.strictness.is_off or not (replica_set != NO_SET).any():
        return {}
    sampling = Sampling(make_seed(f"{plan.id} {reading.subject}"), reading.strictness.in_full)
    return digest_rows(_watch(captured, reading).sources, local.held, replica_set=replica_set, sampling=sampling)


def _shares_own_values(captured: Captured, plan: AgreedPlan) -> bool:
    """Whether another rank has a per-rank value under the same key."""
    return bool((plan.part_set[len(plan.part_set) - len(captured.per_rank) :] != NO_SET).any())


def _watch(captured: Captured, reading: Reading) -> Captured:
    """The same with sources whose reading ends with the failure of another rank."""
    check = Rarely(reading.check)
    return replace(captured, sources=tuple(_Watched(source, check) for source in captured.sources))


@final
class _Watched:
    """A source whose reading ends with the failure of another rank."""

    def __init__(self, source: Source, check: Callable[[], None]) -> None:
        self._source = source
        self._check = check

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def read_into(self, start: int, out: memoryview) -> None:
        self._check()
        self._source.read_into(start, out)


@final
class Comparison:
    """One rank's side of it, for one save. `plan` says who holds what."""

    def __init__(self, agreement: Agreement, plan: AgreedPlan, *, strictness: Strictness) -> None:
        self._agreement = agreement
        self._plan = plan
        self._strictness = strictness

    def digest(self, held: Held) -> tuple[bytes, bytes]:
        """The messages with one digest per replica set and per part set that this rank is in."""
        local = self._plan.local
        replicas = digest_sets(held.rows, local.held, replica_set=local.replica_set)
        return encode_set_digests(replicas), encode_set_digests(digest_part_sets(held.parts, self._plan.part_set))

    def find_question(self, posts: Sequence[Durable], common: GlobalPlan) -> tuple[Question, int]:
        """On the coordinator: what has to be asked because ranks differ, and how many buffers do, which is no fault."""
        parts = compare_sets([decode_set_digests(post.parts) for post in posts], num_holders=common.num_part_holders)
        if self._strictness.is_off:
            return Question((), bool(parts.differing)), 0
        replicas = compare_sets([decode_set_digests(post.replicas) for post in posts], num_holders=common.num_holders)
        return Question(replicas.differing, bool(parts.differing)), replicas.num_differing_buffers

    def answer(self, question: Question, held: Held) -> None:
        """Tell the coordinator the digests of all tensors in the sets that it asks for, and of single values."""
        local, values = self._plan.local, tuple[str, ...]()
        rows = list_row_digests(held.rows, local.held, replica_set=local.replica_set, sets=question.sets)
        if question.values:
            own = {section: parts for section, parts in held.parts.parts.items() if section == OWN_PARTS}
            lists = (held.parts, PartList({**held.leaves().parts, **own}))
            values = tuple(self._agreement.share(encode_part_list(parts)) for parts in lists)
        self._agreement.post("answer", Answer(encode_row_digests(rows), *values).encode())

    def judge(self, question: Question) -> tuple[str, ...]:
        """On the coordinator: the addresses of values that differ; raises `InvalidAppState` for replicas, and if it is strict."""
        answers = [read_message(answer, Answer) for answer in self._agreement.collect("answer")]
        replicas = [str(difference) for difference in explain([decode_row_digests(answer.rows) for answer in answers])]
        if question.sets:
            found = _list(replicas) or "some that not all of them have compared (replica_check must be the same on all ranks)"
            raise InvalidAppState(
                f"expected equal bytes on all ranks that hold the same part of a tensor, found other bytes: {found}. "
                "Nothing was committed. Make tensors that are parts of one a DTensor, give tensors that are not the same one "
                "different names (stages of a pipeline: global names), or wrap what each rank has of its own in PerRank"
            )
        differing = self._compare_values(answers) if question.values else ()
        if differing and self._strictness.refuses_values:
            raise InvalidAppState(
                f"expected equal values on all ranks, found other ones: {_list([str(difference) for difference in differing])}. "
                "Nothing was committed. Wrap what each rank has of its own in PerRank (ranks with equal keys must have equal "
                "values), or leave it out of the app state"
            )
        return tuple(difference.address for difference in differing)

    def _compare_values(self, answers: Sequence[Answer]) -> tuple[PartDifference, ...]:
        """The parts that differ, or the values within them that do."""
        fetch = self._agreement.fetch
        digests = dict.fromkeys(digest for answer in answers for digest in (answer.parts, answer.leaves))
        lists = {digest: decode_part_list(fetch(digest)) for digest in digests}
        leaves = compare_parts([lists[answer.leaves] for answer in answers])
        parts = compare_parts([lists[answer.parts] for answer in answers])
        within = {part.address: [leaf for leaf in leaves if f"{leaf.address}/".startswith(f"{part.address}/")] for part in parts}
        return tuple(found for part in parts for found in within[part.address] or [part])


def _list(lines: Sequence[str]) -> str:
    return "; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")

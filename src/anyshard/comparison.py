"""Compares what several ranks hold alike before a save is committed: replicas of tensors, modules' buffers, plain values.

Every rank posts one digest per set of what the same ranks hold. Only where they differ the coordinator asks all for the
digests of single addresses, so as to say which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from anyshard.agreed_plan import AgreedPlan, GlobalPlan
from anyshard.coord.agreement import Agreement
from anyshard.coord.looks import Rarely
from anyshard.engine.samples import Sampling, digest_replicas, list_row_digests
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
    SetDigest,
    decode_row_digests,
    decode_set_digests,
    encode_row_digests,
    encode_set_digests,
)
from anyshard.records.value_parts import PartList, decode_part_list, encode_part_list, list_leaves
from anyshard.records.values import ValueRegistry

_SEED_DIGITS = 15  # of the operation's id, which is hexadecimal
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
    """What one rank holds: its app state, taken apart, and the parts of its value trees."""

    captured: Captured
    parts: PartList
    registry: ValueRegistry


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
    """One rank's side of it, for one save: what it holds that others may hold too. `plan` says who holds what."""

    def __init__(self, agreement: Agreement, plan: AgreedPlan, held: Held, *, strictness: Strictness) -> None:
        self._agreement = agreement
        self._plan = plan
        self._held = held
        self._strictness = strictness
        # Places of samples change from save to save, and are the same on all ranks.
        self._sampling = Sampling(int(agreement.hear_id()[:_SEED_DIGITS], 16), strictness.in_full)
        check = Rarely(agreement.check)
        self._sources = [_Watched(source, check) for source in held.captured.sources]

    def digest(self) -> tuple[bytes, bytes]:
        """The messages with one digest per replica set and per part set that this rank is in."""
        local, sources, replicas = self._plan.local, self._sources, dict[int, SetDigest]()
        if not self._strictness.is_off:
            replicas = digest_replicas(sources, local.held, replica_set=local.replica_set, sampling=self._sampling)
        parts = digest_part_sets(self._list_all(self._held.parts), self._plan.part_set)
        return encode_set_digests(replicas), encode_set_digests(parts)

    def _list_all(self, parts: PartList) -> PartList:
        """These parts of the value trees, and behind them what is per rank, in the order of `AgreedPlan.part_set`."""
        captured, registry = self._held.captured, self._held.registry
        own = self._plan.part_set[len(self._plan.part_set) - len(captured.per_rank) :]
        is_shared = bool((own != NO_SET).any())
        listed = digest_own_values(captured, registry=registry) if is_shared else name_own_values(captured)
        return PartList({**parts.parts, **listed.parts})

    def find_question(self, posts: Sequence[Durable], common: GlobalPlan) -> tuple[Question, int]:
        """On the coordinator: what has to be asked because ranks differ, and how many buffers do, which is no fault."""
        parts = compare_sets([decode_set_digests(post.parts) for post in posts], num_holders=common.num_part_holders)
        if self._strictness.is_off:
            return Question((), bool(parts.differing)), 0
        replicas = compare_sets([decode_set_digests(post.replicas) for post in posts], num_holders=common.num_holders)
        return Question(replicas.differing, bool(parts.differing)), replicas.num_differing_buffers

    def answer(self, question: Question) -> None:
        """Tell the coordinator the digests of all tensors in the sets that it asks for, and of single values."""
        local, values = self._plan.local, tuple[str, ...]()
        rows = list_row_digests(
            self._sources, local.held, replica_set=local.replica_set, sets=question.sets, sampling=self._sampling
        )
        if question.values:
            leaves = list_leaves(self._held.captured.trees, registry=self._held.registry)
            lists = (self._list_all(self._held.parts), self._list_all(leaves))
            values = tuple(self._agreement.share(encode_part_list(parts)) for parts in lists)
        self._agreement.post("answer", Answer(encode_row_digests(rows), *values).encode())

    def judge(self, question: Question) -> tuple[str, ...]:
        """On the coordinator: the addresses of values that differ; raises `InvalidAppState` for replicas, and if it is strict."""
        answers = [read_message(answer, Answer) for answer in self._agreement.collect("answer")]
        replicas = [str(difference) for difference in explain([decode_row_digests(answer.rows) for answer in answers])]
        if question.sets:
            found = _list(replicas) or "some that were equal again a moment later: do not change the app state while it is saved"
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

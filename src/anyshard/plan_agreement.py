"""How the ranks of a group come to the plan of one save: that of an earlier save, or a new one for all of them; and keep to it.

Every rank posts whether it has a plan for its structure. The coordinator goes on at once if it has one itself, and else waits for
all posts: if nobody has one it plans afresh, if some have the save ends on all ranks with `StructureChanged`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from anyshard.agreed_plan import AgreedPlan, GlobalPlan, PlanCache, Structure, plan_together, take_plan
from anyshard.coord.agreement import Agreement
from anyshard.coord.group import Group
from anyshard.errors import StructureChanged
from anyshard.records.manifest import BlobEntry
from anyshard.records.packed import refusal
from anyshard.records.rank_messages import Begin, Durable, LocalPlan, StructurePost, read_message
from anyshard.records.table_codec import decode_tables, encode_table
from anyshard.records.value_parts import decode_part_list, encode_part_list

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A structure that is to be saved, and the plan that an earlier save of it has left."""

    structure: Structure
    fingerprint: str
    plan: AgreedPlan | None
    max_blob_nbytes: int

    @property
    def is_first(self) -> bool:
        """Whether this rank has no plan of an earlier save for this structure."""
        return self.plan is None


def find_candidate(plans: PlanCache, structure: Structure, *, world_size: int, max_blob_nbytes: int) -> Candidate:
    """A structure with the plan that is kept for it, if there is one."""
    fingerprint = structure.fingerprint(world_size=world_size, max_blob_nbytes=max_blob_nbytes)
    return Candidate(structure, fingerprint, plans.find(structure, fingerprint), max_blob_nbytes)


@final
class PlanAgreement:
    """One rank's side of it, for one save of a structure."""

    def __init__(self, agreement: Agreement, group: Group, plans: PlanCache, candidate: Candidate) -> None:
        self._agreement = agreement
        self._group = group
        self._plans = plans
        self._candidate = candidate
        self._structure = candidate.structure
        self._known = candidate.plan

    @property
    def is_first(self) -> bool:
        """Whether this rank has no plan of an earlier save for this structure."""
        return self._candidate.is_first

    def post(self, *, values_nbytes: int) -> None:
        """Tell the coordinator what this rank has, and how much its per-rank values take; without waiting for anybody."""
        if self._known is not None:
            self._agreement.post("structure", StructurePost(self._known.id).encode())
        elif self._group.size > 1:
            encoded = encode_table(self._structure.table)
            post = StructurePost(
                plan="",
                why=self._plans.explain_miss(self._structure),
                vocabulary=self._agreement.share(encoded.vocabulary),
                rows=self._agreement.share(encoded.rows),
                parts=self._agreement.share(encode_part_list(self._structure.parts)),
                keys=self._structure.keys,
                values_nbytes=values_nbytes,
            )
            self._agreement.post("structure", post.encode())

    def lead(self) -> AgreedPlan:
        """On the coordinator: the plan, handed out to all if it is new."""
        if self._known is not None:
            return self._known
        structures, values_nbytes = self._collect() if self._group.size > 1 else ((self._structure,), 0)
        common, plans = plan_together(structures, max_blob_nbytes=self._candidate.max_blob_nbytes)
        self._agreement.hand_out("plan", [plan.encode() for plan in plans])
        common = replace(common, nbytes=common.nbytes + values_nbytes)
        return take_plan(plans[self._group.rank], self._structure, common=common)

    def follow(self, begun: Begin) -> AgreedPlan:
        """On all other ranks: the plan under which the coordinator has begun."""
        plan = self._known
        if plan is None and begun.is_new:
            plan = take_plan(read_message(self._agreement.receive("plan"), LocalPlan), self._structure)
        if plan is None or plan.id != begun.plan:
            raise _differ({self._group.ranks[self._group.rank]: self._plans.explain_miss(self._structure)})
        return plan

    def keep(self, plan: AgreedPlan) -> None:
        """Keep the plan for later saves; once the save is committed, so that all ranks keep it or none."""
        if self._known is None:
            self._plans.keep(self._structure, self._candidate.fingerprint, plan)

    def _collect(self) -> tuple[Sequence[Structure], int]:
        """What all ranks hold, and how much the per-rank values take of all but this one; equal messages become one object."""
        posts = [read_message(post, StructurePost) for post in self._agreement.collect("structure")]
        changed = {self._group.ranks[rank]: post.why for rank, post in enumerate(posts) if not post.plan}
        if len(changed) < len(posts):
            raise _differ(changed)
        fetch = self._agreement.fetch
        vocabularies = [fetch(digest) for digest in dict.fromkeys(post.vocabulary for post in posts)]
        rows = {digest: fetch(digest) for digest in dict.fromkeys(post.rows for post in posts)}
        parts = {digest: decode_part_list(fetch(digest)) for digest in dict.fromkeys(post.parts for post in posts)}
        tables = decode_tables([rows[post.rows] for post in posts], vocabularies)
        structures = [Structure(table, parts[post.parts], post.keys) for table, post in zip(tables, posts, strict=True)]
        return structures, sum(post.values_nbytes for post in posts) - posts[self._group.rank].values_nbytes


def order_blobs(common: GlobalPlan, posts: Sequence[Durable], begun: Begin) -> tuple[BlobEntry, ...]:
    """All blobs that ranks have written, as the manifest lists them. Raises `UnsupportedFormat` if they are not as planned."""
    columns = (column.tolist() for column in (common.blobs.section, common.blobs.rank, common.blobs.k))
    planned = [(begun.name_blob(common.sections[section], rank, k), rank) for section, rank, k in zip(*columns, strict=True)]
    written = {(blob.name, blob.rank): blob for post in posts for blob in post.list_blobs()}
    wrong = sorted(set(planned) ^ set(written))
    if wrong:
        shown = ", ".join(f"{name} of rank {rank}" for name, rank in wrong[:_SHOWN])
        raise refusal(
            "blobs that ranks have written", "those of the plan", f"{len(wrong)} that are missing or not in it: {shown}"
        )
    return tuple(written[blob] for blob in planned)


def _differ(changed: Mapping[int, str]) -> StructureChanged:
    return StructureChanged("expected all ranks to hold the structure of an earlier save, or none of them:", changed)

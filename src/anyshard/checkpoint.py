"""A committed checkpoint, open for reading: resolved, its records checked, its blobs opened when something in them is read.

The way of every load up to the app state, and the whole of `anyshard.open`: it needs neither torch nor a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anyshard.commit.listing import PARTS_PREFIX
from anyshard.commit.resolve import Resolved, look, resolve
from anyshard.commit.stored_index import read_index
from anyshard.engine.blocks import BlockPool
from anyshard.engine.read import OpenBlobs, ReadJob, open_blobs
from anyshard.errors import BlobNotFound, CheckpointDamaged, CheckpointNotFound, CheckpointReplaced, LimitExceeded
from anyshard.planning.match import match_shards
from anyshard.planning.reads import plan_reads
from anyshard.records.addresses import join_address, section_of, show, split_address
from anyshard.records.captured import Stored
from anyshard.records.checks import check_marks, check_sections, check_slots
from anyshard.records.digests import digest_bytes
from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import BITS_DTYPES, ArrayDestination
from anyshard.records.index import decode_index
from anyshard.records.load_plan import LoadPlan, ReadLimits
from anyshard.records.manifest import Manifest, decode_manifest
from anyshard.records.names import manifest_name
from anyshard.records.rank_messages import Message, read_message
from anyshard.records.section_values import ABSENT, SectionValues, decode_section, pick_own_tree
from anyshard.records.tables import Index, ShardTable, one_shard
from anyshard.records.tail import CELL_NBYTES
from anyshard.records.thinner import explain_gone
from anyshard.records.value_parts import merge_trees
from anyshard.records.values import ValueRegistry, is_container, label_item, list_items
from anyshard.records.values_types import PerRankMark, TensorMark
from anyshard.storage.protocol import Store
from anyshard.stored_tensor import StoredTensor

_MAX_TOLD_NBYTES = 1 << 20
_COORDINATOR = 0  # the rank of a saving job whose payloads say what others hold
_MAX_GAP_NBYTES = CELL_NBYTES


@dataclass(frozen=True, slots=True)
class ReadingMeans:
    """What reading needs besides a store: the engine's job and blocks, and the types that values may have."""

    job: ReadJob
    pool: BlockPool
    registry: ValueRegistry


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a checkpoint as they were read; `file` is the manifest's name."""

    file: str
    manifest: bytes
    index: bytes


class _Told(Message, frozen=True):
    """The records as one process tells them to others, None for a long index."""

    file: str
    manifest: bytes
    index: bytes | None


class Checkpoint:
    """One committed checkpoint. Everything read from it was verified against its manifest's digests.

    `checkpoint["model/layers.0.weight"]` is a `StoredTensor` (sliced, it gives a NumPy array), any other address the plain value
    there. The records are read when it is opened, a blob is opened when something in it is first read; it stays readable until
    the checkpoint is closed, even if the step is saved over meanwhile. What is in a blob that is gone when it is first needed is
    `CheckpointReplaced` (saved over) or `CheckpointNotFound` (deleted). Use it as a context manager, or let it go.
    """

    def __init__(self, store: Store, records: Records, *, means: ReadingMeans) -> None:
        self._store = store
        self._digest = digest_bytes(records.manifest)
        self._manifest = decode_manifest(records.manifest, file=records.file)
        name = "index" if self._manifest.index is None else self._manifest.index.name
        self._index = decode_index(records.index, max_rows=self._manifest.num_rows, file=name)
        check_sections(self._index, self._manifest)
        self._means = means
        self._stack = ExitStack()
        self._blobs = self._stack.enter_context(open_blobs(store, self._manifest, blobs=(), job=means.job, pool=means.pool))
        self._checked: set[int] = set()  # those of the open blobs whose tails are as the index says
        self._payloads: dict[tuple[str, int], SectionValues] = {}
        self._trees: dict[str, object] = {}

    @property
    def url(self) -> str:
        """Where it is."""
        return self._store.url

    @property
    def manifest(self) -> Manifest:
        """Its commit record."""
        return self._manifest

    @property
    def step(self) -> int | None:
        """The training step it was saved at, if it has one."""
        return self.manifest.step

    @property
    def sections(self) -> tuple[str, ...]:
        """The top-level names it holds."""
        return self.manifest.sections

    @property
    def user(self) -> Mapping[str, Any]:
        """What the saver put into `SaveOptions.user`."""
        return self.manifest.user

    @property
    def index(self) -> Index:
        """What is where."""
        return self._index

    @property
    def blobs(self) -> OpenBlobs:
        """Those of its blobs that were opened so far; what `plan` has planned can be read of them."""
        return self._blobs

    def addresses(self) -> tuple[str, ...]:
        """Addresses of all tensors, tied names included, sorted by their bytes."""
        return self._index.shards.tensors.addresses

    def __contains__(self, address: object) -> bool:
        if not isinstance(address, str):
            return False
        try:
            self._find(address)
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.addresses())

    def __len__(self) -> int:
        return len(self.addresses())

    def __getitem__(self, address: str) -> Any:
        """The tensor or value at `address`; `KeyError` if there is none.

        A per-rank value is a dict from ranks of the saving job to what each had; of ranks with the same key the lowest stands.
        """
        found = self._find(address)
        if isinstance(found, PerRankMark):
            return self._read_all_ranks(found.address)
        return self._tensor(found.address) if isinstance(found, TensorMark) else found

    def values(self, section: str) -> Any:
        """The whole value tree of a section, with a `TensorMark` where a tensor is."""
        if section not in self.sections:
            raise self._lacks(section, section)
        if section not in self._trees:
            self._trees[section] = self._read_tree(section)
        return self._trees[section]

    def stored(self, sections: Sequence[str]) -> Stored:
        """What a load needs to know of these sections."""
        self._open_values((section, _COORDINATOR) for section in sections)
        trees = {section: self.values(section) for section in sections}
        keys = {
            address: ranks for section in sections for address, ranks in self._read_payload(section, _COORDINATOR).keys.items()
        }
        return Stored(self._index.shards.tensors, trees, self.sections, keys, self._read_rank)

    def plan(self, wanted: ShardTable) -> LoadPlan:
        """Which bytes fill the wanted shards, all of whose blobs are open then.

        What no stored shard covers makes the checkpoint damaged.
        """
        matches = match_shards(wanted, self._index)
        self._open(matches.list_blobs())
        block_nbytes = self._means.pool.block_nbytes
        max_gap_nbytes = self._store.capabilities.read_gap_nbytes or _MAX_GAP_NBYTES
        limits = ReadLimits(block_nbytes, max_gap_nbytes if block_nbytes > max_gap_nbytes else 0)
        plan = plan_reads(matches, self._blobs.layouts, limits=limits)
        if plan.uncovered:
            raise CheckpointDamaged(
                f"{self.url}: {len(plan.uncovered)} wanted region(s) are in no blob, first {plan.uncovered[0]}", file=self.url
            )
        return plan

    def close(self) -> None:
        """Close all blobs; what was read stays valid."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        thinned = self.manifest.thinned
        gone = "" if thinned is None else f", without {', '.join(thinned.dropped)}"
        return f"<Checkpoint {self.url} step {self.step} with {', '.join(self.sections)}{gone}>"

    def _lacks(self, sought: str, section: str) -> KeyError:
        message = f"{show(sought)}: not in {self.url}, which holds {', '.join(self.sections)}"
        return KeyError(f"{message}. {gone}" if (gone := explain_gone(self.manifest, (section,))) else message)

    def _open(self, blobs: Iterable[int]) -> None:
        """Open these blobs and check them, together with what the index says of them, unless they are open."""
        new = [blob for blob in blobs if blob not in self._checked]
        if not new:
            return
        try:
            self._blobs.open(new)
        except CheckpointDamaged:
            _explain_missing(self._store, self._digest)
            raise
        tails = {blob: self._blobs.tails[blob] for blob in new}
        check_slots(self._index, tails, files=[blob.name for blob in self.manifest.blobs])
        self._checked.update(new)

    def _open_values(self, slots: Iterable[tuple[str, int]]) -> None:
        """Open the blobs with the values of these ranks in these sections, all at a time."""
        self._open([self._blobs.find_first(section, rank) for section, rank in slots])

    def _read_tree(self, section: str) -> object:
        """The value tree that all ranks of the saving job had in common: the coordinator's, and what only others had."""
        ranks = (_COORDINATOR, *self._read_payload(section, _COORDINATOR).also)
        self._open_values((section, rank) for rank in ranks)
        trees = [payload.shared for rank in ranks if (payload := self._read_payload(section, rank)).shared is not ABSENT]
        return merge_trees(trees, file=_describe_payload(section, _COORDINATOR))

    def _read_payload(self, section: str, rank: int) -> SectionValues:
        """The checked values slot of one rank of the saving job."""
        if (section, rank) not in self._payloads:
            file = _describe_payload(section, rank)
            self._open_values([(section, rank)])
            data = self._blobs.read_values(section, rank=rank)
            payload = decode_section(data, registry=self._means.registry, file=file)
            for tree in (payload.shared, *payload.per_rank.values()):
                check_marks(tree, section, self.index, file=file)
            self._payloads[section, rank] = payload
        return self._payloads[section, rank]

    def _read_rank(self, rank: int, section: str) -> Mapping[str, object]:
        return self._read_payload(section, rank).per_rank

    def _read_all_ranks(self, address: str) -> dict[int, object]:
        section = section_of(address)
        ranks = sorted(self._read_payload(section, _COORDINATOR).keys.get(address, {}).values())
        return {rank: pick_own_tree(self._read_rank(rank, section), address, rank=rank) for rank in ranks}

    def _find(self, address: str) -> object:
        """The value at an address, or the mark of what is there."""
        if address in self.index.shards.tensors.rows:
            return TensorMark(address, "tensor")
        if section_of(address) not in self.sections:
            raise self._lacks(address, section_of(address))
        value: object = self.values(section_of(address))
        parts = split_address(address)
        for depth, part in enumerate(parts[1:], start=1):
            value = _descend(value, part, within=join_address(*parts[:depth]), sought=address)
        return value

    def _tensor(self, address: str) -> StoredTensor:
        tensors = self.index.shards.tensors
        return StoredTensor(tensors, tensors.rows[address], read_bits=self._read_bits)

    def _read_bits(self, row: int, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> NDArray[Any]:
        tensors = self._index.shards.tensors
        dtype = BITS_DTYPES[find_dtype(tensors.dtypes[row]).itemsize]
        if 0 in lengths:
            return np.empty(lengths, dtype)
        plan = self.plan(one_shard(tensors, row, offsets, lengths))
        bits = np.empty(lengths, dtype)  # only now: a hostile index may claim any size, but the blobs hold what is planned
        self._blobs.fill(plan, [ArrayDestination(bits)])
        return bits


def open_checkpoint(store: Store, *, means: ReadingMeans) -> Checkpoint:
    """Resolve the store's checkpoint and read its records.

    Raises `CheckpointReplaced` if it was saved over in between; nothing is left open then.
    """
    return Checkpoint(store, read_records(store), means=means)


def read_records(store: Store, resolved: Resolved | None = None) -> Records:
    """Resolve the store's checkpoint, or take it as resolved, and read its index: one read of the manifest decides all else.

    A step in parts is `CheckpointNotFound`, with the names of the parts: each is a checkpoint.
    """
    resolved = resolved or resolve(store)
    if resolved.manifest.parts:
        raise _in_parts(store, resolved.manifest)
    name = manifest_name(resolved.manifest.generation)
    return Records(name, resolved.data, _read_index(store, resolved.manifest, resolved.digest))


def tell_records(records: Records) -> bytes:
    """Records for the other processes of a job; an index that would be a burden on what carries messages is left out."""
    index = records.index if len(records.index) <= _MAX_TOLD_NBYTES else None
    return _Told(records.file, records.manifest, index).encode()


def hear_records(told: bytes, store: Store) -> Records:
    """The records that another process has told; an index that was left out is read, and is the one that the manifest names."""
    message = read_message(told, _Told)
    index = message.index
    if index is None:
        manifest = decode_manifest(message.manifest, file=message.file)
        index = _read_index(store, manifest, digest_bytes(message.manifest))
    return Records(message.file, message.manifest, index)


def _read_index(store: Store, manifest: Manifest, digest: str) -> bytes:
    try:
        return read_index(store, manifest)
    except (BlobNotFound, LimitExceeded):
        _explain_missing(store, digest)
        raise


def _in_parts(store: Store, manifest: Manifest) -> CheckpointNotFound:
    names = [part.name for part in manifest.parts]
    return CheckpointNotFound(
        f"{store.url}: expected a checkpoint, found a step in parts ({', '.join(names)}), each of which is one: give the path of "
        f"a part ({store.url}/{PARTS_PREFIX}{names[0]}), or load it with the run (run.load(app_state, role={names[0]!r}))"
    )


def _explain_missing(store: Store, digest: str) -> None:
    """Raise what explains that a file of a checkpoint is missing, if its records do: saved over, or deleted."""
    _, newest = look(store)
    if newest is None:
        return  # no record of any kind, and a delete leaves one: this host sees another directory than the one that read them
    if resolve(store).digest != digest:
        raise CheckpointReplaced(f"{store.url}: it was saved over while it was being read; open it again")


def _descend(value: object, part: str, *, within: str, sought: str) -> object:
    items = list_items(value) if is_container(value) else []
    found = [item for key, item in items if label_item(value, key) == part]
    if len(found) == 1:  # keys that no address can hold share a label
        return found[0]
    raise KeyError(f"{show(sought)}: nothing is there below {show(within)}")


def _describe_payload(section: str, rank: int) -> str:
    return f"values of section {show(section)}" + (f" of rank {rank}" if rank else "")

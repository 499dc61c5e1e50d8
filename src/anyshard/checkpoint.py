"""A committed checkpoint, open for reading: resolved, its records checked, its blobs opened section by section.

The way of every load up to the app state, and the whole of `anyshard.open`: it needs neither torch nor a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anyshard.commit.resolve import check_complete, resolve
from anyshard.engine.blocks import BlockPool
from anyshard.engine.read import OpenBlobs, ReadJob, open_blobs
from anyshard.errors import BlobNotFound, CheckpointDamaged, CheckpointReplaced, LimitExceeded
from anyshard.planning.reads import plan_reads
from anyshard.records.addresses import join_address, section_of, show, split_address
from anyshard.records.captured import Stored
from anyshard.records.checks import check_marks, check_sections, check_slots
from anyshard.records.digests import check_digest, digest_bytes
from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import BITS_DTYPES, ArrayDestination
from anyshard.records.index import decode_index
from anyshard.records.load_plan import LoadPlan, ReadLimits
from anyshard.records.manifest import Manifest, decode_manifest
from anyshard.records.names import manifest_name
from anyshard.records.save_messages import Message
from anyshard.records.section_values import ABSENT, SectionValues, decode_section
from anyshard.records.tables import Index, ShardTable, one_shard
from anyshard.records.tail import CELL_NBYTES
from anyshard.records.value_parts import merge_trees
from anyshard.records.values import ValueRegistry, is_container, label_item, list_items
from anyshard.records.values_types import PerRankMark, TensorMark
from anyshard.storage.protocol import Store
from anyshard.stored_tensor import StoredTensor

_COORDINATOR = 0  # the rank of a saving job whose payloads say what others hold
_MAX_GAP_NBYTES = CELL_NBYTES
# Bounds of the index's file: its pages (see records/index.py), even if they did not compress, and its footer.
_INDEX_NBYTES_FIXED, _INDEX_NBYTES_PER_ROW = 8 << 20, 4096 + 256


@dataclass(frozen=True, slots=True)
class ReadingMeans:
    """What reading needs besides a store: the engine's job and blocks, and the types that values may have."""

    job: ReadJob
    pool: BlockPool
    registry: ValueRegistry


class Records(Message, frozen=True):
    """The records of a checkpoint as one process read them, for all that load it; `file` is the manifest's name."""

    file: str
    manifest: bytes
    index: bytes


class Checkpoint:
    """One committed checkpoint. Everything read from it was verified against its manifest's digests.

    `checkpoint["model/layers.0.weight"]` is a `StoredTensor` (sliced, it gives a NumPy array), any other address the plain value
    there. The records are read when it is opened, blobs when a section is first touched; these stay readable until it is closed,
    even if the step is saved over meanwhile. A section that is first touched when its files are gone is `CheckpointReplaced`
    (saved over) or `CheckpointNotFound` (deleted). Use it as a context manager, or let it go.
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
        self._opened: dict[str, OpenBlobs] = {}
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
            raise KeyError(f"{show(section)}: not in {self.url}, which holds {', '.join(self.sections)}")
        if section not in self._trees:
            self._trees[section] = self._read_tree(section)
        return self._trees[section]

    def stored(self, sections: Sequence[str]) -> Stored:
        """What a load needs to know of these sections, whose blobs are open."""
        trees = {section: self.values(section) for section in sections}
        keys = {
            address: ranks for section in sections for address, ranks in self._read_payload(section, _COORDINATOR).keys.items()
        }
        return Stored(self._index.shards.tensors, trees, self.sections, keys, self._read_rank)

    def open_sections(self, sections: Sequence[str]) -> OpenBlobs:
        """Open and check all blobs of these sections, until the checkpoint is closed; what is read of them later is read here."""
        chosen = [blob for blob, entry in enumerate(self.manifest.blobs) if entry.section in sections]
        opening = open_blobs(self._store, self.manifest, blobs=chosen, job=self._means.job, pool=self._means.pool)
        try:
            blobs = self._stack.enter_context(opening)
        except CheckpointDamaged:
            _explain_missing(self._store, self._digest)
            raise
        check_slots(self._index, blobs.tails, files=[blob.name for blob in self.manifest.blobs])
        self._opened.update(dict.fromkeys(sections, blobs))
        return blobs

    def plan(self, wanted: ShardTable, blobs: OpenBlobs) -> LoadPlan:
        """Which bytes fill the wanted shards; what no stored shard covers makes the checkpoint damaged."""
        block_nbytes = self._means.pool.block_nbytes
        limits = ReadLimits(block_nbytes, _MAX_GAP_NBYTES if block_nbytes > _MAX_GAP_NBYTES else 0)
        plan = plan_reads(wanted, self._index, blobs.layouts, limits=limits)
        if plan.uncovered:
            raise CheckpointDamaged(
                f"{self.url}: {len(plan.uncovered)} wanted region(s) are in no blob, first {plan.uncovered[0]}", file=self.url
            )
        return plan

    def close(self) -> None:
        """Close all blobs; what was read stays valid."""
        self._opened.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.url} step {self.step} with {', '.join(self.sections)}>"

    def _blobs(self, section: str) -> OpenBlobs:
        return self._opened.get(section) or self.open_sections([section])

    def _read_tree(self, section: str) -> object:
        """The value tree that all ranks of the saving job had in common: the coordinator's, and what only others had."""
        ranks = (_COORDINATOR, *self._read_payload(section, _COORDINATOR).also)
        trees = [payload.shared for rank in ranks if (payload := self._read_payload(section, rank)).shared is not ABSENT]
        return merge_trees(trees, file=_describe_payload(section, _COORDINATOR))

    def _read_payload(self, section: str, rank: int) -> SectionValues:
        """The checked values slot of one rank of the saving job."""
        if (section, rank) not in self._payloads:
            file = _describe_payload(section, rank)
            data = self._blobs(section).read_values(section, rank=rank)
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
        return {rank: self._read_rank(rank, section).get(address) for rank in ranks}

    def _find(self, address: str) -> object:
        """The value at an address, or the mark of what is there."""
        if address in self.index.shards.tensors.rows:
            return TensorMark(address, "tensor")
        if section_of(address) not in self.sections:
            raise KeyError(f"{show(address)}: not in {self.url}, which holds {', '.join(self.sections)}")
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
        blobs = self._blobs(section_of(tensors.addresses[row]))
        plan = self.plan(one_shard(tensors, row, offsets, lengths), blobs)
        bits = np.empty(lengths, dtype)  # only now: a hostile index may claim any size, but the blobs hold what is planned
        blobs.fill(plan, [ArrayDestination(bits)])
        return bits


def open_checkpoint(store: Store, *, means: ReadingMeans) -> Checkpoint:
    """Resolve the store's checkpoint and read its records.

    Raises `CheckpointReplaced` if it was saved over in between; nothing is left open then.
    """
    return Checkpoint(store, read_records(store), means=means)


def read_records(store: Store) -> Records:
    """Resolve the store's checkpoint and read its index. One read of the manifest decides what everything else must be."""
    resolved = resolve(store)
    name = manifest_name(resolved.manifest.generation)
    return Records(name, resolved.data, _read_index(store, resolved.manifest, resolved.digest))


def _read_index(store: Store, manifest: Manifest, digest: str) -> bytes:
    entry = manifest.index
    if entry is None:
        raise CheckpointDamaged(f"{store.url}: its manifest names no index", file=store.url)
    limit = _INDEX_NBYTES_FIXED + _INDEX_NBYTES_PER_ROW * manifest.num_rows
    if entry.nbytes > limit:  # the file's own length is no bound: a sparse file has any, for nothing
        raise CheckpointDamaged(
            f"{store.url}: {entry.name}: expected an index of at most {limit} bytes, found {entry.nbytes}; "
            "load another checkpoint",
            file=entry.name,
        )
    try:
        data = store.read(entry.name, max_nbytes=entry.nbytes)
    except (BlobNotFound, LimitExceeded):
        _explain_missing(store, digest)
        raise
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(
            f"{store.url}: {entry.name}: expected {entry.nbytes} bytes, found {len(data)}. Copy it again from where it was whole",
            file=entry.name,
        )
    check_digest(data, entry.digest, file=entry.name)
    return data


def _explain_missing(store: Store, digest: str) -> None:
    """Raise what explains that a file of a checkpoint is not as its manifest says: saved over, deleted, or an incomplete copy."""
    now = resolve(store)
    if now.digest != digest:
        raise CheckpointReplaced(f"{store.url}: it was saved over while it was being read; open it again")
    check_complete(store, now.manifest, now.listing)


def _descend(value: object, part: str, *, within: str, sought: str) -> object:
    items = list_items(value) if is_container(value) else []
    found = [item for key, item in items if label_item(value, key) == part]
    if len(found) == 1:  # keys that no address can hold share a label
        return found[0]
    raise KeyError(f"{show(sought)}: nothing is there below {show(within)}")


def _describe_payload(section: str, rank: int) -> str:
    return f"values of section {show(section)}" + (f" of rank {rank}" if rank else "")

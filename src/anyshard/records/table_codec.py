"""The table of a rank as bytes, so that the coordinator can plan for all, and its fingerprint, so that it need not do so again.

A table travels in two messages. The *vocabulary* says which logical tensors there are (addresses, dtypes, shapes, ties, buffers,
sections); most ranks have the same, so it is sent once under its digest. The *rows* say which regions a rank holds; ranks that
are replicas of each other send equal bytes. Both are decoded once, however many ranks sent them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from anyshard.records.addresses import section_of, show
from anyshard.records.columns import Boxes, Check, box_checks
from anyshard.records.dtypes import find_dtype
from anyshard.records.manifest import VERSION
from anyshard.records.packed import pack_ints, pack_message, read_record, refusal, unpack_ints, unpack_message
from anyshard.records.rank_table import RankTable
from anyshard.records.regions import MAX_NDIM
from anyshard.records.tables import NOT_AN_ALIAS, IntColumn, ShardTable, TensorTable

_VOCABULARY, _ROWS = "vocabulary of a rank", "shard table of a rank"
_DIGEST_NBYTES = 16


@dataclass(frozen=True, slots=True)
class EncodedTable:
    """The two messages of a rank's table. `digest` names the vocabulary; `rows` says which vocabulary they belong to."""

    digest: str
    vocabulary: bytes
    rows: bytes


class _Vocabulary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    sections: tuple[str, ...]
    addresses: tuple[str, ...]
    dtypes: tuple[str, ...]
    width: int
    ndims: bytes
    shapes: bytes
    alias_of: bytes
    is_buffer: bytes


class _Rows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    vocabulary: bytes
    num_rows: int
    tensor: bytes
    offsets: bytes
    lengths: bytes


def encode_table(table: RankTable) -> EncodedTable:
    """The messages that describe a table in full; equal tables give equal bytes."""
    vocabulary = _write_vocabulary(table)
    digest = xxhash.xxh3_128_digest(vocabulary)
    return EncodedTable(digest.hex(), pack_message(vocabulary), pack_message(_write_rows(table, digest)))


def fingerprint(table: RankTable, *, world_size: int, options: Mapping[str, int | float | str]) -> str:
    """A digest of everything of one rank that its plan depends on: equal means that a cached plan still holds.

    Covers address, dtype, global shape, regions, ties, buffers and sections of all its shards, the order of its rows, the version
    of the format, the number of ranks and the `options` that alter a plan.
    """
    rows = _write_rows(table, xxhash.xxh3_128_digest(_write_vocabulary(table)))
    context = msgspec.msgpack.encode([VERSION, world_size, sorted(options.items())])
    return xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(rows) + context)


def _write_vocabulary(table: RankTable) -> bytes:
    tensors = table.shards.tensors
    record = _Vocabulary(
        version=VERSION,
        sections=table.sections,
        addresses=tensors.addresses,
        dtypes=tensors.dtypes,
        width=tensors.shapes.shape[1],
        ndims=pack_ints(tensors.ndims.astype(np.int64)),
        shapes=pack_ints(tensors.shapes),
        alias_of=pack_ints(tensors.alias_of),
        is_buffer=pack_ints(table.is_buffer.astype(np.int64)),
    )
    return msgspec.msgpack.encode(record)


def _write_rows(table: RankTable, digest: bytes) -> bytes:
    shards = table.shards
    columns = pack_ints(shards.tensor), pack_ints(shards.offsets), pack_ints(shards.lengths)
    return msgspec.msgpack.encode(_Rows(VERSION, digest, len(shards), *columns))


def decode_tables(rows: Sequence[bytes], vocabularies: Iterable[bytes]) -> tuple[RankTable, ...]:
    """The tables of all ranks from their rows and every vocabulary that they name; equal bytes become the same object.

    Every rule of a table is checked, without a sum or product that could wrap. Raises `UnsupportedFormat` for messages that this
    release does not send, or whose vocabulary is missing.
    """
    known = dict(map(_read_vocabulary, set(vocabularies)))
    decoded = {message: _read_rows(message, known) for message in dict.fromkeys(rows)}
    return tuple(decoded[message] for message in rows)


def _read_vocabulary(message: bytes) -> tuple[bytes, RankTable]:
    """The digest of a vocabulary, and a table with its tensors and no rows."""
    raw = unpack_message(message, what=_VOCABULARY)
    record = read_record(raw, _Vocabulary, what=_VOCABULARY)
    count, width = len(record.addresses), record.width
    if record.version != VERSION or len(record.dtypes) != count or not 0 <= width <= MAX_NDIM:
        found = f"version {record.version}, {count} addresses, {len(record.dtypes)} dtypes, {width} dims"
        raise refusal(_VOCABULARY, f"version {VERSION} and as many dtypes as addresses, of at most {MAX_NDIM} dims", found)
    tensors = TensorTable(
        addresses=record.addresses,
        dtypes=record.dtypes,
        ndims=np.clip(unpack_ints(record.ndims, count, what=_VOCABULARY), -1, MAX_NDIM + 1).astype(np.int8),
        shapes=_unpack_dims(record.shapes, count, width, what=_VOCABULARY),
        alias_of=unpack_ints(record.alias_of, count, what=_VOCABULARY),
    )
    _refuse_bad(_tensor_checks(tensors), what=_VOCABULARY)
    _check_names(tensors, record.sections)
    no_rows = np.zeros((0, width), dtype=np.int64)
    shards = ShardTable(tensors, np.zeros(0, dtype=np.int64), no_rows, no_rows)
    is_buffer = unpack_ints(record.is_buffer, count, what=_VOCABULARY) != 0
    return xxhash.xxh3_128_digest(raw), RankTable(shards, record.sections, is_buffer)


def _read_rows(message: bytes, known: Mapping[bytes, RankTable]) -> RankTable:
    record = read_record(unpack_message(message, what=_ROWS), _Rows, what=_ROWS)
    if record.version != VERSION or record.vocabulary not in known or record.num_rows < 0:
        found = f"version {record.version}, vocabulary {record.vocabulary[:_DIGEST_NBYTES].hex()}, {record.num_rows} rows"
        raise refusal(_ROWS, f"version {VERSION} and one of {len(known)} vocabularies", found)
    empty = known[record.vocabulary]
    tensors, count, width = empty.shards.tensors, record.num_rows, empty.shards.offsets.shape[1]
    shards = ShardTable(
        tensors=tensors,
        tensor=unpack_ints(record.tensor, count, what=_ROWS),
        offsets=_unpack_dims(record.offsets, count, width, what=_ROWS),
        lengths=_unpack_dims(record.lengths, count, width, what=_ROWS),
    )
    is_outside = (shards.tensor < 0) | (shards.tensor >= len(tensors))
    _refuse_bad(iter([(f"one of {len(tensors)} tensors", is_outside)]), what=_ROWS)
    _refuse_bad(_row_checks(shards), what=_ROWS)
    return RankTable(shards, empty.sections, empty.is_buffer)


def _unpack_dims(data: bytes, count: int, width: int, *, what: str) -> IntColumn:
    return np.ascontiguousarray(unpack_ints(data, count * width, what=what).reshape(width, count).T)


def _tensor_checks(tensors: TensorTable) -> Iterator[Check]:
    shapes, width = tensors.shapes, tensors.shapes.shape[1]
    ndims = tensors.ndims.astype(np.int64)
    yield f"ndim from 0 to {width}", (ndims < 0) | (ndims > width)
    beyond = np.arange(width) >= ndims[:, None]
    yield "length 1 in dims beyond ndim", (beyond & (shapes != 1)).any(axis=1)
    itemsizes = np.array([find_dtype(name).itemsize for name in tensors.dtypes], dtype=np.int64)
    yield from box_checks(Boxes(ndims, shapes, np.zeros_like(shapes), shapes), itemsizes)
    alias_of = tensors.alias_of
    yield "a tie to one of the tensors", (alias_of < NOT_AN_ALIAS) | (alias_of >= len(tensors))
    is_alias = alias_of != NOT_AN_ALIAS
    stored = np.where(is_alias, alias_of, np.arange(len(tensors)))
    codes = np.unique(np.array(tensors.dtypes, dtype=object).astype(str), return_inverse=True)[1].reshape(-1)
    differs = (codes != codes[stored]) | (ndims != ndims[stored]) | (shapes != shapes[stored]).any(axis=1)
    yield "a tie to a stored tensor of equal dtype and shape", is_alias & (is_alias[stored] | differs)


def _row_checks(shards: ShardTable) -> Iterator[Check]:
    tensors, tensor = shards.tensors, shards.tensor
    yield "no row of an alias", tensors.alias_of[tensor] != NOT_AN_ALIAS
    ndims, shapes = tensors.ndims[tensor].astype(np.int64), tensors.shapes[tensor]
    yield from box_checks(Boxes(ndims, shapes, shards.offsets, shards.lengths), np.ones(len(shards), dtype=np.int64))
    beyond = np.arange(shapes.shape[1]) >= ndims[:, None]
    yield "length 1 in dims beyond ndim", (beyond & (shards.lengths != 1)).any(axis=1)


def _refuse_bad(checks: Iterator[Check], *, what: str) -> None:
    for expected, bad in checks:
        if bad.any():
            raise refusal(what, expected, f"another in row {int(bad.argmax())}")


def _check_names(tensors: TensorTable, sections: tuple[str, ...]) -> None:
    """Addresses rise, each once, and lie in sections."""
    for before, after in itertools.pairwise(tensors.addresses):
        if before >= after:
            raise refusal(_VOCABULARY, "sorted addresses", f"{show(before)} before {show(after)}")
    known = set(sections)
    for address in tensors.addresses:
        if section_of(address) not in known:
            raise refusal(_VOCABULARY, f"addresses in the sections {', '.join(map(show, sections))}", show(address))

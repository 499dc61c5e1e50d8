"""Hostile records, one per number: damaged or rebuilt, signed again, and the decoder that has to stand them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from anyshard.records.checks import check_slots
from anyshard.records.footer import FOOTER_NBYTES, decode_head, encode_head
from anyshard.records.index import decode_index, encode_index
from anyshard.records.manifest import Manifest, PartEntry, Thinned, decode_manifest, encode_manifest
from anyshard.records.tail import decode_tail, encode_tail
from anyshard.records.values import decode_value, encode_value
from anyshard.records.values_kinds import Code
from anyshard.records.values_registry import ValueRegistry
from tests.hostile.mutate import TailParts, mutate, pick_number, sign_footer, sign_manifest, sign_tail, take_apart
from tests.hostile.rebuild import change_json, change_table, write_parquet, write_stream
from tests.records.samples import ATTEMPT, make_index, make_manifest, make_tail

MAX_SLOTS = MAX_ROWS = 64
LEVEL = 1

Case = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Samples:
    """Whole records and their parts, made once."""

    manifests: tuple[bytes, ...]
    tail: TailParts
    tail_table: pa.Table
    index: bytes
    index_table: pa.Table
    values: tuple[bytes, ...]
    bombs: tuple[Case, ...]


def make_samples(bombs: Path | None) -> Samples:
    """All samples; bombs come from a file, since making one takes the memory that decoding one must not."""
    tail = take_apart(encode_tail(make_tail()), make_tail().tail_position)
    index = encode_index(make_index())
    return Samples(
        manifests=tuple(encode_manifest(manifest).splitlines()[0] for manifest in _make_manifests()),
        tail=tail,
        tail_table=pa.ipc.open_stream(tail.raw).read_all(),
        index=index,
        index_table=pq.read_table(pa.BufferReader(index), read_dictionary=["address", "dtype", "alias_of"]),
        values=_make_values(),
        bombs=() if bombs is None else tuple(pickle.loads(bombs.read_bytes())),
    )


def _make_manifests() -> tuple[Manifest, ...]:
    """A usual one, that of a thinned checkpoint, and that of a step in parts."""
    usual = make_manifest()
    thinned = replace(usual, thinned=Thinned(ATTEMPT, ("optimizer",), usual.time))
    blank = replace(usual, index=None, blobs=(), sections=(), num_rows=0, num_slots=0)
    return usual, thinned, replace(blank, requires=("parts",), parts=(PartEntry("actor", 1, ATTEMPT), PartEntry("b", 2, ATTEMPT)))


def _make_values() -> tuple[bytes, ...]:
    trees: tuple[object, ...] = (
        {"a": [1, -1, 2**70, 1.5, None, True, "text", b"bytes"], "b": {"c": (1, 2), "d": {3, 4}}},
        {1: "one", (2, 3): complex(1, 2), None: [range(3), slice(1, None)]},
        [bytearray(b"x" * 40), frozenset({1, "a"}), {"nested": [[[[]]]]}],
    )
    return tuple(encode_value(tree, address="extra", registry=ValueRegistry()) for tree in trees)


def make_case(samples: Samples, seed: int, number: int) -> Case:
    """One hostile record: what it claims to be, and its bytes. The first ones are the bombs, then one in 500."""
    random = Random(f"{seed}:{number}")
    if number < len(samples.bombs) or (samples.bombs and random.random() < 0.002):
        return samples.bombs[number % len(samples.bombs)]
    return random.choice(_MAKERS)(samples, random)


def _bytes_of_manifest(samples: Samples, random: Random) -> Case:
    return "manifest", sign_manifest(mutate(random.choice(samples.manifests), random))


def _tree_of_manifest(samples: Samples, random: Random) -> Case:
    return "manifest", sign_manifest(change_json(json.loads(random.choice(samples.manifests)), random))


def _bytes_of_stream(samples: Samples, random: Random) -> Case:
    raw = mutate(samples.tail.raw, random)
    return "tail", sign_tail(samples.tail, zstandard.compress(raw, LEVEL), len(raw))


def _table_of_tail(samples: Samples, random: Random) -> Case:
    raw = write_stream(change_table(samples.tail_table, random), random)
    if random.random() < 0.2:
        raw = mutate(raw, random)
    return "tail", sign_tail(samples.tail, zstandard.compress(raw, LEVEL), len(raw))


def _frame_of_tail(samples: Samples, random: Random) -> Case:
    frame = mutate(zstandard.compress(samples.tail.raw, LEVEL), random)
    return "tail", sign_tail(samples.tail, frame, len(samples.tail.raw))


def _footer_of_tail(samples: Samples, random: Random) -> Case:
    frame = zstandard.compress(samples.tail.raw, LEVEL)
    if random.random() < 0.5:
        name = random.choice("blob_nbytes slots_nbytes slots_raw_nbytes num_slots cells_position num_cells cell_nbytes".split())
        return "tail", sign_tail(samples.tail, frame, len(samples.tail.raw), **{name: pick_number(random)})
    tail = sign_tail(samples.tail, frame, len(samples.tail.raw))
    return "tail", tail[:-FOOTER_NBYTES] + sign_footer(mutate(tail[-FOOTER_NBYTES:], random))


def _bytes_of_head(samples: Samples, random: Random) -> Case:
    return "head", mutate(encode_head(ATTEMPT), random)


def _bytes_of_index(samples: Samples, random: Random) -> Case:
    return "index", mutate(samples.index, random)


def _table_of_index(samples: Samples, random: Random) -> Case:
    data = write_parquet(change_table(samples.index_table, random), random)
    return "index", mutate(data, random) if random.random() < 0.2 else data


def _bytes_of_values(samples: Samples, random: Random) -> Case:
    return "values", mutate(random.choice(samples.values), random)


_MAKERS: tuple[Callable[[Samples, Random], Case], ...] = (
    _bytes_of_manifest,
    _tree_of_manifest,
    _bytes_of_stream,
    _bytes_of_stream,
    _table_of_tail,
    _frame_of_tail,
    _footer_of_tail,
    _bytes_of_head,
    _bytes_of_index,
    _bytes_of_index,
    _table_of_index,
    _bytes_of_values,
    _bytes_of_values,
)


def decode(case: Case) -> None:
    """Decode a record as a load does, and look at everything that came out."""
    kind, data = case
    if kind == "manifest":
        repr(decode_manifest(data, file="manifest-1.json"))
    elif kind == "tail":
        tail = decode_tail(data, tail_position=make_tail().tail_position, max_slots=MAX_SLOTS, file="blob")
        repr(tail)
        check_slots(make_index(), {0: tail}, files=["blob"])
    elif kind == "index":
        index = decode_index(data, max_rows=MAX_ROWS, file="index")
        repr(index)
        check_slots(index, {0: make_tail()}, files=["blob"])
    elif kind == "head":
        decode_head(data, file="blob")
    else:
        repr(decode_value(data, registry=ValueRegistry(), file="blob"))


def _pack_colliding(code: Code) -> bytes:
    """A set or dict of 200,000 ints that all have the hash 0, so that building it would take hours."""
    numbers = ((k * (2**61 - 1)).to_bytes(10, "big", signed=True) for k in range(200_000))
    members = [msgspec.msgpack.Ext(int(Code.INT), msgspec.msgpack.encode(number)) for number in numbers]
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(members)))


def write_bombs(path: Path) -> None:
    """Write records of a few kilobytes that would unfold to hundreds of megabytes. Takes that memory itself."""
    samples = make_samples(None)
    huge = 400 << 20
    columns = samples.tail_table.append_column("bomb", pa.array([bytes(huge // 4)] * 4, pa.large_binary()))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(columns)
    raw = sink.getvalue().to_pybytes()
    texts = pa.array(["a" * (huge // 5) + str(i) for i in range(5)])
    pages = [
        pq.write_table(samples.index_table.set_column(0, "address", texts), at, compression="zstd", use_dictionary=dictionary)
        or at.getvalue().to_pybytes()
        for at, dictionary in ((pa.BufferOutputStream(), True), (pa.BufferOutputStream(), False))
    ]
    frame = zstandard.compress(bytes(huge), LEVEL)
    bombs = [
        ("tail", sign_tail(samples.tail, frame, huge)),
        ("tail", sign_tail(samples.tail, frame, huge, num_slots=huge // 4096)),
        ("tail", sign_tail(samples.tail, frame, 4096)),
        ("tail", sign_tail(samples.tail, zstandard.compress(raw, LEVEL), len(raw))),
        *(("index", page) for page in pages),
        ("manifest", sign_manifest(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}")),
        ("manifest", sign_manifest(b'{"a":' + b"[" * 5_000_000)),
        ("values", b"\xdd" + (1 << 31).to_bytes(4, "big") + b"\x80" * 500_000),
        ("values", b"\xdd" + (5_000_000).to_bytes(4, "big") + b"\x80" * 5_000_000),
        ("values", b"\x91" * 5_000_000 + b"\x80"),
        ("values", b"\xc6" + (1 << 31).to_bytes(4, "big") + b"x"),
        *(("values", _pack_colliding(code)) for code in (Code.SET, Code.DICT)),
    ]
    path.write_bytes(pickle.dumps(bombs))

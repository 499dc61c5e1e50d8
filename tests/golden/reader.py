"""A reader of version 1 from docs/format.md alone: it compares every digest, and leaves out only the limits on hostile files."""

import io
import json
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta
from functools import reduce
from itertools import groupby
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID

import ml_dtypes  # noqa: F401  importing it gives NumPy the names bfloat16 and float8_*
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

NUMBER, SUFFIX = "(?:0|[1-9][0-9]{0,8})", "-[1-9][0-9]{0,8}-[a-z2-7]{13}"
DATA = rf"data/[a-z0-9_][a-z0-9_.-]{{0,63}}/{NUMBER}\.{NUMBER}{SUFFIX}\.bin"
NAME = re.compile(rf"manifest-([1-9][0-9]{{0,8}})\.json|index{SUFFIX}\.parquet|{DATA}")
HEAD, FOOTER = struct.pack("<8s2I", b"\x89ANYSHB\n", 1, 64), struct.Struct("<8s2I8Q48x")
FLOATS = "float16 float32 float64 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
OTHERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 complex128"
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in f"{FLOATS} {OTHERS}".split()}
NAMED = {k.__name__: k for k in (bool, dict, float, int, list, set, str, tuple, PurePosixPath, PureWindowsPath)} | {None: None}
NAMED |= {k.__name__: k for k in (SimpleNamespace, Namespace)} | {"PosixPath": Path, "WindowsPath": PureWindowsPath}
VALUES = {1: lambda p: ("mark", *p), 2: lambda p: int.from_bytes(p, "big", signed=True), 3: lambda p: complex(*p), 4: tuple}
VALUES |= {5: set, 6: frozenset, 7: lambda p: dict(zip(p[::2], p[1::2], strict=True)), 8: lambda p: OrderedDict(*p)}
VALUES |= {9: lambda p: Counter(*p), 10: lambda p: defaultdict(NAMED[p[0]], p[1]), 11: lambda p: deque(p[1], p[0])}
VALUES |= {12: lambda p: ("named tuple", *p), 13: lambda p: NAMED[p[0]](**p[1]), 14: lambda p: range(*p), 15: lambda p: slice(*p)}
VALUES |= {16: bytearray, 17: memoryview, 18: io.BytesIO, 19: lambda p: NAMED[p[0]](p[1])}
VALUES |= {20: lambda p: np.frombuffer(p[1], DTYPES[p[0]]).reshape(())[()]}
VALUES |= {21: lambda p: np.frombuffer(p[2], DTYPES[p[0]]).reshape(p[1]).copy(), 22: datetime.fromisoformat}
VALUES |= {23: date.fromisoformat, 24: lambda p: timedelta(*p), 25: lambda p: UUID(bytes=p), 26: lambda p: ("registered", *p)}
VALUES |= {27: lambda p: ("per rank", *p)}


def _need(ok, rule):
    """Refuse the checkpoint unless it obeys a rule of the page."""
    if not ok:
        raise ValueError(f"damaged, or of a later version: {rule}")


def _file(root, name, size=None):
    """Return the content of a file that has the right form of name and the right length, and that no link leads to."""
    path, plain = root / name, (root / name).resolve() == root / name and (root / name).is_file()
    _need(NAME.fullmatch(name) and plain and size in (None, path.stat().st_size), f"name, kind or length of {name}")
    return path.read_bytes()


def _manifest(root):
    """Return the commit record of the highest generation."""
    highest = max((int(match[1] or 0) for path in root.iterdir() if (match := NAME.fullmatch(path.name))), default=0)
    if not highest:
        raise FileNotFoundError(f"no checkpoint in {root}")
    data = _file(root, f"manifest-{highest}.json")
    _need(data[-43:] == f"\nxxh3-128:{xxh3_128_hexdigest(data[:-42])}\n".encode(), "digest line of the manifest")
    record = json.loads(data[:-43])
    kind = [record[key] for key in ("format", "version", "generation", "bases")]
    is_known = kind == ["anyshard", 1, highest, []] and record["requires"] == ["parts"] * ("parts" in record)
    _need(is_known, f"kind of the manifest that {record['writer']} wrote")
    if record["state"] == "deleted":
        raise FileNotFoundError(f"the step in {root} was deleted")
    return record


def _slots(blob, at, tail_digest):
    """Compare every byte of a blob with its digest; return its slots, each with its bytes as `data`."""
    _need(tail_digest == f"xxh3-128:{xxh3_128_hexdigest(blob[at:])}" and blob.startswith(HEAD), "head or tail of a blob")
    *fixed, frame, raw, count, cells_at, cells, cell = FOOTER.unpack(blob[-128:])
    _need(fixed == [b"\x89ANYSHF\n", 1, 128, len(blob), at] and cells_at == at + frame, "footer of a blob")
    digests = [xxh3_64_intdigest(blob[i : min(i + cell, at)]) for i in range(0, at, cell)]
    _need(digests == [*struct.unpack_from(f"<{cells}Q", blob, cells_at)], "digests of the cells")
    _need(zstandard.frame_content_size(blob[at:cells_at]) == raw <= min(2**18 + 4096 * count, 2**30), "size of the slots")
    (batch,) = pa.ipc.open_stream(zstandard.decompress(blob[at:cells_at]))
    batch.validate(full=True)
    facts, slots = json.loads(batch.schema.metadata[b"anyshard"]), batch.to_pylist()
    _need([facts["byte_order"], facts["cell_digest"], len(slots)] == ["little", "xxh3-64", count], "kind of a blob")
    _need(all(slot["codec"] is None is slot["encoding"] for slot in slots), "codec or encoding")
    return [slot | {"data": blob[slot["position"] : slot["position"] + slot["nbytes"]]} for slot in slots]


def _dims(row, *keys):
    return [tuple(row[f"{key}_{i}"] for i in range(row["ndim"])) for key in keys]


def _tensor(own, blobs):
    """Assemble one tensor from the rows of its address."""
    whole = np.empty(*_dims(own[0], "shape"), DTYPES[own[0]["dtype"]])
    times = np.zeros(whole.shape, int)
    for row in own if whole.size else ():
        slot, (offset, length) = blobs[row["blob"]][row["slot"]], _dims(row, "offset", "length")
        where = tuple(slice(first, first + n) for first, n in zip(offset, length, strict=True))
        _need([slot["dtype"], *_dims(slot, "length")] == [row["dtype"], length] == [own[0]["dtype"], whole[where].shape], "a row")
        whole[where] = np.frombuffer(slot["data"], whole.dtype).reshape(length)
        times[where] += 1
    _need((times == 1).all(), f"regions of {own[0]['address']}")
    return whole


def _unpack(data):
    return msgspec.msgpack.decode(data, ext_hook=lambda code, payload: VALUES[code](_unpack(payload)))


def _merge(one, other):
    """Unite the value trees of two ranks."""
    maps = [type(tree) is dict and {*map(type, tree)} <= {str} for tree in (one, other)]
    if all(maps):
        return one | {key: _merge(one[key], tree) if key in one else tree for key, tree in other.items()}
    _need(not ((maps[0] and one) or (maps[1] and other)), "trees that fit together")
    return one


def _values(section, payloads):
    """Return the value tree of a section, and its per-rank values by address and key."""
    first = payloads[section, 0]
    trees = [payloads[section, rank] for rank in (0, *first.get("also", ()))]
    per_rank = {
        at: {key: payloads[section, rank]["per_rank"][at] for key, rank in keys} for at, keys in first.get("keys", {}).items()
    }
    return reduce(_merge, [tree["shared"] for tree in trees if "shared" in tree]), per_rank


def read(path: Path, attempt: str | None = None) -> dict:
    """Return `step`, `user`, `tensors`, `values` and values `per_rank` of the checkpoint in a directory, or its `parts`."""
    manifest = _manifest(root := path.resolve())
    _need(attempt in (None, manifest.get("thinned", manifest)["attempt"]), f"attempt of part {root.name}")
    if "parts" in manifest:
        parts = {part["name"]: read(root / "parts" / part["name"], part["attempt"]) for part in manifest["parts"]}
        return {"step": manifest["step"], "user": manifest["user"], "parts": parts}
    index = _file(root, manifest["index"]["name"], manifest["index"]["nbytes"])
    _need(manifest["index"]["digest"] == f"xxh3-128:{xxh3_128_hexdigest(index)}", "digest of the index")
    blobs = [_slots(_file(root, of["name"], of["nbytes"]), of["tail_position"], of["tail_digest"]) for of in manifest["blobs"]]
    rows = pq.ParquetFile(io.BytesIO(index)).read(use_threads=False).to_pylist()
    groups = {address: [*own] for address, own in groupby(rows, lambda row: row["address"])}
    tensors = {address: _tensor(own, blobs) for address, own in groups.items() if own[0]["alias_of"] is None}
    tensors |= {address: tensors[own[0]["alias_of"]] for address, own in groups.items() if own[0]["alias_of"] is not None}
    firsts = [(of, slots[-1]) for of, slots in zip(manifest["blobs"], blobs, strict=True) if slots[-1]["dtype"] == "msgpack"]
    payloads = {(of["section"], of["rank"]): _unpack(slot["data"]) for of, slot in firsts}
    found = {section: _values(section, payloads) for section in manifest["sections"]}
    values = {section: tree for section, (tree, _) in found.items()}
    per_rank = {at: trees for _, own in found.values() for at, trees in own.items()}
    return {"step": manifest["step"], "user": manifest["user"], "tensors": tensors, "values": values, "per_rank": per_rank}

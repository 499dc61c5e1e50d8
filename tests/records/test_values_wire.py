"""The wire format of values, byte for byte: what a release once wrote, every later one reads."""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import ml_dtypes
import msgspec
import numpy as np
import pytest

from anyshard.records.values import PerRankMark, TensorMark, Unregistered, ValueRegistry, decode_value, encode_value
from anyshard.records.values_kinds import Code
from tests.records.value_facts import describe

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - the untyped form is one of the cases

WIRE = [
    (None, "c0"),
    (True, "c3"),
    (-1, "ff"),
    (2**64 - 1, "cfffffffffffffffff"),
    (1.5, "cb3ff8000000000000"),
    ("a/b", "a3612f62"),
    (b"ab", "c4026162"),
    ([1, [2]], "92019102"),
    ({"a": 1, "b": 2}, "82a16101a16202"),
    (TensorMark("m/w", "tensor"), "c70c01" + "92a36d2f77a674656e736f72"),
    (2**64, "c70b02" + "c409010000000000000000"),
    (1 + 2j, "c71303" + "92cb3ff0000000000000cb4000000000000000"),
    ((1, "a"), "d604" + "9201a161"),
    ({3, 1}, "c70305" + "920103"),
    (frozenset({"b", "a"}), "c70506" + "92a161a162"),
    ({1: "x", "1": "y"}, "d707" + "9401a178a131a179"),
    (OrderedDict(b=1, a=2), "d708" + "9182a16201a16102"),
    (Counter({3: 2}), "c70709" + "91" + "c70307" + "920302"),
    (defaultdict(list, a=[1]), "c70b0a" + "92a46c69737481a1619101"),
    (deque([1, 2], maxlen=3), "c7050b" + "9203920102"),
    (Point(1, 2), "c70f0c" + "93a5506f696e7492a178a179920102"),
    (types.SimpleNamespace(a=1), "c7150d" + "92af53696d706c654e616d65737061636581a16101"),
    (argparse.Namespace(a=1), "c70f0d" + "92a94e616d65737061636581a16101"),
    (range(0, 6, 2), "d60e" + "93000602"),
    (slice(None, 3), "d60f" + "93c003c0"),
    (bytearray(b"ab"), "d610" + "c4026162"),
    (memoryview(b"ab"), "d611" + "c4026162"),
    (io.BytesIO(b"ab"), "d612" + "c4026162"),
    (pathlib.PurePosixPath("/a"), "c71213" + "92ad50757265506f73697850617468a22f61"),
    (np.float32(1.5), "c70f14" + "92a7666c6f61743332c4040000c03f"),
    (np.array([[1, 2]], dtype=np.int16), "d815" + "93a5696e743136920102c40401000200"),
    (np.array(1, dtype=ml_dtypes.bfloat16), "c70f15" + "93a862666c6f6174313690c402803f"),
    (
        datetime.datetime(2024, 2, 3, 4, 5, 6, 7, tzinfo=datetime.UTC),
        "c72216" + "d920" + b"2024-02-03T04:05:06.000007+00:00".hex(),
    ),
    (datetime.date(2024, 2, 3), "c70b17" + "aa323032342d30322d3033"),
    (datetime.timedelta(days=-1, seconds=2), "d618" + "93ff0200"),
    (uuid.UUID(int=5), "c71219" + "c410" + "00" * 15 + "05"),
    (Unregistered("app.Point", [1], bytes.fromhex("92a96170702e506f696e749101")), "c70d1a" + "92a96170702e506f696e749101"),
    (PerRankMark("rng"), "c7051b" + "91a3726e67"),
]


@pytest.mark.parametrize(("value", "wire"), WIRE, ids=[f"{i}-{type(value).__name__}" for i, (value, _) in enumerate(WIRE)])
def test_a_value_has_exactly_these_bytes(value, wire):
    """Each type of the table is written with the bytes that the format promises, and read back from them."""
    data = encode_value(value, address="extra", registry=ValueRegistry())
    assert wire == data.hex()
    assert describe(value) == describe(decode_value(data, registry=ValueRegistry(), file="blob"))


def test_every_code_has_a_row():
    """No extension code is left without frozen bytes."""
    heads = [bytes.fromhex(wire)[:3] for _, wire in WIRE]
    found = {head[1] for head in heads if 0xD4 <= head[0] <= 0xD8} | {head[2] for head in heads if head[0] == 0xC7}
    assert {int(code) for code in Code} == found


def test_payloads_are_plain_messagepack():
    """A reader that knows only MessagePack sees codes and payloads, which it can decode one by one."""
    data = encode_value({"lr": (0.1, 2)}, address="extra", registry=ValueRegistry())
    outer = msgspec.msgpack.decode(data)
    assert 4 == outer["lr"].code
    assert [0.1, 2] == msgspec.msgpack.decode(outer["lr"].data)

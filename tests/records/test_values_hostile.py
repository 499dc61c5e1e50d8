"""Hostile values: whatever the bytes say, reading gives a value or `CheckpointDamaged`, within time and memory."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.errors import CheckpointDamaged, UnsupportedValue
from anyshard.records.values import ValueLimits, ValueRegistry, decode_value, encode_value
from anyshard.records.values_kinds import Code
from anyshard.records.values_scan import scan
from tests.records.test_values import values

REGISTRY = ValueRegistry()


def pack(value):
    return msgspec.msgpack.encode(value)


def ext(code, payload):
    return pack(msgspec.msgpack.Ext(int(code), pack(payload)))


def decode(data, **limits):
    return decode_value(data, registry=REGISTRY, file="blob-1", limits=ValueLimits(**limits))


SHAPES = {
    "nothing": b"",
    "a number cut": b"\xcb\x00",
    "a cut number at the end of a list": b"\x92\x01\xcd\x01",
    "a float of 32 bits": b"\xca\x3f\x80\x00\x00",
    "a str cut": b"\xa5abc",
    "a long str cut": b"\xdb\xff\xff\xff\xff",
    "a list that claims 4 billion items": b"\xdd\xff\xff\xff\xff",
    "a map that claims more than there is": b"\xde\x00\x02\xa1a\x01",
    "an extension that claims more than there is": b"\xc9\xff\xff\xff\xff\x04",
    "an extension without its code": b"\xc7\x01",
    "a length cut": b"\xdc\x00",
    "a first byte that means nothing": b"\xc1",
    "bytes after the value": b"\x01\x02",
    "an unknown extension": b"\xd4\x63\xc0",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "an empty payload": b"\xc7\x00\x04",
    "two objects as a payload": b"\x91\xd5\x04\x90\x90",
    "a payload that ends before its object": b"\x92\xd4\x04\x91\x01",
    "an extension in an extension": ext(Code.TUPLE, msgspec.msgpack.Ext(4, pack([]))),
    "a map key that is a number": b"\x81\x01\x02",
    "a map key that is a list": b"\x81\x90\x02",
    "a map key that is an extension": b"\x81\xd4\x04\x90\x02",
    "equal map keys": b"\x82\xa1a\x01\xa1a\x02",
    "equal map keys of other length forms": b"\x82\xa1a\x01\xd9\x01a\x02",
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "a surrogate": b"\xa3\xed\xa0\x80",
    "65 nested lists": b"\x91" * 65 + b"\xc0",
    "a million nested lists": b"\x91" * 1_000_000 + b"\xc0",
    "bytes of a tuple bomb": b"\xd5\x04" * 500_000,
}


@pytest.mark.parametrize("data", SHAPES.values(), ids=SHAPES)
def test_malformed_messagepack_is_damage(data):
    """The scan refuses bytes that are not one well-formed object of known extensions."""
    with pytest.raises(CheckpointDamaged, match=r"^blob-1: .*expected") as caught:
        decode(data)
    assert "blob-1" == caught.value.file


# Multiples of the modulus of hash(int): each has the hash 0.
COLLIDING = [msgspec.msgpack.Ext(int(Code.INT), pack((k * (2**61 - 1)).to_bytes(10, "big"))) for k in range(1001)]

PAYLOADS = [
    (Code.MARK, ["a"]),
    (Code.MARK, ["a", "code"]),
    (Code.MARK, [1, "tensor"]),
    (Code.INT, b""),
    (Code.INT, b"\1" * 65537),
    (Code.INT, 5),
    (Code.COMPLEX, [1, 2]),
    (Code.TUPLE, {}),
    (Code.SET, [1, True]),
    (Code.SET, [[]]),
    (Code.FROZENSET, [{}]),
    (Code.SET, COLLIDING),
    (Code.FROZENSET, COLLIDING),
    (Code.DICT, [part for member in COLLIDING for part in (member, None)]),
    (Code.DICT, [1]),
    (Code.DICT, [[], 1]),
    (Code.DICT, [1, 2, 1.0, 3]),
    (Code.ORDERED_DICT, [[]]),
    (Code.COUNTER, []),
    (Code.DEFAULT_DICT, ["eval", {}]),
    (Code.DEFAULT_DICT, [[], {}]),
    (Code.DEQUE, [1, [1, 2]]),
    (Code.DEQUE, [-1, []]),
    (Code.DEQUE, [True, []]),
    (Code.NAMED_TUPLE, ["P", ["x"], []]),
    (Code.NAMED_TUPLE, ["P", ["x", "x"], [1, 2]]),
    (Code.NAMED_TUPLE, ["P", ["__class__"], [1]]),
    (Code.NAMED_TUPLE, ["P", [1], [1]]),
    (Code.NAMESPACE, ["Popen", {}]),
    (Code.NAMESPACE, ["Namespace", []]),
    (Code.RANGE, [0, 1, 0]),
    (Code.RANGE, [0.0, 1, 1]),
    (Code.SLICE, [1, 2]),
    (Code.BYTEARRAY, 1 << 40),
    (Code.MEMORYVIEW, "x"),
    (Code.BYTES_IO, []),
    (Code.PATH, ["open", "/etc/passwd"]),
    (Code.PATH, ["PosixPath", b"/"]),
    (Code.NUMPY_SCALAR, ["object", b"12345678"]),
    (Code.NUMPY_SCALAR, ["float32", b"1"]),
    (Code.NUMPY_ARRAY, ["bool", [1], b"\2"]),
    (Code.NUMPY_ARRAY, ["O", [1], b"12345678"]),
    (Code.NUMPY_ARRAY, ["int8", [2**32, 2**32], b""]),
    (Code.NUMPY_ARRAY, ["int8", [2**63, 0], b""]),
    (Code.NUMPY_ARRAY, ["int8", [-1, -1], b"x"]),
    (Code.NUMPY_ARRAY, ["int8", [1] * 33, b"x"]),
    (Code.NUMPY_ARRAY, ["int8", [True], b"x"]),
    (Code.DATETIME, "yesterday"),
    (Code.DATE, 5),
    (Code.TIMEDELTA, [10**12, 0, 0]),
    (Code.UUID, b"short"),
    (Code.REGISTERED, ["name"]),
    (Code.REGISTERED, [5, None]),
]


@pytest.mark.parametrize(("code", "payload"), PAYLOADS, ids=[f"{i}-{row[0].name}" for i, row in enumerate(PAYLOADS)])
def test_malformed_payloads_are_damage(code, payload):
    """A payload of another shape than its kind has is refused, also where it lies within other values."""
    for data in (ext(code, payload), ext(Code.TUPLE, [msgspec.Raw(ext(code, payload))])):
        with pytest.raises(CheckpointDamaged, match=r"^blob-1: .*damage"):
            decode(data)


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_members_that_share_a_hash_are_refused_at_save_too(kind):
    """What a load would refuse is not saved; 64 such members are few enough for both."""
    numbers = [k * (2**61 - 1) for k in range(65)]
    with pytest.raises(UnsupportedValue, match=r"at most 64 with the same hash, found 65") as caught:
        encode_value({"a": kind(numbers)}, address="extra", registry=REGISTRY)
    assert "extra/a" == caught.value.address
    few = kind(numbers[1:])
    assert few == decode(encode_value(few, address="extra", registry=REGISTRY))


def test_attributes_cannot_reach_the_class():
    """A namespace takes any names as plain attributes; none of them becomes its class or its dict."""
    made = decode(ext(Code.NAMESPACE, ["SimpleNamespace", {"__class__": 1, "__dict__": {"a": 1}}]))
    assert {"__class__": 1, "__dict__": {"a": 1}} == vars(made)
    assert "SimpleNamespace" == type(made).__name__


def outcome(data):
    try:
        decode(data)
    except CheckpointDamaged as error:
        return f"damage of {error.file}"
    return "a value"


def read_elsewhere(data):
    try:
        msgspec.msgpack.decode(data)
    except msgspec.DecodeError as error:
        return str(error)
    return ""


@given(values, st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=300)
def test_changed_bytes_give_a_value_or_damage(value, changes):
    """Any few bytes of an encoded value may change: the outcome is a value or the one error."""
    data = bytearray(encode_value(value, address="extra", registry=REGISTRY))
    for position, byte in changes:
        data[position % len(data)] = byte
    assert outcome(data) in ("a value", "damage of blob-1")


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_the_scan_agrees_with_another_reader(data):
    """What the scan lets through, msgspec decodes as well, but for text, which the scan does not read."""
    try:
        scan(data, codes=range(128), limits=ValueLimits())
    except ValueError:
        return
    assert read_elsewhere(data) in ("", "Invalid UTF-8 encoded string")


@given(values, st.data())
def test_cut_bytes_are_damage(value, data):
    """No prefix of a value is a value."""
    whole = encode_value(value, address="extra", registry=REGISTRY)
    with pytest.raises(CheckpointDamaged):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.slow
@pytest.mark.parametrize("bomb", [b"\x80", b"\xd4\x05\x90", b"\x90"], ids=["maps", "sets", "lists"])
def test_nodes_are_counted_before_anything_is_built(bomb):
    """A bomb of a hundred thousand empty containers costs no memory but that of its bytes."""
    data = b"\xdd" + (100_000).to_bytes(4, "big") + bomb * 100_000
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged, match="at most 99999 objects"):
            decode(data, max_nodes=99_999)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + 100_000
    finally:
        tracemalloc.stop()


def test_size_is_checked_first():
    """More bytes than the limit are not even looked at."""
    with pytest.raises(CheckpointDamaged, match="at most 100 bytes, found 101"):
        decode(b"\xc1" * 101, max_nbytes=100)


def test_any_buffer_can_be_read():
    """Bytes, bytearrays and memoryviews hold the same value."""
    for kind in (bytes, bytearray, memoryview):
        assert [1, "a"] == decode(kind(b"\x92\x01\xa1a"))

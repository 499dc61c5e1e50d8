"""Values come back equal and of the same types, or are refused with the address of the element."""

from __future__ import annotations

import copy
import datetime
import enum
import io
import math
import os
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anyshard.errors import LimitExceeded, UnsupportedValue
from anyshard.records.values import NamedTupleRecord, ValueLimits, ValueRegistry, decode_value, encode_value
from anyshard.records.values_kinds import Code
from anyshard.records.values_scan import scan
from tests.records.value_facts import describe

REGISTRY = ValueRegistry()
Config = namedtuple("Config", ["count", "rate"])  # noqa: PYI024 - the untyped form is one of the cases


class Color(enum.IntEnum):
    RED = 1


class AttributeDict(dict):
    pass


class Name(str):
    __slots__ = ()


class Derived(Config):
    pass


class MyFloat(np.float64):
    pass


def encode(value, **limits):
    return encode_value(value, address="extra", registry=REGISTRY, limits=ValueLimits(**limits))


def round_trip(value):
    return decode_value(encode(value), registry=REGISTRY, file="blob")


text = st.text(st.characters(codec="utf-8"), max_size=6)
floats = st.floats() | st.sampled_from(
    [struct.unpack("<d", bits)[0] for bits in (b"\1\0\0\0\0\0\xf4\x7f", b"\7\0\0\0\0\0\xf8\xff")]
)
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | floats
    | text
    | st.binary(max_size=6)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
arrays = hnp.arrays(
    st.sampled_from(["bool", "int8", "uint16", "float16", "float64", "complex64"]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
leaves = (
    hashable
    | arrays
    | st.sampled_from([np.float64(1.5), np.int8(-1), np.bool_(True), ml_dtypes.bfloat16(2)])
    | st.binary(max_size=6).flatmap(lambda b: st.sampled_from([bytearray(b), memoryview(b), io.BytesIO(b)]))
    | st.sampled_from([range(0, 9, 2), slice(1, None), pathlib.Path("/a/b"), uuid.UUID(int=7)])
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC)).map(lambda moment: moment.replace(fold=0))
    | st.dates()
    | st.timedeltas()
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
        | st.dictionaries(text, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(text, inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
        | st.sets(hashable, max_size=3)
        | st.tuples(inner, inner).map(Config._make)
    ),
    max_leaves=12,
)


@given(values)
def test_a_value_comes_back_the_same(value):
    """Whatever is nested in what, types, order, bits and content are those that were saved."""
    assert describe(value) == describe(round_trip(value))


@given(values)
def test_what_comes_back_has_the_same_bytes(value):
    """Loading and saving again changes no byte, and what the encoder counts is what the scan counts."""
    data = encode(value)
    assert data == encode(round_trip(value))
    num_nodes = scan(data, codes=frozenset(Code), limits=ValueLimits())
    assert data == encode(value, max_nodes=num_nodes)
    if num_nodes > 1:
        with pytest.raises(LimitExceeded):
            encode(value, max_nodes=num_nodes - 1)


@pytest.mark.parametrize("value", [-0.0, math.inf, -math.inf, math.nan, 5e-324], ids=str)
def test_floats_keep_all_bits(value):
    """Signs of zero and of NaN, infinities and subnormals survive."""
    assert struct.pack("<d", value) == struct.pack("<d", round_trip(value))


@pytest.mark.parametrize("bit_generator", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_numpy_generators_continue(bit_generator):
    """A NumPy bit generator goes on where it was, with its 128-bit integers or its arrays."""
    source, target = bit_generator(1), bit_generator(2)
    target.state = round_trip(source.state)
    assert np.random.Generator(source).random() == np.random.Generator(target).random()


def test_python_random_continues():
    """The state of `random` is accepted by `setstate` as it comes back."""
    source, target = random.Random(1), random.Random(2)
    target.setstate(round_trip(source.getstate()))
    assert source.random() == target.random()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16"])
def test_arrays_of_ml_dtypes_keep_their_bits(dtype):
    """All 256 bit patterns of an element's low byte survive, whatever they mean."""
    kind = np.dtype(getattr(ml_dtypes, dtype))
    array = np.arange(256, dtype=f"u{kind.itemsize}").view(kind)
    assert (array.dtype, array.tobytes()) == ((back := round_trip(array)).dtype, back.tobytes())


def test_arrays_come_back_writable_and_dense():
    """A transposed view is stored by its elements and comes back as an array of its own."""
    array = np.arange(6).reshape(2, 3).T
    back = round_trip(array)
    assert np.array_equal(array, back)
    back += 1
    assert 0 == array[0, 0]


def test_a_named_tuple_comes_back_as_a_record():
    """It equals the original, gives fields by name, even `count`, and survives copy, pickle and a second save."""
    record = round_trip(Config(count=3, rate=0.5))
    assert Config(3, 0.5) == record
    assert (3, 0.5) == (record.count, record.rate)
    assert "Config(count=3, rate=0.5)" == repr(record)
    for twin in (copy.deepcopy(record), pickle.loads(pickle.dumps(record)), round_trip(record)):
        assert NamedTupleRecord is type(twin)
        assert {"count": 3, "rate": 0.5} == twin._asdict()


def test_bytes_io_comes_back_whole():
    """Content is kept whatever the position was; the position is 0."""
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    assert b"abc" == round_trip(stream).read()


def test_a_path_of_the_other_system_comes_back_pure():
    """A path that this system cannot open keeps its text and its rules."""
    other, pure = ("WindowsPath", pathlib.PureWindowsPath) if os.name == "posix" else ("PosixPath", pathlib.PurePosixPath)
    payload = msgspec.msgpack.Ext(int(Code.PATH), msgspec.msgpack.encode([other, "a/b"]))
    assert pure("a/b") == decode_value(msgspec.msgpack.encode(payload), registry=REGISTRY, file="blob")


def cyclic_list():
    value = [1]
    value.append((value,))
    return {"a": value}


def cyclic_deque():
    value = deque()
    value.append({"k": value})
    return [value]


REFUSED = [
    (lambda: {"a": [0, Color.RED]}, "extra/a/1", "subclass of int"),
    (lambda: {"a/b": AttributeDict()}, "extra/a~1b", "subclass of dict"),
    (lambda: [(Name("x"),)], "extra/0/0", "subclass of str"),
    (lambda: {1: Derived(1, 2)}, "extra/~i1", "subclass of tuple"),
    (lambda: MyFloat(1), "extra", "subclass of float64"),
    (lambda: {"t": {Color.RED: 1}}, "extra/t", "Color"),
    (lambda: OrderedDict(a=deque([0, object()])), "extra/a/1", "object"),
    (lambda: {"s": {1, (object,)}}, "extra/s/0", "type"),
    (lambda: defaultdict(lambda: 0), "extra", "factory"),
    (lambda: ["ok", "\ud800"], "extra/1", "UTF-8"),
    (lambda: {"a": {"\ud800": 1}}, "extra/a", "UTF-8"),
    (lambda: {"a": np.array(["x"])}, "extra/a", "numeric numpy dtype"),
    (lambda: {"a": np.array([None])}, "extra/a", "numeric numpy dtype"),
    (lambda: {"a": np.zeros(1, dtype=[("x", "i4")])}, "extra/a", "numeric numpy dtype"),
    (lambda: {"a": np.zeros(1, dtype=">i4")}, "extra/a", "byte order"),
    (lambda: np.zeros([1] * 33), "extra", "at most 32 dims"),
    (lambda: np.datetime64(1, "s"), "extra", "numeric numpy dtype"),
    (lambda: np.ma.masked_array([1]), "extra", "subclass of ndarray"),
    (lambda: [1 << (8 * 65536)], "extra/0", "at most 65536 bytes"),
    (lambda: datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC, fold=1), "extra", "without fold"),
    (lambda: memoryview(np.zeros(2)), "extra", "memoryview"),
    (lambda: namedtuple("N", ["def"], rename=True)(1), "extra", "public identifiers"),  # noqa: PYI024
    (lambda: lambda: 0, "extra", "function"),
    (cyclic_list, "extra/a/1/0", "contains itself"),
    (cyclic_deque, "extra/0/0/k", "contains itself"),
]


@pytest.mark.parametrize(("make", "address", "reason"), REFUSED, ids=[f"{i}-{row[2]}" for i, row in enumerate(REFUSED)])
def test_what_cannot_be_kept_exactly_is_refused(make, address, reason):
    """No subclass is stored as its base and nothing is dropped: the error names the address and the reason."""
    with pytest.raises(UnsupportedValue, match=reason) as caught:
        encode(make())
    assert address == caught.value.address
    assert str(caught.value).startswith(f"{address}: ")


def test_a_closed_stream_is_refused():
    """A closed BytesIO has no content to save."""
    stream = io.BytesIO()
    stream.close()
    with pytest.raises(UnsupportedValue, match="closed"):
        encode(stream)


def nest(depth, wrap):
    value = 0
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPPERS = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "map": lambda value: {"k": value},
    "dict": lambda value: {1: value},
    "frozenset": lambda value: frozenset({value}),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_depth_is_bounded_on_both_sides(wrap):
    """64 nested containers of any kind work, 65 are refused when saving, and saving never allows what loading refuses."""
    value = nest(64, wrap)
    assert value == round_trip(value)
    with pytest.raises(LimitExceeded, match="at most 64 nested containers in the values of extra, found more; flatten"):
        encode(wrap(value))


@pytest.mark.parametrize(
    "value",
    [b"x" * 101, "x" * 101, ["x" * 60, b"y" * 60], [0] * 101, np.zeros(101, np.uint8)],
    ids=["bytes", "str", "sum", "list", "array"],
)
def test_size_is_bounded(value):
    """A value beyond the limit of bytes is refused with the advice to store a tensor."""
    with pytest.raises(LimitExceeded, match="at most 100 bytes in the values of extra, found more; store large data as tensors"):
        encode({"a": value}, max_nbytes=100)


def test_shared_elements_cannot_explode():
    """Lists that share their items a billion times over run into the limit of elements, not of memory."""
    value = []
    for _ in range(30):
        value = [value, value]
    with pytest.raises(LimitExceeded, match="at most 1000 elements"):
        encode(value, max_nodes=1000)


def test_limits_must_be_positive():
    """A limit of 0 is a mistake of the caller."""
    with pytest.raises(LimitExceeded, match="positive"):
        ValueLimits(max_depth=0)


def test_bytes_do_not_depend_on_the_process():
    """Two processes with other hash seeds write the same bytes for the same sets."""
    script = (
        "from anyshard.records.values import *\n"
        "value = {'s': {'a', 'b', 'c', 1, None, (2, 'x')}, 'f': frozenset({'q', b'q', frozenset({'r', 's'})})}\n"
        "print(encode_value(value, address='extra', registry=ValueRegistry()).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert 1 == len(printed)
    assert "" != printed.pop().strip()

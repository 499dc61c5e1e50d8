"""Facts of a value for comparisons that `==` is too weak for: exact types, order of dicts, bits of floats and arrays."""

from __future__ import annotations

import argparse
import io
import struct
import types
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np

from anyshard.records.values import NamedTupleRecord, Unregistered
from anyshard.records.values_kinds import is_named_tuple


def describe(value):
    """Nested tuples of strings and numbers that are equal for two values only if the values are the same in every way."""
    kind = type(value)
    name = kind.__name__
    if is_named_tuple(value) or kind is NamedTupleRecord:
        # The codec promises the tuple, its type's name and its fields, not the class.
        type_name = value.__dict__["type_name"] if kind is NamedTupleRecord else name
        return ("named tuple", type_name, value._fields, tuple(map(describe, value)))
    if kind in (dict, OrderedDict, Counter, defaultdict):
        items = tuple((describe(key), describe(item)) for key, item in value.items())
        return (name, getattr(value, "default_factory", None), items)
    if kind in (list, tuple, deque):
        return (name, getattr(value, "maxlen", None), tuple(map(describe, value)))
    if kind in (set, frozenset):
        return (name, frozenset(map(describe, value)))
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return (name, describe(vars(value)))
    return (name, describe_leaf(value))


_LEAVES = {
    float: lambda value: struct.pack("<d", value),
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    bytearray: bytes,
    memoryview: bytes,
    io.BytesIO: lambda value: (value.getvalue(), value.tell()),
    slice: lambda value: (describe(value.start), describe(value.stop), describe(value.step)),
    Unregistered: lambda value: (value.name, describe(value.payload)),
    np.ndarray: lambda value: (str(value.dtype), value.shape, value.tobytes()),
}


def describe_leaf(value):
    """The part of `describe` for what holds no other values with addresses."""
    kind = np.ndarray if isinstance(value, np.generic) else type(value)
    return _LEAVES.get(kind, lambda plain: plain)(value)

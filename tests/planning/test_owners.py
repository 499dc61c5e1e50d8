"""Owners of parts: the lowest rank that has one writes it, and what differs is named with its ranks."""

from __future__ import annotations

import msgspec
import pytest

from anyshard.errors import InvalidAppState, UnsupportedFormat
from anyshard.planning.owners import Owners, PartDifference, assign_owners, compare_parts, decode_owned, encode_owned
from anyshard.records.packed import pack_message
from anyshard.records.value_parts import PartList, list_leaves
from anyshard.records.values import ValueRegistry


def parts(**trees: object) -> PartList:
    return list_leaves(trees, registry=ValueRegistry())


def test_equal_ranks_leave_all_to_the_first():
    """Rank 0 writes its whole trees, so nothing is listed for it, and others have nothing to add."""
    same = parts(s={"a": 1})
    assert Owners(({}, {}, {}), {}) == assign_owners([same, same, parts(s={"a": 2})])


def test_other_ranks_write_what_no_lower_rank_has():
    """Stages of a pipeline, a section of one rank only, an entry more."""
    lists = [parts(s={"w0": 1}), parts(s={"w1": 1, "m": {"x": 1}}), parts(s={"w0": 1, "m": {"x": 1, "y": 2}}, t=5)]
    expected = Owners(({}, {"s": (("m", "x"), ("w1",))}, {"s": (("m", "y"),), "t": ((),)}), {"s": (1, 2), "t": (2,)})
    assert expected == assign_owners(lists)


def test_an_empty_dict_goes_with_keys_that_others_have_there():
    """A rank without optimizer state is no conflict, and has nothing to write."""
    empty, full = parts(s={"state": {}}), parts(s={"state": {"w": 1}})
    assert Owners(({}, {}), {}) == assign_owners([full, empty])
    assert Owners(({}, {"s": (("state", "w"),)}), {"s": (1,)}) == assign_owners([empty, full])
    assert Owners(({}, {"s": (("state", "w"),)}), {"s": (1,)}) == assign_owners([parts(s={}), full])


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([{"a": 1}, {"a": {"b": 1}}], "s/a: .* a dict with keys on rank 1 and another value on rank 0"),
        ([{}, {"a": {"b": {"c": 1}}}, {"a": 1}], "s/a: .* a dict with keys on rank 1 and another value on rank 2"),
        ([{"x": {}}, {"x": {"a/b": [1]}}, {"x": {"a/b": {"c": 1}}}], "s/x/a~1b: .* keys on rank 2 and another value on rank 1"),
        ([5, {"a": 1}], "s: .* a dict with keys on rank 1 and another value on rank 0"),
    ],
)
def test_a_value_beside_a_dict_with_keys_is_refused(trees, message):
    """They cannot be one tree; the error names the address and both ranks."""
    with pytest.raises(InvalidAppState, match=message):
        assign_owners([parts(s=tree) for tree in trees])


def test_parts_that_differ_are_named_with_the_classes_of_ranks():
    """Only what ranks have in common is compared; the class of the lowest rank comes first."""
    same = parts(s={"a": 1, "b": 2})
    lists = [same, parts(s={"a": 9, "b": 2, "c": 3}), same, parts(s={"a": 7}, t=1), parts(s={"a": 9}, t=2)]
    expected = (PartDifference("s/a", ((0, 2), (1, 4), (3,))), PartDifference("t", ((3,), (4,))))
    assert expected == compare_parts(lists)
    assert "s/a: one value on ranks 0, 2, another on ranks 1, 4, another on rank 3" == str(expected[0])


def test_equal_parts_do_not_differ():
    """Nor do those that only one rank has, or that came about in another order."""
    assert () == compare_parts([parts(s={"a": 1, "b": {2, 3}}), parts(s={"b": {3, 2}, "a": 1}), parts(t=1)])


def test_a_message_on_many_ranks_stays_short():
    """A thousand ranks with a value each are no page of numbers."""
    alone = PartDifference("s/a", tuple((rank,) for rank in range(1000)))
    halves = PartDifference("s/a", (tuple(range(500)), tuple(range(500, 1000))))
    assert str(alone).endswith("another on rank 7, and 992 more values")
    assert str(halves).startswith("s/a: one value on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 492 more, another on ranks 500,")


def test_owned_parts_travel():
    """What the coordinator hands to a rank is what it reads."""
    owned = {"s": (("a", "b"), ()), "t": ()}
    assert owned == decode_owned(encode_owned(owned))
    assert {} == decode_owned(encode_owned({}))


def test_other_messages_are_refused():
    """Paths are lists of text."""
    with pytest.raises(UnsupportedFormat, match="owned parts: expected"):
        decode_owned(pack_message(msgspec.msgpack.encode([{"s": [[1]]}])))

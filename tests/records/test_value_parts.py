"""Parts of value trees: what they are, when they are equal, and that those of several ranks make one tree."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedFormat, UnsupportedValue
from anyshard.planning.owners import assign_owners
from anyshard.records.packed import pack_message
from anyshard.records.section_values import ABSENT, SectionValues, decode_section, encode_section
from anyshard.records.value_parts import (
    EMPTY_DICT_DIGEST,
    PartList,
    canonical_bytes,
    decode_part_list,
    encode_part_list,
    list_leaves,
    list_parts,
    list_paths,
    merge_trees,
    pick_parts,
)
from anyshard.records.values import (
    PerRankMark,
    TensorMark,
    Unregistered,
    ValueLimits,
    ValueRegistry,
    decode_value,
    encode_value,
    is_container,
    list_items,
    rebuild_container,
)
from tests.records.test_values import text, values
from tests.records.value_facts import describe

REGISTRY = ValueRegistry()
DICTS = ("dict", "Counter", "defaultdict")


def parts_of(tree):
    return list_leaves({"s": tree}, registry=REGISTRY).parts["s"]


def canonical(value):
    return canonical_bytes(value, registry=REGISTRY)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (5, [()]),
        ({}, [()]),
        ({1: 2}, [()]),
        ({"a": 1, 2: 3}, [()]),
        (OrderedDict(a=1), [()]),
        (defaultdict(int, a=1), [()]),
        ({"b": 1, "a": {}}, [("a",), ("b",)]),
        ({"a": {"c": [{"d": 1}], "": None}, "b": TensorMark("s/b", "tensor")}, [("a", ""), ("a", "c"), ("b",)]),
    ],
)
def test_parts_lie_below_plain_dicts_with_text_keys(tree, paths):
    """All else is one part: other dicts, lists with dicts in them, and an empty dict."""
    assert paths == list(parts_of(tree))


MARK = TensorMark("s/w", "tensor")


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": 1, "b": {"c": 2}}, [()]),
        ({"a": 1, "w": MARK}, [("a",), ("w",)]),
        ({"a": {"b": {"c": 1}}, "d": {"w": MARK, "e": {}}}, [("a",), ("d", "e"), ("d", "w")]),
        ({"own": PerRankMark("s/own"), "a": {"b": 1}}, [("a",), ("own",)]),
        ({"list": [MARK], "a": 1}, [()]),
    ],
)
def test_dicts_without_marks_are_one_part(tree, paths):
    """A container without tensors is one value, so that a key more in it is no other structure."""
    assert paths == list(list_parts({"s": tree}, registry=REGISTRY).parts["s"])


def test_branches_are_taken_apart_without_marks_too():
    """A dict that is named is united with those of other ranks key by key, those below it are not."""
    tree = {"groups": {"w": {"lr": 1.0}, "v": {"lr": 2.0}}, "rest": {"a": 1}}
    parts = list_parts({"s": tree}, registry=REGISTRY, branches=["s", "s/groups"]).parts["s"]
    assert [("groups", "v"), ("groups", "w"), ("rest",)] == list(parts)


def forget_order(facts):
    """The facts of a value without the order of dicts, which is no part of their being equal."""
    if not isinstance(facts, tuple):
        return facts
    if len(facts) == 3 and facts[0] in DICTS:
        return (*facts[:2], frozenset(map(forget_order, facts[2])))
    return tuple(map(forget_order, facts))


def turn_around(value):
    """The same value with all dicts in the opposite order."""
    if not is_container(value):
        return value
    turned = rebuild_container(value, [turn_around(item) for _, item in list_items(value)])
    if type(turned).__name__ in DICTS:
        items = list(turned.items())[::-1]
        turned.clear()
        for key, item in items:
            turned[key] = item
    return turned


@given(values, values)
def test_canonical_bytes_are_equal_exactly_if_values_are(one, other):
    """Equal by types, content and bits; two values drawn apart are so only now and then."""
    assert (forget_order(describe(one)) == forget_order(describe(other))) == (canonical(one) == canonical(other))


@given(values)
def test_the_order_of_a_dict_makes_no_difference(value):
    """Two ranks that fill a dict in another order have the same value."""
    assert canonical(value) == canonical(turn_around(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        ([1], (1,)),
        (2**70, 2**70 + 1),
        ({1: 2}, {1.0: 2}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (OrderedDict(a=1), {"a": 1}),
        (TensorMark("s/a", "tensor"), TensorMark("s/b", "tensor")),
        (TensorMark("s/a", "tensor"), TensorMark("s/a", "ndarray")),
        (PerRankMark("s/a"), PerRankMark("s/b")),
        ({}, None),
    ],
)
def test_what_is_not_the_same_has_another_digest(one, other):
    """Types, bits, marks, and the order of an OrderedDict, which is equal in its own order only."""
    assert canonical(one) != canonical(other)


def test_not_a_number_is_equal_to_itself():
    """Floats are compared by their bits."""
    assert parts_of(float("nan")) == parts_of(float("nan"))
    assert parts_of([float("nan")]) == parts_of([float("nan")])


def test_marks_and_plain_values_have_the_digests_of_their_encoding():
    """The short cuts for what is frequent give what the encoder gives."""
    for value in (TensorMark("s/a", "bytes"), None, True, 0.5):
        assert canonical(value) == encode_value(value, address="s", registry=REGISTRY)
    assert {(): EMPTY_DICT_DIGEST} == parts_of({})
    assert parts_of({"a": None, "b": TensorMark("s/b", "tensor")}) == {
        (key,): digest for key, tree in (("a", None), ("b", TensorMark("s/b", "tensor"))) for digest in parts_of(tree).values()
    }


def test_a_value_that_is_not_registered_here_equals_the_registered_one():
    """A rank that lacks a registration, and saves again what it loaded, has the value of the others."""

    class Point:
        x = 3

    known = ValueRegistry()
    known.register("app.Point", Point, lambda point: {"x": point.x}, lambda fields: Point())
    loaded = decode_value(encode_value(Point(), address="s", registry=known), registry=REGISTRY, file="s")
    assert Unregistered is type(loaded)
    assert canonical_bytes(Point(), registry=known) == canonical(loaded)


def test_sets_have_one_digest_in_every_process():
    """The order in which a process keeps a set does not matter."""
    code = (
        "from anyshard.records.value_parts import *; from anyshard.records.values import ValueRegistry;"
        "print(list_leaves({'s': {'a': {str(i) for i in range(99)}}}, registry=ValueRegistry()).digest)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=60)
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize(
    ("tree", "address"),
    [({"a": {"b": object()}}, "s/a/b"), ({"a": {"b": OrderedDict(c=object())}}, "s/a/b/c"), ({"a": {"\ud800": 1}}, "s/a")],
)
def test_a_part_that_cannot_be_stored_is_named(tree, address):
    """Parts are listed before anything is encoded, so this is where a user hears of it."""
    with pytest.raises(UnsupportedValue) as caught:
        parts_of(tree)
    assert address == caught.value.address


def test_a_tree_that_contains_itself_or_has_no_end_is_refused():
    """Neither sends the walk into the depth."""
    cycle: dict[str, object] = {}
    cycle["a"] = cycle
    with pytest.raises(UnsupportedValue, match="contains itself"):
        parts_of(cycle)
    deep: object = 1
    for _ in range(200):
        deep = {"a": deep}
    with pytest.raises(LimitExceeded, match="nested containers"):
        parts_of(deep)


def double(leaf, num_levels):
    """A tree in which every dict stands twice in the one around it."""
    for _ in range(num_levels):
        leaf = {"a": leaf, "b": leaf}
    return leaf


@pytest.mark.parametrize("leaf", [1, MARK])
def test_a_dict_that_is_in_many_places_is_refused_before_they_are_listed(leaf, monkeypatch):
    """Written out there would be 16 million and more elements, or no end of them."""
    monkeypatch.setattr("anyshard.records.value_parts._LIMITS", ValueLimits(max_nodes=200))
    cycle: dict[str, object] = {"leaf": leaf}
    cycle |= {"a": cycle, "b": cycle}
    for list_all in (list_parts, list_leaves):
        with pytest.raises(UnsupportedValue, match="^s/a: .* contains itself"):
            list_all({"s": cycle}, registry=REGISTRY)
        with pytest.raises(LimitExceeded, match="^s/a/.*: expected at most 200 elements in the values of s"):
            list_all({"s": double(leaf, 24)}, registry=REGISTRY)


def test_a_dict_that_is_in_several_places_has_parts_in_all():
    """It is stored as often; a mark that lies in it takes all dicts around it apart."""
    below = {"w": MARK, "n": {"a": 1}}
    assert [("a", "n"), ("a", "w"), ("b", "n"), ("b", "w"), ("c",)] == list(
        list_parts({"s": {"a": below, "b": below, "c": double(1, 5)}}, registry=REGISTRY).parts["s"]
    )


@pytest.mark.parametrize("tree", [{"w": MARK, "a": {}, "b": {"c": 1}}, {"a": 1}, {}, 5, {"groups": {"a": {"b": 1}}}])
def test_a_rank_alone_lists_the_same_paths(tree):
    """Its structure is the same as of a rank that compares its values with those of others."""
    of_group = list_parts({"s": tree}, registry=REGISTRY, branches=["s/groups"])
    assert of_group.structure == list_paths({"s": tree}, branches=["s/groups"]).structure


def test_a_rank_alone_encodes_nothing_to_list_its_paths():
    """What cannot be stored is refused when it is stored."""
    assert [("b",), ("w",)] == list(list_paths({"s": {"w": MARK, "b": object()}}).parts["s"])


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"opts": {"one": {"state": {}}}, "epoch": 1}, [("epoch",), ("opts", "one", "state")]),
        ({"opts": {"one": {}}, "epoch": {"a": 1}}, [("epoch",), ("opts", "one")]),
        ({"opts": {"other": {}}, "epoch": 1}, [()]),
        ({"opts": [{"one": {}}], "epoch": 1}, [()]),
        (5, [()]),
    ],
)
def test_dicts_around_a_branch_are_taken_apart_too(tree, paths):
    """Those that lead to it, if it is there; it may be empty on this rank."""
    assert paths == list(list_paths({"s": tree}, branches=["s/opts/one", "t/opts"]).parts["s"])


def test_an_empty_dict_is_another_structure_than_a_value():
    """Another rank may have keys in its place, and then a plan that was made for it does not hold for a value there."""
    structures = [list_parts({"s": {"w": MARK, "x": x}}, registry=REGISTRY).structure for x in ({}, 5, [1])]
    assert [False, True] == [structures[1] == structures[0], structures[1] == structures[2]]


def test_structure_and_digest_say_what_has_changed():
    """A changed value changes the digest, a changed path both, another order neither."""
    base, turned = (list_leaves({"s": tree, "t": 1}, registry=REGISTRY) for tree in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    other_value, other_path = (
        list_leaves({"s": tree, "t": 1}, registry=REGISTRY) for tree in ({"a": 1, "b": 3}, {"a": 1, "c": 2})
    )
    assert (base.structure, base.digest) == (turned.structure, turned.digest)
    assert [(True, False), (False, False)] == [
        (base.structure == other.structure, base.digest == other.digest) for other in (other_value, other_path)
    ]


def test_marks_need_no_encoder(monkeypatch):
    """The trees of a large model are listed at every save, on the main thread."""
    monkeypatch.setattr("anyshard.records.value_parts.Encoder", None)
    tree = {f"layers.{number}.weight": TensorMark(f"s/layers.{number}.weight", "tensor") for number in range(100)}
    assert 100 == len(parts_of({"a": tree, "b": {"params": dict.fromkeys(tree)}})) // 2


# Messages --------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(text.filter(bool), values, max_size=3))
def test_part_lists_travel(trees):
    """What one rank sends the other reads, and equal lists are equal bytes."""
    parts = list_leaves(trees, registry=REGISTRY)
    assert parts == decode_part_list(encode_part_list(parts))
    assert encode_part_list(parts) == encode_part_list(PartList(dict(parts.parts)))


@pytest.mark.parametrize(
    "message",
    [
        [{"s": [[["a"]], b"1234567"]}],
        [{"s": [[["b"], ["a"]], bytes(16)]}],
        [{"s": [[["a"], ["a"]], bytes(16)]}],
        [{"s": [[["a"], ["a", "b"]], bytes(16)]}],
        [{"s": [[[], ["a"]], bytes(16)]}],
        [{"s": [[[1]], bytes(8)]}],
        {},
    ],
)
def test_what_no_rank_sends_is_refused(message):
    """Digests that do not belong to the paths, paths out of order or within each other, and other types."""
    with pytest.raises(UnsupportedFormat, match="part list: expected"):
        decode_part_list(pack_message(msgspec.msgpack.encode(message)))


# Picking and merging ---------------------------------------------------------------------------------------------------

TREES = st.dictionaries(
    text, st.recursive(st.integers(0, 9), lambda inner: st.dictionaries(text, inner, max_size=4), max_leaves=12), max_size=4
)


def store_on_ranks(trees, owners):
    """The payloads of all ranks, decoded."""
    owned = [[()], *(paths.get("s", ()) for paths in owners.of_rank[1:])]
    shared = [pick_parts(tree, paths) if paths else ABSENT for tree, paths in zip(trees, owned, strict=True)]
    payloads = [encode_section(SectionValues(tree), section="s", registry=REGISTRY) for tree in shared]
    return [decode_section(data, registry=REGISTRY, file="s").shared for data in payloads]


@given(TREES, st.data())
def test_what_ranks_pick_and_write_merges_to_the_tree_of_each(tree, data):
    """The stored tree has every part that a rank has, nothing else, and each part is written once."""
    paths = sorted(parts_of(tree))
    chosen = [data.draw(st.lists(st.sampled_from(paths), unique=True)) for _ in range(3)]
    trees = [pick_parts(tree, some) for some in chosen]
    lists = [list_leaves({"s": each}, registry=REGISTRY) for each in trees]
    owners = assign_owners(lists)
    stored = [each for each in store_on_ranks(trees, owners) if each is not ABSENT]
    merged = merge_trees(stored, file="s")
    for each, listed in zip(trees, lists, strict=True):
        assert each == {} or each == pick_parts(merged, listed.parts["s"])
    assert set(parts_of(merged)) - {()} == {path for some in chosen for path in some} - {()}
    assert sum(len(parts_of(each)) for each in stored if each != {}) == len(parts_of(merged)) - (merged == {})


def test_picked_parts_keep_the_order_of_the_tree():
    """Order of keys is that of the rank that writes them."""
    tree = {"b": {"d": 1, "c": 2}, "a": 3, "e": 4}
    assert ["b", "a"] == list(pick_parts(tree, [("a",), ("b", "c"), ("b", "d")]))
    assert {"b": {"d": 1}} == pick_parts(tree, [("b", "d")])
    assert tree is pick_parts(tree, [()])
    assert {} == pick_parts(5, [])


def test_the_first_of_several_counts():
    """Values that differed are those of the lowest rank; an empty dict takes what others have below it."""
    trees = [{"a": 1, "b": {}}, {"a": 2, "b": {"c": 3}}, {"b": {}, "d": {"e": [4]}}]
    assert {"a": 1, "b": {"c": 3}, "d": {"e": [4]}} == merge_trees(trees, file="s")
    assert [{"a": 1, "b": {}}, {"a": 2, "b": {"c": 3}}, {"b": {}, "d": {"e": [4]}}] == trees


def test_no_tree_at_all_is_damage():
    """The coordinator writes one for every section."""
    with pytest.raises(CheckpointDamaged, match="^file: expected a value tree, found none"):
        merge_trees([], file="file")


@pytest.mark.parametrize("trees", [[{"a": 1}, {"a": {"b": 1}}], [{"a": {"b": 1}}, {"a": [1]}], [5, {"a": 1}], [{"a": 1}, None]])
def test_trees_that_do_not_fit_are_damage(trees):
    """No writer makes them."""
    with pytest.raises(CheckpointDamaged, match="^file: expected parts of value trees that fit together"):
        merge_trees(trees, file="file")

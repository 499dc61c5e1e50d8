"""Part sets: the parts that the same ranks have are compared by one digest."""

from __future__ import annotations

from anyshard.planning.part_sets import digest_part_sets, find_part_sets
from anyshard.records.value_parts import PartList, list_leaves
from anyshard.records.values import ValueRegistry


def list_all(*trees: dict[str, object]) -> list[PartList]:
    return [list_leaves({"s": tree}, registry=ValueRegistry()) for tree in trees]


def test_ranks_with_the_same_parts_are_one_set() -> None:
    """All parts that exactly the same ranks have share a number; it does not matter whether they are equal."""
    sets = find_part_sets(list_all({"a": 1, "b": 2}, {"a": 3, "b": 2}))
    assert ([[0, 0], [0, 0]], [2]) == ([column.tolist() for column in sets.of_rank], sets.num_holders.tolist())


def test_what_one_rank_has_alone_is_in_no_set() -> None:
    """Stages of a pipeline compare what they have in common, each two of them."""
    sets = find_part_sets(list_all({"a": 1, "one": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}))
    assert [[0, -1], [0, 1], [0, 1]] == [column.tolist() for column in sets.of_rank]
    assert [3, 2] == sets.num_holders.tolist()


def test_equal_lists_that_are_one_object_count_as_ranks() -> None:
    """A list that several ranks share makes a set of them, and there are no sets where nothing is."""
    shared = list_all({"a": 1})[0]
    assert [3] == find_part_sets([shared] * 3).num_holders.tolist()
    assert 0 == len(find_part_sets([PartList({})] * 2).num_holders)


def test_every_subset_of_ranks_is_a_set_of_its_own() -> None:
    """The same parts of three ranks or of two of them, in any order of the lists' parts."""
    sets = find_part_sets(list_all({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "d": 1}, {"a": 1, "c": 1, "d": 1}))
    assert [[0, 1, 2], [0, 1, 3], [0, 2, 3]] == [column.tolist() for column in sets.of_rank]
    assert [3, 2, 2, 2] == sets.num_holders.tolist()


def test_digests_of_a_set_are_equal_if_its_parts_are() -> None:
    """Parts outside of the set have no say."""
    lists = list_all({"a": 1, "b": 2, "one": 0}, {"a": 1, "b": 2}, {"a": 1, "b": 3})
    sets = find_part_sets(lists)
    one, other, third = (digest_part_sets(parts, column) for parts, column in zip(lists, sets.of_rank, strict=True))
    assert [0] == list(one)
    assert (True, False) == (one == other, one == third)

"""Uniting: one table of logical tensors on which all ranks agree."""

from __future__ import annotations

import numpy as np
import pytest

from anyshard.errors import InvalidAppState
from anyshard.planning.unite import unite
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.tables import make_tensor_table, whole_shards


def hold(
    shapes: dict[str, tuple[int, ...]], *, dtype: str = "float32", ties: dict[str, str] | None = None, buffers: str = ""
) -> RankTable:
    """A rank that holds whole tensors; its sections are those of its addresses, in their order."""
    tensors = make_tensor_table(tuple(shapes), [dtype] * len(shapes), list(shapes.values()), ties or {})
    sections = tuple(dict.fromkeys(address.split("/")[0] for address in shapes))
    return make_rank_table(whole_shards(tensors), sections, buffers=frozenset(buffers.split()))


def test_tensors_of_all_ranks_are_united() -> None:
    """Stages with other tensors and other numbers of dims become one table, sections in the order of the coordinator."""
    first, second = hold({"z/a": (2,), "m/b": (3, 4)}), hold({"m/a": (), "m/b": (3, 4), "k/x": (1, 2, 3)})
    united = unite([first, second, first])
    assert ("k/x", "m/a", "m/b", "z/a") == united.tensors.addresses
    assert [3, 0, 2, 1] == united.tensors.ndims.tolist()
    assert [[1, 2, 3], [1, 1, 1], [3, 4, 1], [2, 1, 1]] == united.tensors.shapes.tolist()
    assert ("z", "m", "k") == united.sections
    assert [0, 1, 0] == united.table_of.tolist()
    assert [[2, 3], [0, 1, 2]] == [rows.tolist() for rows in united.tensor_of]
    assert [[0, 2], [1], [0, 1, 2]] == [united.ranks_of(np.array(tables)).tolist() for tables in ([0], [1], [0, 1])]


def test_ties_of_all_ranks_are_joined() -> None:
    """Names that any two ranks tie together are stored under the smallest of them all."""
    shapes = {"m/a": (2,), "m/b": (2,), "m/c": (2,), "m/d": (2,)}
    first, second, third = (
        hold(shapes, ties={"m/d": "m/c"}),
        hold(shapes, ties={"m/c": "m/b"}),
        hold({"m/a": (2,), "m/d": (2,)}),
    )
    united = unite([first, second, third])
    assert [-1, -1, 1, 1] == united.tensors.alias_of.tolist()
    assert [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1]] == [rows.tolist() for rows in united.tensor_of]


def test_a_buffer_of_one_rank_is_a_buffer() -> None:
    """A tensor that any rank calls a buffer is one, under the name that it is stored under."""
    first = hold({"m/a": (2,), "m/b": (2,)}, ties={"m/b": "m/a"}, buffers="m/b")
    assert [True, False, False] == unite([hold({"m/c": (1,)}), first]).is_buffer.tolist()


def test_ranks_that_differ_are_named_with_both_sides() -> None:
    """Another shape or dtype under one address is an error that says which ranks have which."""
    whole, part = hold({"m/a": (4,), "m/w": (8, 4)}), hold({"m/a": (4,), "m/w": (4, 4)})
    with pytest.raises(InvalidAppState, match="m/w: float32 \\(8, 4\\) on ranks 0, 2, float32 \\(4, 4\\) on rank 1. Nothing"):
        unite([whole, part, whole, hold({"m/a": (4,)})])
    with pytest.raises(InvalidAppState, match="m/a: float32 \\(4,\\) on rank 0, int8 \\(4,\\) on rank 1. Nothing"):
        unite([hold({"m/a": (4,)}), hold({"m/a": (4,)}, dtype="int8")])
    with pytest.raises(InvalidAppState, match="m/a: float32 \\(4,\\) on rank 0, float32 \\(4, 1\\) on rank 1"):
        unite([hold({"m/a": (4,)}), hold({"m/a": (4, 1)})])


def test_many_differences_are_counted() -> None:
    """A message lists a few addresses and ranks and says how many more there are."""
    shapes = {f"m/{i:02}": (2,) for i in range(20)}
    with pytest.raises(InvalidAppState, match="m/00: .* on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more, .*; and 12 more. Nothing"):
        unite([hold(shapes)] * 10 + [hold(shapes, dtype="int8")])


def test_ties_need_equal_tensors() -> None:
    """Two names that a rank ties and that another shape on another rank contradicts are refused."""
    first = hold({"m/a": (4,), "m/b": (4,)}, ties={"m/b": "m/a"})
    second = hold({"m/b": (4,), "m/c": (2,)}, ties={"m/c": "m/b"})
    with pytest.raises(InvalidAppState, match="tied tensors of equal dtype and shape, found m/c .* and m/a"):
        unite([first, second])

"""Tensors on shared memory: reported at save, loaded where the stored bytes agree, refused where nobody can tell."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anyshard.adapters import overlaps
from anyshard.adapters.overlaps import Place, find_overlaps, make_place, overlaps_itself
from anyshard.errors import InvalidAppState, StateMismatch
from tests.adapters.roundtrip import give, keep
from tests.cases.training import move

_BASE = torch.arange(48.0)

_AGREEING: dict[str, Any] = {
    "flat buffer and views": lambda x: {"all": x, "w": x[:12].view(3, 4), "b": x[12:]},
    "windows": lambda x: {"a": x[:30], "b": x[20:40]},
    "another shape": lambda x: {"a": x, "b": x.view(6, 8)},
    "transposed": lambda x: {"a": x.view(6, 8), "b": x.view(6, 8).t()},
    "permuted rows": lambda x: {"a": x.view(2, 6, 4).permute(2, 0, 1), "b": x[4:12]},
}


def _place(tensor: torch.Tensor, name: str = "") -> Place:
    return make_place(name, tensor)


@pytest.mark.parametrize("case", _AGREEING)
def test_dense_views_load_where_stored_bytes_agree(case: str) -> None:
    """A model whose tensors share memory in runs resumes as it was."""
    saved, live = _AGREEING[case](_BASE.clone()), _AGREEING[case](torch.zeros(48))
    give(keep({"s": saved}), {"s": live})
    assert [] == [name for name in saved if not np.array_equal(np.asarray(saved[name]), np.asarray(live[name]))]


def test_tensor_and_array_on_one_memory_load() -> None:
    """A large array and the tensor over it are filled with equal bytes."""
    saved, live = np.arange(20_000.0), np.zeros(20_000)
    give(keep({"s": {"n": saved, "t": torch.from_numpy(saved)}}), {"s": {"n": live, "t": torch.from_numpy(live)}})
    assert np.array_equal(saved, live)


@pytest.mark.parametrize("case", _AGREEING)
def test_stored_bytes_that_differ_are_refused_before_the_fill(case: str) -> None:
    """One of two stored tensors cannot be given to overlapping live ones, whichever comes last."""
    saved = {name: tensor.clone() for name, tensor in _AGREEING[case](_BASE.clone()).items()}
    saved["b"] += 1
    live = torch.zeros(48)
    with pytest.raises(StateMismatch, match=r"s/\w+: tie .*other bytes in s/"):
        move({"s": saved}, {"s": _AGREEING[case](live)})
    assert live.eq(0).all()


class _Tied(nn.Module):
    """An embedding whose transposed memory is the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(5, 3, bias=False)
        self.head.weight = nn.Parameter(self.emb.weight.data.t())


def test_transposed_tie_resumes_and_is_reported() -> None:
    """The save names both addresses, the load fills both through the whole road, and the tie holds."""
    saved, live = _Tied(), _Tied()
    assert ["m/emb.weight and m/head.weight: share memory, and are stored in full each"] == list(keep({"m": saved}).warnings)
    move({"m": saved}, {"m": live})
    assert torch.equal(saved.emb.weight, live.emb.weight)
    assert torch.equal(live.emb.weight.t(), live.head.weight)


_INCOMPARABLE: dict[str, Any] = {
    "holes": lambda x: x[::2],
    "another size": lambda x: x.view(torch.int16),
    "imaginary part": lambda x: x.view(torch.complex64).imag,
}


@pytest.mark.parametrize("case", _INCOMPARABLE)
def test_what_cannot_be_compared_is_refused_with_a_way_out(case: str) -> None:
    """Views with holes or of another element size are reported at save and refused at load, which goes on with exclude."""
    base = torch.zeros(48)
    state = {"s": {"a": base, "b": _INCOMPARABLE[case](base)}}
    kept = keep(state)
    assert ["exclude=[...]" in warning for warning in kept.warnings] == [True]
    with pytest.raises(InvalidAppState, match=r"s/[ab] and s/[ab]: .* overlap; .*exclude="):
        give(kept, state)
    give(kept, state, exclude=["s/b"])


def test_expanded_tensors_are_reported_and_refused() -> None:
    """One memory for many elements cannot take many values."""
    state = {"s": {"a": torch.zeros(1).expand(4)}}
    kept = keep(state)
    assert ["s/a: an expanded tensor" in warning for warning in kept.warnings] == [True]
    with pytest.raises(InvalidAppState, match="s/a: .* expanded"):
        give(kept, state)
    with pytest.raises(InvalidAppState, match="s/a: .* memory of their own"):
        give(keep({"s": {"a": torch.ones(4, 3)}}), {"s": {"a": torch.zeros(9).as_strided((4, 3), (2, 1))}})


def test_separate_views_are_no_overlap() -> None:
    """Columns of one matrix and tied names say nothing and load."""
    whole = torch.zeros(4, 6)
    saved = {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}
    give(keep({"s": saved}), {"s": {"a": whole[:, :3], "b": whole[:, 3:]}})
    assert whole.eq(1).all()
    assert () == keep({"s": {"a": whole[:, :3], "b": whole[:, 3:]}}).warnings
    assert () == keep({"s": {"a": whole, "b": whole, "c": whole.detach()}}).warnings


@pytest.mark.parametrize("width", [1, 2])
def test_interleaved_columns_are_not_compared_pair_by_pair(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many columns of one matrix take no comparison at all; one planted overlap is found."""
    compared: list[object] = []
    share_memory = np.shares_memory

    def note(*args: Any, **kwargs: Any) -> bool:
        compared.append(args)
        return share_memory(*args, **kwargs)

    monkeypatch.setattr(overlaps.np, "shares_memory", note)
    matrix = torch.zeros(10, 4000)
    columns = [_place(matrix[:, first : first + width], str(first)) for first in range(0, 4000, width)]
    assert [] == list(find_overlaps(columns))
    assert [("10", "extra")] == [(a.name, b.name) for a, b in find_overlaps([*columns, _place(matrix[2:, 10:11], "extra")])]
    assert len(compared) <= 2


def test_overlaps_are_those_of_brute_force() -> None:
    """Whatever strides and offsets: the pairs found are the pairs whose sets of bytes meet."""
    rng, base = np.random.default_rng(5), torch.zeros(200, dtype=torch.int16)
    for _ in range(60):
        shapes = [(tuple(rng.integers(1, 4, 2).tolist()), tuple(rng.integers(1, 30, 2).tolist())) for _ in range(6)]
        views = [base.as_strided(shape, strides, int(rng.integers(0, 60))) for shape, strides in shapes]
        elements = [_list_elements(view) for view in views]
        expected = {(a, b) for a, b in itertools.combinations(range(6), 2) if set(elements[a]) & set(elements[b])}
        found = find_overlaps(_place(view, str(number)) for number, view in enumerate(views))
        assert expected == {(min(pair), max(pair)) for pair in ((int(a.name), int(b.name)) for a, b in found)}
        for view, own in zip(views, elements, strict=True):
            assert overlaps_itself(view) or len(own) == len(set(own))


def _list_elements(view: torch.Tensor) -> list[int]:
    steps = itertools.product(*map(range, view.shape))
    return [view.storage_offset() + sum(i * stride for i, stride in zip(step, view.stride(), strict=True)) for step in steps]

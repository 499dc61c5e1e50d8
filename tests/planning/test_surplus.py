"""Surplus: what ranks do not take travels in few bytes, and what none of them takes is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.planning.surplus import encode_surplus, find_common, list_surplus, number_addresses
from anyshard.records.addresses import section_of

TENSORS = ["m/a", "m/b", "o/state/a/exp_avg", "o/state/b/exp_avg", "x"]
KNOWN = [*TENSORS, "o/state/a", "o/state/b", "m/_extra_state", "o/lr", "y/z"]
NUMBERS = number_addresses(TENSORS)

surpluses = st.sets(st.sampled_from(KNOWN))
ranks = st.lists(st.tuples(st.sets(st.sampled_from("moxy")), surpluses, surpluses), max_size=4)


@given(ranks)
def test_common_is_what_no_rank_takes_that_has_a_say(found: list[tuple[set[str], set[str], set[str]]]) -> None:
    """A rank has a say in the sections that it asked for; extra state of any rank is told apart."""
    lists = [(tuple(sorted(sections)), encode_surplus(plain, sorted(extra), NUMBERS)) for sections, plain, extra in found]
    said = {at: [at in plain | extra for sections, plain, extra in found if section_of(at) in sections] for at in KNOWN}
    common = {at for at, says in said.items() if says and all(says)}
    extra_state = set[str]().union(*(extra for _, _, extra in found))
    assert (tuple(sorted(common - extra_state)), tuple(sorted(common & extra_state))) == find_common(lists, NUMBERS)


@given(surpluses)
def test_surplus_comes_back(addresses: set[str]) -> None:
    """Addresses with a number and others alike."""
    assert tuple(sorted(addresses)) == list_surplus(encode_surplus(addresses, (), NUMBERS), NUMBERS)


@pytest.mark.slow
def test_many_addresses_are_few_bytes() -> None:
    """All experts but an eighth of them, 82,000 addresses with their states, take a rank 20 KB at most (review B8)."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{which}.weight"
        for layer in range(61)
        for expert in range(256)
        for which in ("gate_proj", "up_proj", "down_proj")
    ]
    states = [f"optimizer/state/{name}/{slot}" for name in names for slot in ("exp_avg", "exp_avg_sq", "step")]
    numbers = number_addresses([*(f"model/{name}" for name in names), *states])
    lacked = [name for number, name in enumerate(names) if number // 3 % 256 // 32 != 5]
    surplus = [f"{start}/{name}" for name in lacked for start in ("model", "optimizer/state")]
    assert 81_984 == len(surplus)
    assert len(encode_surplus(surplus, (), numbers)) <= 20_000

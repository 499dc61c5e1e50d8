"""Keep policies: exact choices, and the algebra of `|` and `&`."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.errors import InvalidOption
from anyshard.run.policies import (
    BothPolicies,
    Choice,
    EitherPolicy,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    KeepPolicy,
    Protect,
    WeightsOnly,
)
from anyshard.run.step_info import StepInfo
from tests.run.made_steps import START_S, make_info, stamp

NOW_S = START_S + 1000.0


def choose(policy: KeepPolicy, steps: Sequence[int] = range(100, 1001, 100)) -> Choice:
    return policy.choose([make_info(step) for step in steps], NOW_S)


def whole(*steps: int) -> Choice:
    return dict.fromkeys(steps)


WEIGHTS = frozenset({"model"})

CHOICES = {
    "last": (KeepLast(3), whole(800, 900, 1000)),
    "last-more-than-there-are": (KeepLast(20), whole(*range(100, 1001, 100))),
    "every": (KeepEvery(400), whole(400, 800)),
    "seconds": (KeepFor(201), whole(800, 900, 1000)),
    "timedelta": (KeepFor(datetime.timedelta(seconds=101)), whole(900, 1000)),
    "protect": (Protect({500, 7}), whole(500)),
    "either": (KeepLast(1) | KeepEvery(500), whole(500, 1000)),
    "both": (KeepLast(6) & KeepEvery(400), whole(800)),
    "weights": (WeightsOnly(KeepEvery(500)), {500: WEIGHTS, 1000: WEIGHTS}),
    "whole-wins-in-either": (KeepLast(1) | WeightsOnly(KeepEvery(500)), {500: WEIGHTS, 1000: None}),
    "less-wins-in-both": (KeepLast(1) & WeightsOnly(KeepEvery(500)), {1000: WEIGHTS}),
    "sections-are-united": (
        WeightsOnly(KeepEvery(500), ("model",)) | WeightsOnly(KeepLast(1), ("ema",)),
        {500: WEIGHTS, 1000: frozenset({"model", "ema"})},
    ),
    "nothing-in-common": (WeightsOnly(KeepLast(1), ("model",)) & WeightsOnly(KeepLast(1), ("ema",)), {}),
    "weights-of-weights": (WeightsOnly(WeightsOnly(KeepLast(1), ("model", "ema")), ("ema", "loader")), {1000: {"ema"}}),
}


@pytest.mark.parametrize(("policy", "expected"), CHOICES.values(), ids=CHOICES)
def test_each_policy_chooses_exactly(policy: KeepPolicy, expected: Choice) -> None:
    """What each policy keeps of ten steps."""
    assert expected == choose(policy)


def test_b133_numbers_are_compared_as_numbers() -> None:
    """10 and 11 are the last of 8, 9, 10, 11, and 1000 is of 900 and 1000 (B133)."""
    assert (whole(10, 11), whole(1000)) == (choose(KeepLast(2), (8, 9, 10, 11)), choose(KeepLast(1), (900, 1000)))


def with_losses(*losses: float | None) -> list[StepInfo]:
    return [make_info(step, metrics={} if loss is None else {"loss": loss}) for step, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (KeepBest("loss", 1), whole(4)),
        (KeepBest("loss", 2), whole(1, 4)),
        (KeepBest("loss", 1, mode="max"), whole(0)),
        (KeepBest("loss", 9), whole(0, 1, 4)),
        (KeepBest("accuracy", 1), whole()),
    ],
)
def test_the_best_are_found_by_a_metric(policy: KeepPolicy, expected: Choice) -> None:
    """NaN and a missing value are never best; of equal values the later step is."""
    assert expected == policy.choose(with_losses(3.0, 1.0, math.nan, None, 1.0), NOW_S)


@pytest.mark.parametrize(
    "policy",
    [policy for policy, _ in CHOICES.values()] + [KeepBest("loss", 3, mode="max"), KeepLast(1) | KeepLast(2) & Protect([3, 1])],
    ids=repr,
)
def test_what_is_printed_makes_the_same_policy(policy: KeepPolicy) -> None:
    """`repr` is the expression that made it."""
    assert policy == eval(repr(policy), globals())


def test_age_is_told_by_the_clock_of_the_store() -> None:
    """A host whose clock is hours late has saved just now."""
    late = make_info(7, time=stamp(START_S - 7200), written_s=START_S + 990.0)
    assert {7: None} == KeepFor(60).choose([late], NOW_S)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepLast(0), "KeepLast: expected a whole number n of at least 1, found 0"),
        (lambda: KeepEvery(2.5), "KeepEvery: expected a whole number n of at least 1, found 2.5"),
        (lambda: KeepLast(True), "KeepLast: expected a whole number n of at least 1, found True"),
        (lambda: KeepFor(0), "KeepFor: expected a number of seconds or a timedelta, above 0, found 0"),
        (lambda: KeepFor(math.nan), "found nan"),
        (lambda: KeepFor("1 day"), "found '1 day'"),
        (lambda: KeepBest("", 1), "expected the name of a metric, found ''"),
        (lambda: KeepBest("loss", 1, mode="least"), "expected mode 'min' or 'max', found 'least'"),
        (lambda: Protect([-1]), r"expected numbers of steps, found \[-1\]"),
        (lambda: Protect("12"), "expected numbers of steps, found '12'"),
        (lambda: WeightsOnly(KeepLast(1), "model"), "expected names of sections to keep, found 'model'"),
        (lambda: WeightsOnly(KeepLast(1), ()), r"expected names of sections to keep, found \(\)"),
        (lambda: WeightsOnly(3), "expected a policy such as KeepLast.3., found 3"),
        (lambda: KeepLast(1) | 3, "keep: expected a policy such as KeepLast.3., found 3"),
        (lambda: KeepLast(1) & KeepLast, "expected a policy such as KeepLast.3., found <class"),
    ],
)
def test_policies_are_checked_when_they_are_made(make: Callable[[], object], message: str) -> None:
    """A policy that cannot be meant is refused before the first save."""
    with pytest.raises(InvalidOption, match=message):
        make()


class OddSteps:
    """A policy of a user, which knows nothing of ours."""

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        return whole(*(one.step for one in steps if one.step % 2))

    def protects(self, step: int) -> bool:
        return False


def test_policies_of_users_join_in_from_both_sides() -> None:
    """A class with the two methods is a policy, left and right of `|` and `&`."""
    steps = (1, 2, 3, 4)
    assert whole(1, 3, 4) == choose(KeepLast(1) | OddSteps(), steps) == choose(OddSteps() | KeepLast(1), steps)
    assert whole(3) == choose(KeepLast(2) & OddSteps(), steps) == choose(OddSteps() & KeepLast(2), steps)


def test_protected_steps_are_known_through_all_compositions() -> None:
    """What is protected on one side of `|` is, of `&` only what both protect."""
    policy = (KeepLast(1) | WeightsOnly(Protect([5]))) & (Protect([5, 6]) | KeepEvery(2))
    assert [5] == [step for step in range(10) if policy.protects(step)]


# Algebra ---------------------------------------------------------------------------------------------------------------

simple = st.one_of(
    st.builds(KeepLast, st.integers(1, 8)),
    st.builds(KeepEvery, st.integers(1, 8)),
    st.builds(KeepFor, st.integers(1, 1000)),
    st.builds(Protect, st.sets(st.integers(0, 30), max_size=4)),
    st.builds(KeepBest, st.just("loss"), st.integers(1, 4), mode=st.sampled_from(["min", "max"])),
)
policies = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(EitherPolicy, inner, inner),
        st.builds(BothPolicies, inner, inner),
        st.builds(
            WeightsOnly,
            inner,
            st.lists(st.sampled_from(["model", "ema", "loader"]), min_size=1, max_size=2, unique=True).map(tuple),
        ),
    ),
    max_leaves=5,
)
runs = st.dictionaries(st.integers(0, 30), st.one_of(st.none(), st.floats(-9, 9), st.just(math.nan)), max_size=12).map(
    lambda losses: [make_info(step, metrics={} if loss is None else {"loss": loss}) for step, loss in sorted(losses.items())]
)


@given(policies, policies, policies, runs)
def test_joins_are_commutative_associative_and_idempotent(
    a: KeepPolicy, b: KeepPolicy, c: KeepPolicy, steps: list[StepInfo]
) -> None:
    """The order in which policies are joined with one sign does not matter, nor does saying one twice."""
    for join in (EitherPolicy, BothPolicies):
        chosen = [
            [policy.choose(steps, NOW_S) for policy in group]
            for group in ((join(a, b), join(b, a)), (join(join(a, b), c), join(a, join(b, c))), (join(a, a), a))
        ]
        assert [pair[0] for pair in chosen] == [pair[1] for pair in chosen]


@given(policies, policies, runs)
def test_either_keeps_more_and_both_less(a: KeepPolicy, b: KeepPolicy, steps: list[StepInfo]) -> None:
    """Of `a & b`, `a`, `a | b` each keeps all that the one before keeps, and of no step less."""
    rising = [policy.choose(steps, NOW_S) for policy in (BothPolicies(a, b), a, EitherPolicy(a, b))]
    for less, more in itertools.pairwise(rising):
        assert less.keys() <= more.keys()
        assert all(more[step] is None or (less[step] is not None and less[step] <= more[step]) for step in less)


@given(st.integers(1, 20), runs)
def test_the_last_are_as_many_as_there_are(n: int, steps: list[StepInfo]) -> None:
    """`KeepLast(n)` never keeps fewer than `n` while there are so many, and they are the highest."""
    assert sorted(one.step for one in steps)[-n:] == sorted(KeepLast(n).choose(steps, NOW_S))

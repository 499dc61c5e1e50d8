import pytest

from tests.hostile.fuzz import fuzz

pytestmark = pytest.mark.slow


def test_hostile_records_give_errors_of_anyshard_and_nothing_else():
    """No damaged and signed record crashes, hangs or fills the memory of the process that decodes it."""
    report = fuzz(2_000, 7, timeout_s=120)
    assert report["passed"], report
    assert report["refused"] > report["accepted"] > 0


def test_the_harness_can_fail():
    """A child that dies is reported with the round it died in, not taken for success."""
    report = fuzz(10**9, 7, timeout_s=3)
    assert (False, -1) == (report["passed"], report["exit_code"])
    assert report["last_round"] > 0

"""Whole saves and loads on real object stores: a checkpoint there knows no more of its layout than one on a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import anyshard
from anyshard.testing.fill import assert_same_bytes, full_bytes
from anyshard.testing.layouts import LAYOUTS
from anyshard.testing.training import Moment, take_step, training_state
from anyshard.testing.world import Worlds
from tests.ranks.test_matrix import app_state, build_fresh, build_trained
from tests.servers import AzureServer, S3Server

pytestmark = pytest.mark.slow

TIMEOUT_S = 200

SAVED = ("fsdp3", "hsdp2x2", "fsdp2 x tp2", "ep2 x fsdp2")
LOADED = ("plain", "ddp2", "tp2", "fsdp4", "fsdp3 x tp2")


def save(layout: str, place: str, storage: Mapping[str, Any]) -> int:
    """Save under this layout; the bytes of all ranks."""
    options = anyshard.SaveOptions(storage_options=storage, require_guarded=True)
    return anyshard.save(place, app_state(build_trained(layout)), options=options).nbytes


def load_all(layout: str, places: list[str], storage: Mapping[str, Any]) -> list[tuple[list[str], list[str]]]:
    """What differs from training that was never interrupted, after a load from each place and after the step that follows."""
    trained = build_trained(layout)
    expected = Moment.of(*trained)
    take_step(*trained, seed="next ")
    expected_next = Moment.of(*trained)
    differences = []
    for place in places:
        live = build_fresh(layout)
        anyshard.load(place, app_state(live), options=anyshard.LoadOptions(storage_options=storage))
        loaded = Moment.of(*live)
        take_step(*live, seed="next ")
        differences.append((expected.differences(loaded), expected_next.differences(Moment.of(*live))))
    return differences


@pytest.fixture(scope="module")
def places(worlds: Worlds, seaweedfs: S3Server) -> list[str]:
    """A checkpoint of each layout in one bucket."""
    bucket = seaweedfs.make_bucket()
    made = [f"s3://{bucket}/runs/{number}/step_7" for number in range(len(SAVED))]
    for layout, place in zip(SAVED, made, strict=True):
        worlds(LAYOUTS[layout].size).run(save, layout, place, seaweedfs.options, timeout_s=TIMEOUT_S)
    return made


@pytest.mark.parametrize("layout", LOADED)
def test_layout_pairs_on_s3(worlds: Worlds, places: list[str], seaweedfs: S3Server, layout: str) -> None:
    """What four layouts have saved loads under five others, and the next step is that of training without a break."""
    size = LAYOUTS[layout].size
    results = worlds(size).run(load_all, layout, places, seaweedfs.options, timeout_s=TIMEOUT_S)
    assert [[([], [])] * len(SAVED)] * size == results


def test_what_is_on_s3_is_read_without_a_job(places: list[str], seaweedfs: S3Server) -> None:
    """`open` reads the whole logical tensors there, whatever laid them out."""
    whole = full_bytes(training_state(*build_trained("plain")))
    for place in places:
        with anyshard.open(place, options=anyshard.LoadOptions(storage_options=seaweedfs.options)) as checkpoint:
            assert_same_bytes(whole, {address: checkpoint[address].bits().tobytes() for address in checkpoint})


def test_a_layout_pair_on_azure(worlds: Worlds, azurite: AzureServer) -> None:
    """As on S3, with a container of Azure."""
    place = f"az://{azurite.make_container()}/runs/a/step_7"
    worlds(4).run(save, "fsdp4", place, azurite.options, timeout_s=TIMEOUT_S)
    results = worlds(2).run(load_all, "tp2", [place], azurite.options, timeout_s=TIMEOUT_S)
    assert [[([], [])]] * 2 == results

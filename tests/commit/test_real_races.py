"""Many savers at once at one place on servers that hear create-if-absent: exactly one wins, and each loser is told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from anyshard.commit.attempt import abandoning, begin
from anyshard.commit.guard import Guards
from anyshard.commit.publish import publish
from anyshard.commit.resolve import check_complete, resolve
from anyshard.errors import AnyshardError, CheckpointExists, CommitConflict
from anyshard.records.manifest import Manifest
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from tests.commit.steps import write_attempt
from tests.servers import AzureServer, S3Server

pytestmark = pytest.mark.slow

NUM_WRITERS, WAIT_S = 16, 120.0
RACES = [
    ("moto_s3", 5),
    *(pytest.param((kind, 20), marks=[pytest.mark.long, pytest.mark.timeout(900)]) for kind in ("seaweedfs", "moto_s3")),
]


def write(store: Store, start: threading.Barrier) -> Manifest | AnyshardError:
    """What this writer, which has a connection of its own, has saved, or why not; all begin and all publish together."""
    start.wait(WAIT_S)
    try:
        attempt = begin(store, sections=("model",), overwrite=False)
        with abandoning(store, attempt):
            manifest = write_attempt(store, attempt)
            start.wait(WAIT_S)
            publish(store, manifest)
    except AnyshardError as error:
        return error
    return manifest


def race(url: str, options: dict[str, object], guards: Guards) -> int:
    """How many of sixteen writers at a new place win. What one has saved is there and whole; nothing of the others is."""
    start = threading.Barrier(NUM_WRITERS)
    stores = [guards.settle(open_store(url, storage_options=options), required=True) for _ in range(NUM_WRITERS)]
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        outcomes = [future.result() for future in [pool.submit(write, store, start) for store in stores]]
    winners = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
    losers = [outcome for outcome in outcomes if not isinstance(outcome, Manifest)]
    assert [] == [error for error in losers if not isinstance(error, (CommitConflict, CheckpointExists))]
    resolved = resolve(stores[0])
    assert winners == [resolved.manifest]
    check_complete(stores[0], resolved.manifest, resolved.listing)
    assert 3 == sum(len(stores[0].list(prefix).entries) for prefix in ("", "data/", "data/model/"))
    return len(winners)


@pytest.mark.parametrize("case", RACES, ids=str)
def test_sixteen_writers_on_s3(case: tuple[str, int], request: pytest.FixtureRequest) -> None:
    """In each round exactly one of sixteen wins, all of them ready to publish before the first does."""
    kind, num_rounds = case
    server: S3Server = request.getfixturevalue(kind)
    bucket, guards = server.make_bucket(), Guards()
    assert [1] * num_rounds == [race(f"s3://{bucket}/run/step_{k}", server.options, guards) for k in range(num_rounds)]


def test_sixteen_writers_on_azure(azurite: AzureServer) -> None:
    """The same on Azure, a few times."""
    container, guards = azurite.make_container(), Guards()
    assert [1] * 3 == [race(f"az://{container}/run/step_{k}", azurite.options, guards) for k in range(3)]

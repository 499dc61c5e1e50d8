"""Copies between a directory and real object stores: byte for byte the same, gone on with after the server was killed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import anyshard
from anyshard import ops
from anyshard.storage.resolve import open_store
from anyshard.testing.fill import assert_same_bytes, local_bytes
from anyshard.testing.training import training_state
from tests.crash.store_children import LONG, attempt, look, make_storage, meanwhile, save
from tests.ops.scenes import make_training, read_tree
from tests.proxy import Faults, Rule, run_proxy
from tests.servers import AzureServer, S3Server, run_seaweedfs

pytestmark = pytest.mark.slow

Storage = Mapping[str, Any]


def read_all(place: str, storage: Storage) -> dict[str, bytes]:
    """All files of a place."""
    store, prefixes = open_store(place, storage_options=storage), [""]
    files: dict[str, bytes] = {}
    while prefixes:
        listing = store.list(prefixes.pop())
        prefixes += listing.prefixes
        files |= {entry.key: store.read(entry.key, max_nbytes=entry.nbytes) for entry in listing.entries}
    return files


def check_loads(place: str, storage: Storage) -> None:
    """A load there gives what was saved."""
    live, expected = make_training("other"), make_training()
    anyshard.load(place, live, options=anyshard.LoadOptions(storage_options=storage))
    states = (training_state(state["model"], state["optimizer"]) for state in (expected, live))
    assert_same_bytes(*map(local_bytes, states))


@pytest.fixture(scope="module")
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that a test may kill and start again."""
    with run_seaweedfs(tmp_path_factory.mktemp("server")) as server:
        yield server


def test_around_by_all_kinds_of_stores(seaweedfs: S3Server, moto_s3: S3Server, azurite: AzureServer, tmp_path: Path) -> None:
    """Directory -> S3 -> another S3 -> Azure -> directory: the same files everywhere, all of which load."""
    places: list[tuple[str, Storage]] = [
        (str(tmp_path / "first"), {}),
        (f"s3://{seaweedfs.make_bucket()}/a/step_1", make_storage(seaweedfs.options)),
        (f"s3://{moto_s3.make_bucket()}/b/step_1", make_storage(moto_s3.options)),
        (f"az://{azurite.make_container()}/c/step_1", azurite.options),
        (str(tmp_path / "last"), {}),
    ]
    anyshard.save(places[0][0], make_training(), step=3)
    files = read_tree(tmp_path / "first")
    for (source, storage), (target, target_storage) in itertools.pairwise(places):
        report = ops.copy(source, target, storage_options=storage, target_options=target_storage)
        assert (sum(map(len, files.values())), len(files)) == (report.copied_nbytes, report.num_files)
        assert files == read_all(target, target_storage)
        check_loads(target, target_storage)


def test_a_blob_of_many_parts(seaweedfs: S3Server, tmp_path: Path) -> None:
    """A blob that is longer than a part comes to the bucket and back as it was."""
    storage = make_storage(seaweedfs.options)
    place = f"s3://{seaweedfs.make_bucket()}/a/step_1"
    save(str(tmp_path / "first"), "long", {}, num_words=3 * LONG)
    ops.copy(tmp_path / "first", place, target_options=storage)
    ops.copy(place, tmp_path / "last", storage_options=storage)
    assert read_tree(tmp_path / "first") == read_tree(tmp_path / "last")
    assert "long" == look(place, storage, num_words=3 * LONG)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("PUT .*/data/model/", id="blob", marks=pytest.mark.long),
        pytest.param("PUT .*/manifest-1[.]json", id="manifest"),
    ],
)
def test_a_copy_that_a_dead_server_has_ended_is_gone_on_with(mortal_server: S3Server, tmp_path: Path, pattern: str) -> None:
    """The server is killed in the middle of the copy, which fails; the same call later finishes it and keeps what is there."""
    source, server = str(tmp_path / "source"), mortal_server
    save(source, "mine", {}, num_words=LONG)
    with ExitStack() as closing:
        proxy = closing.enter_context(run_proxy(server.endpoint))
        storage = make_storage(server.options, endpoint=proxy.endpoint, max_attempts=2)
        target = f"s3://{server.make_bucket()}/a/step_1"

        def kill() -> None:
            proxy.wait_until(lambda counts: counts.faults["hang"] > 0)
            server.stop()
            closing.close()  # resets what hangs, and refuses what comes

        proxy.set(Faults(rules=[Rule(pattern, "hang", times=99)]))
        failed = meanwhile(
            lambda: attempt(lambda: ops.copy(source, target, target_options=storage, threads=1, timeout_s=5)), kill
        ).result()
        assert isinstance(failed, anyshard.StorageError | anyshard.CommitOutcomeUnknown), failed
        server.start()
        direct = make_storage(server.options)
        seen = attempt(lambda: look(target, direct, num_words=LONG))
        assert seen in (None, "mine")
        report = ops.copy(source, target, target_options=direct)
        assert any(name.startswith("index") for name in report.kept) or seen == "mine"
        assert read_tree(Path(source)) == {
            name: data for name, data in read_all(target, direct).items() if not name.startswith("copy")
        }
        assert "mine" == look(target, direct, num_words=LONG)

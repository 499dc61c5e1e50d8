"""Object stores in processes started by a process that has used one (B043)."""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
from typing import Any

import pytest

from anyshard.errors import InvalidOption, StorageError
from anyshard.storage.object_store.fork_options import to_fsspec_options
from anyshard.storage.object_store.opening import open_object_store
from anyshard.storage.object_store.places import parse_place
from anyshard.storage.object_store.settings import read_settings
from anyshard.storage.object_store.store import ObjectStore
from anyshard.storage.protocol import Store
from anyshard.testing.store_fixtures import keys_below, pattern, write_blob
from tests.servers import S3Server

TIMEOUT_S = 60.0
FORK_WARNINGS = "ignore:.*fork.*:DeprecationWarning"

needs_s3fs = pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")


def write_anew(url: str, options: dict[str, Any], key: str) -> None:
    """Open the place in this process and write a blob; the process ends with an error otherwise."""
    signal.alarm(int(TIMEOUT_S))
    store = open_object_store(url, options)
    write_blob(store, key, pattern(100_000))
    assert pattern(100_000) == store.read(key, max_nbytes=100_000)


def use_inherited(store: Store, writer: Any) -> None:
    """Use and let go of what the parent has opened, all of which must be refused and none of which may be freed."""
    signal.alarm(int(TIMEOUT_S))
    verbs = (
        lambda: store.list(""),
        lambda: store.create("c", b"", token="t"),
        lambda: store.open_blob("a"),
        lambda: store.delete(("a",)),
        lambda: writer.write_at(0, memoryview(b"x")),
        lambda: store.create_blob("d", nbytes=1 << 30),
    )
    for verb in verbs:
        with pytest.raises(StorageError, match="a fork of it.*spawn"):
            verb()
    writer.__exit__(None, None, None)


def run(method: str, target: Any, *args: Any) -> int | None:
    """The exit code of a process started by this method."""
    process = multiprocessing.get_context(method).Process(target=target, args=args)
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def open_used(server: S3Server) -> ObjectStore:
    """A store that this process has used."""
    store = open_object_store(f"s3://{server.make_bucket()}/my run", {**server.options, "part_nbytes": 5 << 20})
    assert isinstance(store, ObjectStore)
    write_blob(store, "a", b"content")
    return store


@pytest.mark.filterwarnings(FORK_WARNINGS)
@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=needs_s3fs)])
def test_children_reach_the_same_place(seaweedfs: S3Server, method: str) -> None:
    """A process started by spawn or fork opens the place anew and writes; the parent goes on working and sees it."""
    store = open_used(seaweedfs)
    assert run(method, write_anew, store.url, seaweedfs.options, "data/b") == 0
    write_blob(store, "data/c", b"more")
    assert ("data/b", "data/c") == keys_below(store, "data/")


@pytest.mark.filterwarnings(FORK_WARNINGS)
def test_an_inherited_store_is_refused(seaweedfs: S3Server) -> None:
    """A fork gets a clear error from what its parent has opened, a running upload too, and the parent's goes on unharmed."""
    store, data = open_used(seaweedfs), pattern(12 << 20)
    with store.create_blob("data/b", nbytes=len(data)) as writer:
        writer.write_at(0, memoryview(data)[: 8 << 20])
        assert run("fork", use_inherited, store, writer) == 0
        writer.write_at(8 << 20, memoryview(data)[8 << 20 :])
        writer.finish()
    assert data == store.read("data/b", max_nbytes=len(data))


def _open_without_package(url: str, options: dict[str, Any]) -> None:
    signal.alarm(int(TIMEOUT_S))
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "s3fs" else find(name, *rest)
    with pytest.raises(StorageError, match=r"fork.*found no s3fs.*spawn.*anyshard\[fsspec\]"):
        open_object_store(url, options)


@pytest.mark.filterwarnings(FORK_WARNINGS)
def test_a_fork_without_the_package_says_what_to_do(moto_s3: S3Server) -> None:
    """Where fsspec's package for the service is missing, the error says so and names both ways out."""
    store = open_used(moto_s3)
    assert run("fork", _open_without_package, store.url, moto_s3.options) == 0


# What fsspec is told in a fork ------------------------------------------------------------------------------------------


def translate(url: str, **options: Any) -> dict[str, Any]:
    """The options of fsspec's package for what a user gives."""
    place = parse_place(url)
    return to_fsspec_options(place, read_settings(place, options))


@needs_s3fs
def test_s3fs_is_told_the_same() -> None:
    """Every name and every word for a flag arrives; time-outs are those that hold outside of a fork."""
    url = "s3://b/x?anonymous=false&request_timeout_s=30&virtual_hosted_style_request=false&aws_endpoint_url=http://h:1"
    found = translate(url, aws_access_key_id="k", aws_secret_access_key="s", aws_default_region="r", max_attempts=2)
    assert ("http://h:1", "k", "s", {"region_name": "r"}) == (
        found["endpoint_url"],
        found["key"],
        found["secret"],
        found["client_kwargs"],
    )
    times = {"read_timeout": 30.0, "connect_timeout": 5.0}
    assert ({**times, "s3": {"addressing_style": "path"}}, False) == (found["config_kwargs"], found["anon"])


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("gs://b", {"google_service_account": "/k.json"}, {"token": "/k.json"}),
        ("gs://b", {"service_account_key": '{"a": 1}'}, {"token": {"a": 1}}),
        ("gs://b", {"anonymous": "yes", "endpoint": "http://h:1"}, {"token": "anon", "endpoint_url": "http://h:1"}),
        ("gs://b", {"anonymous": "no"}, {}),
        ("az://c", {"account_name": "a", "sas_key": "sv=1"}, {"account_name": "a", "sas_token": "sv=1"}),
        (
            "az://c",
            {"azure_storage_account_name": "a", "access_key": "k=="},
            {"account_name": "a", "account_key": "k=="},
        ),
        ("az://c?anonymous=1", {"account_name": "a", "max_attempts": 2}, {"account_name": "a", "anon": True}),
    ],
)
def test_other_packages_are_told_the_same(url: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    """gcsfs and adlfs get credentials and endpoint under their own names, whatever name they were given under."""
    assert expected == translate(url, **options)


def test_adlfs_takes_an_endpoint_in_a_connection_string() -> None:
    """With the account and its key."""
    found = translate("az://c", account_name="a", account_key="k==", azure_endpoint="http://h:1/a")
    expected = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=k==;BlobEndpoint=http://h:1/a"
    assert expected == found["connection_string"]


@pytest.mark.parametrize(
    ("url", "options", "name"),
    [
        pytest.param("s3://b", {"role_arn": "r"}, "role_arn", marks=needs_s3fs),
        pytest.param("s3://b", {"proxy_url": "http://p"}, "proxy_url", marks=needs_s3fs),
        ("gs://b", {"credential_provider": dict}, "credential_provider"),
        ("gs://b", {"bearer_token": "t"}, "bearer_token"),
        ("az://c", {"account_name": "a", "credential_provider": dict}, "credential_provider"),
        ("az://c", {"account_name": "a", "use_azure_cli": "true"}, "use_azure_cli"),
        ("az://c", {"account_name": "a", "proxy_url": "http://p"}, "proxy_url"),
    ],
)
def test_what_cannot_be_told_is_refused(url: str, options: dict[str, Any], name: str) -> None:
    """An option that would be lost on the way is `InvalidOption`, which names it and the way out."""
    with pytest.raises(InvalidOption, match=f"{name}.*spawn"):
        translate(url, **options)

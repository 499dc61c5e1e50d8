"""The store on fsspec: errors, names and options, and answers that are lost."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

import anyshard
from anyshard.errors import (
    BlobExists,
    BlobNotFound,
    InvalidOption,
    InvalidPath,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from anyshard.storage.fsspec_store import FsspecStore, open_fsspec_store, opening, to_s3fs_options
from anyshard.storage.fsspec_store.instances import Instances
from anyshard.storage.retry import RetryPolicy
from anyshard.testing.store_fixtures import pattern, write_blob
from tests.proxy import Faults, Proxy, Rule, run_proxy
from tests.servers import S3Server
from tests.storage.fsspec_scenes import LONG_NBYTES, in_memory, model_state, quick_s3fs_options, same


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # as above
    """Raises what a test asks for."""

    protocol = "failing"
    error: Exception = OSError()

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        raise self.error


class EndpointConnectionError(Exception):
    """As botocore names it, and no OSError."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), BlobNotFound),
        (PermissionError("x"), StorageDenied),
        (OSError(errno.EROFS, "x"), StorageDenied),
        (OSError(errno.EDQUOT, "x"), StorageFull),
        (OSError(errno.EBUSY, "slow down"), StorageUnavailable),
        (ConnectionResetError("x"), StorageUnavailable),
        (TimeoutError(), StorageUnavailable),
        (EndpointConnectionError("x"), StorageUnavailable),
        (RuntimeError("odd"), StorageError),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_errors_are_translated_once(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[StorageError]) -> None:
    """Each error of a backend becomes the one that fits, which names the key."""
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    monkeypatch.setattr(FailingFileSystem, "error", error)
    monkeypatch.setattr(opening, "_POLICY", RetryPolicy(max_attempts=2, first_pause_s=0))
    with pytest.raises(StorageError) as caught:
        open_fsspec_store("failing://run", {}).open_blob("data/a")
    assert (type(caught.value), caught.value.file) == (kind, "data/a")
    assert (None, None) == (caught.value.__cause__, caught.value.__context__)


def test_passing_faults_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails once is made again, and nobody hears of it."""
    store = in_memory()()
    write_blob(store, "a", b"content")
    answers = iter([ConnectionResetError("x"), TimeoutError()])
    inner = MemoryFileSystem.info

    def info(self: MemoryFileSystem, path: str) -> dict[str, Any]:
        for error in answers:
            raise error
        return dict(inner(self, path))

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    assert store.read("a", max_nbytes=7) == b"content"


SECRETS = {"secret_key": "hunter3", "endpoint_url": "http://me:hunter2@host", "client_kwargs": {"Authorization": "hunter4"}}
SECRET_URL = "failing://me:hunter2@host/run?sig=hunter2"


def no_file(self: object, *_args: object, **_options: object) -> object:
    raise OSError("GET http://me:hunter2@host/a?sig=hunter2 with key hunter3, hunter4")


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.read("a", max_nbytes=1),
        lambda store: store.create("a", b"x", token="t"),
        lambda store: store.list(""),
        lambda store: store.delete(("a",)),
        lambda store: write_blob(store, "a", b"x"),
    ],
    ids=["read", "create", "list", "delete", "blob"],
)
def test_credentials_are_never_shown(monkeypatch: pytest.MonkeyPatch, act: Callable[[FsspecStore], object]) -> None:
    """Neither names nor messages nor tracebacks hold what the URL, the options or the backend say of credentials."""
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    for name in ("info", "ls", "rm_file", "isdir"):
        monkeypatch.setattr(FailingFileSystem, name, no_file)
    store = open_fsspec_store(SECRET_URL, SECRETS)
    with pytest.raises(StorageError) as caught:
        act(store)
    assert "hunter" not in f"{store.url} {store.site} {''.join(traceback.format_exception(caught.value))}"
    assert store.url == "failing://host/run"


class RefusingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # as above
    """Takes no options, and repeats them."""

    def __init__(self, **options: Any) -> None:
        raise ValueError(f"cannot use {options}")


def test_refused_options_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class says about options that it refuses stays out of the traceback."""
    monkeypatch.setitem(_registry, "refusing", RefusingFileSystem)
    store = open_fsspec_store("refusing://run", SECRETS)
    with pytest.raises(InvalidOption) as caught:
        store.list("")
    assert caught.value.__context__ is None
    assert "hunter" not in "".join(traceback.format_exception(caught.value))


def test_container_stays_in_the_name() -> None:
    """What stands before the @ of an Azure URL is no credential."""
    assert opening._show("abfs://container@account.host/run/", "abfs") == "abfs://container@account.host/run"


def test_wrong_options_are_named() -> None:
    """Options that the filesystem refuses are `InvalidOption` at the first use."""
    with pytest.raises(InvalidOption, match="storage_options"):
        open_fsspec_store("s3://bucket/run", {"max_concurrency": 0}).list("")


@pytest.mark.parametrize("url", ["s3://", "s3:///", "smb://host/run", "nothing-of-the-kind://run"])
def test_bad_urls(url: str) -> None:
    """No bucket, a scheme whose package is not installed, and an unknown scheme are `InvalidPath`."""
    with pytest.raises(InvalidPath):
        open_fsspec_store(url, {})


def test_options_for_s3fs() -> None:
    """Names of s3:// become those of s3fs, a provider is asked, tuning is passed over, what has no name there is refused."""
    options = {
        "endpoint": "http://host",
        "region": "here",
        "credential_provider": lambda: {"access_key_id": "a", "secret_access_key": "b", "token": "c", "expires_at": None},
        "request_timeout_s": 7,
        "streams_per_blob": 4,
    }
    assert to_s3fs_options(options) == {
        "endpoint_url": "http://host",
        "client_kwargs": {"region_name": "here"},
        "key": "a",
        "secret": "b",
        "token": "c",
        "config_kwargs": {"read_timeout": 7},
    }
    with pytest.raises(InvalidOption, match="sse_kms"):
        to_s3fs_options({"sse_kms_key_id": "x"})


def test_options_for_s3fs_as_text() -> None:
    """Flags and numbers may be text, as in the query of a URL; names may have a prefix."""
    options = {
        "anonymous": "false",
        "virtual_hosted_style_request": "False",
        "request_timeout_s": "7.5",
        "aws_endpoint_url": "http://host",
        "aws_default_region": "here",
    }
    assert to_s3fs_options(options) == {
        "anon": False,
        "config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 7.5},
        "endpoint_url": "http://host",
        "client_kwargs": {"region_name": "here"},
    }


@pytest.mark.parametrize(
    "options",
    [
        {"anonymous": "perhaps"},
        {"virtual_hosted_style_request": 2},
        {"request_timeout_s": "soon"},
        {"connect_timeout_s": True},
        {"endpoint": "http://a", "aws_endpoint": "http://b"},
        {"credential_provider": lambda: None},
    ],
)
def test_wrong_options_for_s3fs(options: dict[str, Any]) -> None:
    """What is no flag, no number or no mapping, and what is said twice, is refused by name."""
    with pytest.raises(InvalidOption, match=next(iter(options))):
        to_s3fs_options(options)


# Clients that make requests again by themselves -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(seaweedfs: S3Server) -> Iterator[Proxy]:
    """In front of a server."""
    with run_proxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxied(seaweedfs: S3Server, proxy: Proxy) -> FsspecStore:
    """A store whose answers may be lost."""
    options = {**quick_s3fs_options(seaweedfs), "endpoint_url": proxy.endpoint}
    return open_fsspec_store(f"s3://{seaweedfs.make_bucket()}/run", options)


def test_a_create_whose_answer_was_lost(proxied: FsspecStore, proxy: Proxy) -> None:
    """A client that meets its own blob has made it; what another writer made is still refused."""
    proxy.set(Faults(rules=[Rule("PUT .*/run/a", "lose")]))
    proxied.create("a", b"mine", token="t")
    assert (1, b"mine") == (proxy.count().faults["lose"], proxied.read("a", max_nbytes=4))
    with pytest.raises(BlobExists):
        proxied.create("a", b"them", token="t")


@pytest.mark.parametrize("name", ["index-1-(?!probe)", "manifest-1", "data/model"])
def test_a_save_in_which_an_answer_was_lost(proxied: FsspecStore, proxy: Proxy, name: str) -> None:
    """Whichever file it was for, the save completes, and what was saved loads."""
    state, found, before = model_state(1), model_state(2), proxy.count().faults["lose"]
    proxy.set(Faults(rules=[Rule(f"PUT .*/run/{name}", "lose")]))
    anyshard.save(proxied, state)
    assert before + 1 == proxy.count().faults["lose"]
    anyshard.load(proxied, found)
    assert same(state, found)


def test_the_end_of_an_upload_whose_answer_was_lost(proxied: FsspecStore, proxy: Proxy) -> None:
    """A client that ends its upload a second time finds none: what counts is what is there."""
    before = proxy.count().faults["lose"]
    proxy.set(Faults(rules=[Rule("POST .*uploadId", "lose")]))
    write_blob(proxied, "data/a", pattern(LONG_NBYTES))
    assert before + 1 == proxy.count().faults["lose"]
    assert [LONG_NBYTES] == [entry.nbytes for entry in proxied.list("data/").entries]


@pytest.mark.parametrize(("scheme", "expected"), [("failing", 5), ("hf", 2)])
def test_fewer_attempts_where_the_client_makes_its_own(monkeypatch: pytest.MonkeyPatch, scheme: str, expected: int) -> None:
    """Each attempt of a client for an object store is several, so that ours are few."""
    monkeypatch.setitem(_registry, scheme, FailingFileSystem)
    monkeypatch.setattr(FailingFileSystem, "error", TimeoutError())
    with pytest.raises(StorageUnavailable) as caught:
        open_fsspec_store(f"{scheme}://bucket/run", {}).read("a", max_nbytes=1)
    assert expected == caught.value.attempts


def test_an_instance_is_back_after_a_missing_file() -> None:
    """Opening what is not there costs no connection; an error that may come from the connection does."""
    instances = Instances(object, shared=False)
    for error, is_back in ((FileNotFoundError(), True), (OSError(), False)):
        with pytest.raises(OSError), instances.taken() as first:
            raise error
        assert is_back == (instances.take() is first)

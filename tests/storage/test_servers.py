"""The servers and the proxy that other tests rely on do what they say."""

import os
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import AzureStore, S3Store

from tests.proxy import Faults, Proxy, Rule, run_proxy
from tests.servers import AzureServer, S3Server, ServerFailed, ServerProcess, run_seaweedfs

MIB = 1 << 20


def open_bucket(server: S3Server, bucket: str, *, endpoint: str | None = None, timeout: str = "20s") -> S3Store:
    options = server.options | {"endpoint": endpoint or server.endpoint}
    client = {"allow_http": True, "timeout": timeout}
    return S3Store(bucket, **options, client_options=client, retry_config={"max_retries": 0})


def has_ended(pid: int) -> bool:
    """Whether a process that is no child of this one is gone soon."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(descriptor) as process:
        return bool(select.select([process], [], [], 20)[0])


@pytest.fixture
def proxy(moto_s3: S3Server) -> Iterator[Proxy]:
    with run_proxy(moto_s3.endpoint) as running:
        yield running


@pytest.fixture
def bucket(moto_s3: S3Server) -> str:
    return moto_s3.make_bucket()


@pytest.fixture
def direct(moto_s3: S3Server, bucket: str) -> S3Store:
    return open_bucket(moto_s3, bucket)


@pytest.fixture
def proxied(moto_s3: S3Server, bucket: str, proxy: Proxy) -> S3Store:
    return open_bucket(moto_s3, bucket, endpoint=proxy.endpoint)


# Servers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["seaweedfs", "moto_s3"])
def test_an_s3_server_keeps_objects_and_guards_creation(kind: str, request: pytest.FixtureRequest) -> None:
    """What is put can be read, and of two creations the second is refused."""
    server: S3Server = request.getfixturevalue(kind)
    store = open_bucket(server, server.make_bucket())
    obstore.put(store, "a/b", b"abc", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a/b", b"other", mode="create")
    assert b"abc" == obstore.get(store, "a/b").bytes()


def test_azurite_keeps_objects_and_guards_creation(azurite: AzureServer) -> None:
    """The same on Azure."""
    store = AzureStore(azurite.make_container(), **azurite.options, client_options={"allow_http": True})
    obstore.put(store, "a/b", b"abc", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a/b", b"other", mode="create")
    assert b"abc" == obstore.get(store, "a/b").bytes()


@pytest.mark.slow
def test_seaweedfs_survives_a_kill(tmp_path: Path) -> None:
    """What was answered before SIGKILL is there after a new start on the same port; in between, nobody answers."""
    with run_seaweedfs(tmp_path) as server:
        store = open_bucket(server, server.make_bucket())
        obstore.put(store, "key", b"abc" * MIB)
        server.stop()
        with pytest.raises(GenericError):
            obstore.get(store, "key")
        server.start()
        assert b"abc" * MIB == obstore.get(store, "key").bytes()


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    """The error holds the exit code and what the process said."""

    def refuse() -> None:
        raise OSError("not yet")

    command = [sys.executable, "-c", "import sys; sys.exit('no such port')"]
    with pytest.raises(ServerFailed, match=r"(?s)ended with 1.*no such port"):
        ServerProcess(command, tmp_path / "log", probe=refuse).start()


@pytest.mark.slow
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even where that is killed, no server stays behind."""
    code = (
        "import os, signal, sys, pathlib, tests.servers as s\n"
        "with s.run_moto(pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, timeout=60, check=False)
    assert has_ended(int(done.stdout))


# The proxy -----------------------------------------------------------------------------------------------------------------


def test_a_proxy_without_faults_passes_all(proxy: Proxy, proxied: S3Store) -> None:
    """Multipart, ranges and listings pass, and are counted."""
    data = bytes(range(256)) * (12 * MIB // 256)
    obstore.put(proxied, "big", data, chunk_size=5 * MIB, use_multipart=True)
    assert data[7:9000] == obstore.get_range(proxied, "big", start=7, end=9000)
    assert ["big"] == [entry["path"] for entry in obstore.list_with_delimiter(proxied)["objects"]]
    counts = proxy.count()
    assert {"POST": 2, "PUT": 3, "GET": 2} == counts.requests
    assert {} == counts.faults
    assert counts.nbytes > len(data)


def test_a_lost_answer_is_that_of_a_request_that_was_done(proxy: Proxy, proxied: S3Store, direct: S3Store) -> None:
    """The client of the second PUT hears nothing, and the object is there."""
    proxy.set(Faults(rules=[Rule("^PUT .*/k", "lose", skip=1)]))
    obstore.put(proxied, "k1", b"1")
    with pytest.raises(GenericError):
        obstore.put(proxied, "k2", b"2")
    assert b"2" == obstore.get(direct, "k2").bytes()
    obstore.put(proxied, "k3", b"3")
    assert {"lose": 1} == proxy.count().faults


def test_a_cut_request_never_reaches_the_server(proxy: Proxy, proxied: S3Store, direct: S3Store) -> None:
    """The client of the PUT hears nothing, and there is no object."""
    proxy.set(Faults(rules=[Rule("^PUT", "cut")]))
    with pytest.raises(GenericError):
        obstore.put(proxied, "k", b"1")
    with pytest.raises(FileNotFoundError):
        obstore.get(direct, "k")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_answers_of_the_proxy_come_as_often_as_told(proxy: Proxy, status: int) -> None:
    """Two requests are answered by the proxy with the status that was asked for, the third one by the server."""
    proxy.set(Faults(rules=[Rule("^GET", status, times=2, retry_after_s=1)]))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError) as caught:
            opener.open(proxy.endpoint, timeout=20)
        assert (status, "1") == (caught.value.code, caught.value.headers["Retry-After"])
        caught.value.close()
    opener.open(proxy.endpoint, timeout=20).close()
    assert {"answered": 2} == proxy.count().faults


def test_the_body_of_a_refused_put_is_read(proxy: Proxy, proxied: S3Store) -> None:
    """The client hears the status and no reset, although it sends much; and the next request is served."""
    proxy.set(Faults(rules=[Rule("^PUT", 503)]))
    with pytest.raises(GenericError, match="503"):
        obstore.put(proxied, "k", bytes(4 * MIB), use_multipart=False)
    obstore.put(proxied, "k", b"1")
    assert b"1" == bytes(obstore.get(proxied, "k").bytes())


def test_connections_are_cut_after_bytes_drawn_from_the_seed(moto_s3: S3Server, bucket: str) -> None:
    """Each connection ends within the bounds; the same seed cuts at the same bytes."""
    faults = Faults(cut_after=(MIB, 2 * MIB), seed=5)
    passed = []
    for _ in range(2):
        with run_proxy(moto_s3.endpoint, faults) as proxy:
            store = open_bucket(moto_s3, bucket, endpoint=proxy.endpoint)
            for _ in range(3):
                with pytest.raises(GenericError):
                    obstore.put(store, "k", bytes(3 * MIB), use_multipart=False)
            passed.append(proxy.count().nbytes)
            assert (3, {"cut": 3}) == (proxy.count().connections, proxy.count().faults)
    assert 3 * MIB <= passed[0] <= 6 * MIB
    assert passed[0] == passed[1]


def test_only_every_nth_connection_is_cut(proxy: Proxy, moto_s3: S3Server) -> None:
    """Of four connections, the second and the fourth fail."""
    proxy.set(Faults(cut_after=(0, 0), every=2))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a connection for each request
    failed = []
    for _ in range(4):
        try:
            opener.open(proxy.endpoint, timeout=20).close()
            failed.append(False)
        except OSError:
            failed.append(True)
    assert [False, True, False, True] == failed


def test_a_hang_lasts_until_the_client_gives_up(proxy: Proxy, moto_s3: S3Server, bucket: str) -> None:
    """Nothing comes after the bytes that were told, so the client runs into its timeout."""
    obstore.put(open_bucket(moto_s3, bucket), "k", bytes(2 * MIB))
    proxy.set(Faults(hang_after=MIB))
    store = open_bucket(moto_s3, bucket, endpoint=proxy.endpoint, timeout="1s")
    with pytest.raises(GenericError):
        obstore.get(store, "k").bytes()
    assert {"hang": 1} == proxy.count().faults


def test_a_hung_answer_is_that_of_a_request_that_was_done(proxy: Proxy, moto_s3: S3Server, bucket: str) -> None:
    """The client waits in vain, and the object is there."""
    proxy.set(Faults(rules=[Rule("^PUT", "hang")]))
    with pytest.raises(GenericError):
        obstore.put(open_bucket(moto_s3, bucket, endpoint=proxy.endpoint, timeout="1s"), "k", b"1")
    assert b"1" == obstore.get(open_bucket(moto_s3, bucket), "k").bytes()


def test_faults_change_on_open_connections(seaweedfs: S3Server) -> None:
    """A connection that was well is cut once that is asked for, and a new one is well when it is not asked for any more."""
    with run_proxy(seaweedfs.endpoint) as proxy:
        store = open_bucket(seaweedfs, seaweedfs.make_bucket(), endpoint=proxy.endpoint)
        obstore.put(store, "k", b"1")
        proxy.set(Faults(cut_after=(0, 0)))
        with pytest.raises(GenericError):
            obstore.put(store, "k", b"2")
        proxy.set(Faults())
        obstore.put(store, "k", b"3")
        proxy.wait_until(lambda counts: counts.requests["PUT"] == 3)
        assert 2 == proxy.count().connections


def test_a_slow_connection_takes_at_least_its_time(proxy: Proxy, proxied: S3Store) -> None:
    """2 MiB at 8 MiB/s and a latency take what they must at least."""
    proxy.set(Faults(latency_s=0.1, bytes_per_s=8 * MIB))
    began = time.monotonic()
    obstore.put(proxied, "k", bytes(2 * MIB), use_multipart=False)
    assert time.monotonic() - began > 0.3


def test_a_dead_server_behind_the_proxy_is_a_reset(tmp_path: Path) -> None:
    """The proxy itself never waits for a server that is not there."""
    with run_proxy("http://127.0.0.1:9") as proxy, pytest.raises(OSError, match=r"reset|closed|Remote end"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(proxy.endpoint, timeout=20)

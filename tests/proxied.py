"""Fixtures of tests that reach a shared S3 server by way of a proxy; a conftest that imports them says which, as `server`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proxy import Faults, Proxy, run_proxy
from tests.servers import S3Server


@pytest.fixture(scope="module")
def running_proxy(server: S3Server) -> Iterator[Proxy]:
    """One that tests share."""
    with run_proxy(server.endpoint) as running:
        yield running


@pytest.fixture
def proxy(running_proxy: Proxy) -> Iterator[Proxy]:
    """In front of the server, honest at first."""
    running_proxy.set(Faults())
    yield running_proxy
    running_proxy.set(Faults())


@pytest.fixture
def place(server: S3Server) -> str:
    """The URL of a step in a new bucket."""
    return f"s3://{server.make_bucket()}/run/step_1"

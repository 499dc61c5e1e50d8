"""Fixtures of the cases from the field."""

from __future__ import annotations

import pytest

from tests.proxied import place, proxy, running_proxy
from tests.servers import S3Server

__all__ = ["place", "proxy", "running_proxy"]


@pytest.fixture(scope="session")
def server(moto_s3: S3Server) -> S3Server:
    """What the proxy stands in front of."""
    return moto_s3

"""The contract of a store: every sentence of `anyshard.storage.protocol` as a test.

Subclass it in a test module and say how a store is made:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def make_store(self):
            return lambda: MyStore(...)      # each call gives an empty store
"""

from __future__ import annotations

from anyshard.testing.store_blobs import StoreBlobsContract
from anyshard.testing.store_fixtures import MakeStore
from anyshard.testing.store_names import StoreNamesContract

__all__ = ["MakeStore", "StoreContract"]


class StoreContract(StoreNamesContract, StoreBlobsContract):
    """All parts. Subclass it with a `make_store` fixture; every test must pass."""

"""The connection to one bucket: obstore's objects, made with fresh credentials when asked, and how many requests fly at once."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, TypeVar, final

from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from anyshard.errors import InvalidOption, StorageDenied, StorageError
from anyshard.storage.object_store.addresses import Address, find_address, to_config
from anyshard.storage.object_store.faults import ObjectJudge, read_fault
from anyshard.storage.object_store.forks import claim_runtime, keep_in_forks
from anyshard.storage.object_store.names import unknown_option
from anyshard.storage.object_store.places import Place, Service
from anyshard.storage.object_store.settings import Settings
from anyshard.storage.retry import Request, RetryPolicy

T = TypeVar("T")

_STORES: Final = MappingProxyType[Service, Any]({"s3": S3Store, "gcs": GCSStore, "azure": AzureStore})
_UNKNOWN: Final = re.compile(r"Configuration key: '([^']*)'")
_UNKNOWN_CLIENT: Final = re.compile(r"Invalid key: (\w+)")


@final
class _Stores:
    """obstore's objects for one set of credentials: `single` never tries again by itself, `uploads` does."""

    def __init__(self, place: Place, settings: Settings) -> None:
        provider = _find_credentials(place, settings)
        self.has_credentials = provider is not None or settings.has_keys or settings.is_anonymous
        self.single = _make(place, settings, provider, {"max_retries": 0})
        self.uploads = _make(place, settings, provider, _to_obstore(settings.policy))
        self.made_s = time.monotonic()
        keep_in_forks(self, (self.single, self.uploads))


@final
class Client(ObjectJudge):
    """Sends requests to one bucket, at most `max_requests` at once, so that the time-out of each begins when it really starts.

    Uploads in parts are not counted: obstore sends those parts, up to `streams_per_blob` at once of each blob.
    """

    def __init__(self, place: Place, settings: Settings) -> None:
        self.place = place
        self.settings = settings
        self._gate = threading.BoundedSemaphore(settings.max_requests)
        self._lock = threading.Lock()
        self._stores = _Stores(place, settings)

    @functools.cached_property
    def address(self) -> Address:
        """The server behind the bucket."""
        claim_runtime(self.place.url, file="")
        return find_address(self.place, self.settings)

    def send(self, call: Callable[[Any], T], key: str) -> T:
        """What `call` returns when it is given obstore's object for single requests."""
        claim_runtime(self.place.url, file=key)
        with self._gate:
            try:
                return call(self._stores.single)
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # of pyo3, which no `except Exception` sees
                    raise
        raise StorageError(
            f"{self.place.url}: obstore has failed in itself (its report is on stderr). Check endpoint and options", file=key
        )

    def explain(self, error: Exception, request: Request) -> Exception:
        """The error of ours; of a refusal also that nobody has said who asks."""
        explained = super().explain(error, request)
        if isinstance(explained, StorageDenied) and not self._stores.has_credentials:
            return StorageDenied(
                f"{explained}. No credentials were found in the options (nor by boto3, if it is installed), so what the "
                "environment or this machine's metadata service has was tried, if anything. For a public bucket: anonymous=True",
                file=explained.file,
            )
        return explained

    def for_uploads(self, key: str) -> Any:
        """obstore's object for uploads of several parts, which tries again by itself."""
        claim_runtime(self.place.url, file=key)
        return self._stores.uploads

    def renew(self, started_s: float) -> None:
        """Make obstore's objects anew, unless another thread has done so since `started_s`."""
        with self._lock:
            if self._stores.made_s <= started_s:
                self._stores = _Stores(self.place, self.settings)


def _make(place: Place, settings: Settings, provider: Callable[[], Any] | None, retries: dict[str, Any]) -> Any:
    given = {"credential_provider": provider} if provider is not None else {}
    try:
        return _STORES[place.service](
            place.bucket, config=to_config(place, settings), client_options=dict(settings.client), retry_config=retries, **given
        )
    except UnknownConfigurationKeyError as error:
        found = _UNKNOWN.search(str(error))
        refused: InvalidOption = unknown_option(place.service, found[1] if found else "another name")
    except (BaseError, TypeError, ValueError) as error:
        found = _UNKNOWN_CLIENT.search(str(error))
        text = _hide(read_fault(error).text, settings)
        refused = InvalidOption(
            f"storage_options for {place.url}: expected what obstore takes, found: {text}. Correct or add options"
        )
    raise refused


def _hide(text: str, settings: Settings) -> str:
    """`text` without what the options say, since any of it may be a credential, if only by mistake."""
    values = [
        value for value in (*settings.config.values(), *settings.client.values()) if isinstance(value, str) and len(value) > 3
    ]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "...")
    return text


def _to_obstore(policy: RetryPolicy) -> dict[str, Any]:
    """The policy as obstore takes it. It knows no budget of all requests: this one is of each request."""
    backoff = {
        "init_backoff": timedelta(seconds=policy.first_pause_s),
        "max_backoff": timedelta(seconds=policy.longest_pause_s),
        "base": 2,
    }
    return {"max_retries": policy.max_attempts - 1, "retry_timeout": timedelta(seconds=policy.budget_s), "backoff": backoff}


def _find_credentials(place: Place, settings: Settings) -> Callable[[], Any] | None:
    """The user's provider; for S3 without keys that of boto3, if it is there and finds some; else None, and obstore looks."""
    if settings.credential_provider is not None or place.service != "s3":
        return settings.credential_provider
    if settings.profile is None and (settings.has_keys or settings.is_anonymous):
        return None
    if importlib.util.find_spec("boto3") is None:
        if settings.profile is not None:
            raise InvalidOption(
                f"profile: expected boto3, which reads profiles, found none; install it to use {settings.profile!r}"
            )
        return None
    return _find_boto3_credentials(settings.profile)


def _find_boto3_credentials(profile: str | None) -> Callable[[], Any] | None:
    import boto3  # noqa: PLC0415 - optional, and slow to import
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 - optional as well
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - imports boto3

    try:
        session = boto3.Session(profile_name=profile)
        provider: Callable[[], Any] = Boto3CredentialProvider(session)
        return provider
    except ValueError as error:  # it found none
        if profile is not None:
            raise InvalidOption(f"profile: expected credentials in the profile {profile!r}, found none") from error
        return None
    except BotoCoreError as error:
        if profile is not None:
            raise InvalidOption(f"profile: expected a profile that boto3 can use, found {profile!r}: {error}") from error
        return None

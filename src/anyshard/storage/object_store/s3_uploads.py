"""The calls of S3 about unfinished uploads, which obstore lacks, through boto3 where that is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from anyshard.errors import InvalidOption, StorageError
from anyshard.storage.object_store.client import Client
from anyshard.storage.object_store.settings import Settings


@dataclass(frozen=True, slots=True)
class StaleUpload:
    """An upload that was begun `age_s` ago, by the clock of the store, and neither finished nor aborted."""

    key: str
    upload_id: str
    age_s: float


def find_uploads(client: Client, older_than_s: float, *, key: str | None = None) -> list[StaleUpload]:
    """Unfinished uploads below the prefix of `client`, of one `key` or of all."""
    with _translated(client):
        return list(_find(client, _make_boto3(client), older_than_s, key))


def abort_uploads(client: Client, older_than_s: float, *, key: str | None = None) -> list[StaleUpload]:
    """Abort these uploads and return them."""
    with _translated(client):
        boto3_client = _make_boto3(client)
        uploads = list(_find(client, boto3_client, older_than_s, key))
        for upload in uploads:
            _abort(boto3_client, client, upload)
        return uploads


@contextmanager
def _translated(client: Client) -> Iterator[None]:
    """Errors of boto3 from inside become `StorageError`."""
    url = client.place.url
    if client.place.service != "s3":
        raise InvalidOption(f"{url}: expected a store on S3, found another service, which has a lifecycle rule for this")
    if importlib.util.find_spec("boto3") is None:
        raise InvalidOption(f"{url}: expected boto3 to list and abort uploads, found none: install it, or set a lifecycle rule")
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - optional, and slow to import

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise StorageError(f"{url}: could not list or abort uploads: {error}. Check the credentials", file="") from error


def _find(client: Client, boto3_client: Any, older_than_s: float, key: str | None) -> Iterator[StaleUpload]:
    place = client.place
    below = f"{place.prefix}/" if place.prefix else ""
    pages = boto3_client.get_paginator("list_multipart_uploads").paginate(Bucket=place.bucket, Prefix=below + (key or ""))
    for page in pages:
        date = page["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        now_s = parsedate_to_datetime(date).timestamp() if date else time.time()
        for upload in page.get("Uploads", ()):
            name = upload["Key"].removeprefix(below)
            age_s = now_s - upload["Initiated"].timestamp()
            if age_s > older_than_s and upload["Key"].startswith(below) and key in (None, name):
                yield StaleUpload(name, upload["UploadId"], age_s)


def _abort(boto3_client: Any, client: Client, upload: StaleUpload) -> None:
    place = client.place
    try:
        boto3_client.abort_multipart_upload(Bucket=place.bucket, Key=place.full_key(upload.key), UploadId=upload.upload_id)
    except boto3_client.exceptions.NoSuchUpload:
        return  # it was finished or aborted meanwhile


def _make_boto3(client: Client) -> Any:
    import boto3  # noqa: PLC0415 - optional, and slow to import
    from botocore.config import Config  # noqa: PLC0415 - optional as well

    settings = client.settings
    unsigned = {"signature_version": _unsigned()} if settings.is_anonymous else {}
    retries = {"total_max_attempts": settings.policy.max_attempts, "mode": "standard"}
    endpoint, is_virtual = client.address.endpoint(client.place.bucket)
    style = "virtual" if is_virtual else "path"
    return boto3.Session(profile_name=settings.profile).client(
        "s3",
        endpoint_url=endpoint,
        region_name=client.address.region,
        config=Config(s3={"addressing_style": style}, read_timeout=settings.request_timeout_s, retries=retries, **unsigned),
        **_find_keys(settings),
    )


def _find_keys(settings: Settings) -> dict[str, Any]:
    found = settings.credential_provider() if settings.credential_provider is not None else settings.config
    names = {
        "aws_access_key_id": ("access_key_id",),
        "aws_secret_access_key": ("secret_access_key",),
        "aws_session_token": ("session_token", "token"),
    }
    return {to: next((found[name] for name in given if found.get(name)), None) for to, given in names.items()}


def _unsigned() -> Any:
    from botocore import UNSIGNED  # noqa: PLC0415 - optional, and slow to import

    return UNSIGNED

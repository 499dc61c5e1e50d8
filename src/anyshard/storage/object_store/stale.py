"""Uploads in parts that nobody finished: they cost money, and no listing of objects shows them.

S3 only, through boto3, since obstore has no call for it. Azure forgets parts that were never put together after a week by itself.
Google Cloud Storage does so too after a week; sooner with a lifecycle rule AbortIncompleteMultipartUpload. On S3 a lifecycle rule
AbortIncompleteMultipartUpload (DaysAfterInitiation) does without this module.
"""

from __future__ import annotations

from anyshard.storage.object_store.s3_uploads import StaleUpload, abort_uploads, find_uploads
from anyshard.storage.object_store.store import ObjectStore

__all__ = ["StaleUpload", "abort_stale_uploads", "list_stale_uploads"]


def list_stale_uploads(store: ObjectStore, older_than_s: float) -> list[StaleUpload]:
    """Unfinished uploads below the prefix of `store` that were begun more than `older_than_s` ago. An upload may still run."""
    return find_uploads(store.client, older_than_s)


def abort_stale_uploads(store: ObjectStore, older_than_s: float) -> list[StaleUpload]:
    """Abort these uploads and return them. A writer that is still at it fails."""
    return abort_uploads(store.client, older_than_s)

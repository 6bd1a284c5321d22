"""An S3-compatible object store through s3fs: the few calls that checkpoints need, with errors as OSError.

Owns: connection (made late: its IO thread must not be there before a fork), names of objects, translation of errors.
Credentials and endpoint come from the environment and AWS' own files (AWS_ENDPOINT_URL for other makers' stores), never
from a configuration or run directory. Does not own: what the objects are (objects.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

_SCHEME = "s3://"
_TIMEOUT = 60  # seconds without a byte from the store; it is asked again then
_ATTEMPTS = 2  # by botocore, within each of s3fs' five
_BULK = 1000  # keys that one request may delete
_FOREIGN = ("botocore", "aiobotocore", "aiohttp")  # whose exceptions are the store's or the network's


class Bucket:
    """Objects below one address `s3://BUCKET/KEY...`; every method's `key` is appended to that as it is."""

    def __init__(self, address: str) -> None:
        assert address.startswith(_SCHEME), address
        self.address = address
        self.bucket, _, self._prefix = address.removeprefix(_SCHEME).partition("/")

    def url(self, key: str = "") -> str:
        return f"{self.address}{key}"

    def put(self, key: str, data: bytes) -> None:
        """One whole object; readers see all of it or nothing. Raises OSError."""
        with self._named(key):
            self._call("put_object", key, Body=data)

    def get(self, key: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Bytes `begin:end`; at most what is there. Raises OSError (FileNotFoundError)."""
        with self._named(key):
            return bytes(_connection(os.getpid()).cat_file(f"{self.bucket}/{self._prefix}{key}", start=begin, end=end))

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Whole small objects, several at a time. Raises as `get`."""
        with ThreadPoolExecutor(16, thread_name_prefix="objects") as pool:
            return list(pool.map(self.get, keys))

    def sizes(self, below: str = "") -> dict[str, int]:
        """Key and bytes of every object whose key begins with `below`. Raises OSError."""
        found: dict[str, int] = {}
        more: dict[str, str] = {}
        with self._named(below):
            while True:
                page = self._call("list_objects_v2", None, Prefix=self._prefix + below, **more)
                for item in page.get("Contents", []):
                    found[item["Key"][len(self._prefix) :]] = int(item["Size"])
                if not page.get("IsTruncated"):
                    return found
                more = {"ContinuationToken": page["NextContinuationToken"]}

    def probe(self) -> None:
        """Whether the bucket answers and may be listed. Raises OSError."""
        with self._named(""):
            self._call("list_objects_v2", None, Prefix=self._prefix, MaxKeys=1)

    def delete(self, keys: Sequence[str]) -> None:
        """Those that are not there are no error. Raises OSError: some may still be there."""
        for at in range(0, len(keys), _BULK):
            some = keys[at : at + _BULK]
            try:
                self._delete_together(some)
            except OSError:  # not every store can do that
                for key in some:
                    with self._named(key):
                        self._call("delete_object", key)

    def _delete_together(self, keys: Sequence[str]) -> None:
        objects = [{"Key": self._prefix + key} for key in keys]
        with self._named(keys[0]):
            answer = self._call("delete_objects", None, Delete={"Objects": objects, "Quiet": True})
            for refused in answer.get("Errors", [])[:1]:
                raise OSError(errno.EACCES, f"{refused.get('Code')}: {refused.get('Message')}", refused.get("Key"))

    def begin_upload(self, key: str) -> str:
        """Begin an object of many parts; returns the upload's id. Nothing is seen before `end_upload`."""
        with self._named(key):
            return str(self._call("create_multipart_upload", key)["UploadId"])

    def upload_part(self, key: str, upload: str, number: int, data: bytes) -> dict[str, Any]:
        """Part `number` (from 1); returns what `end_upload` needs of it. Raises OSError."""
        with self._named(key):
            answer = self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=data)
        return {"PartNumber": number} | {k: v for k, v in answer.items() if k == "ETag" or k.startswith("Checksum")}

    def end_upload(self, key: str, upload: str, parts: list[dict[str, Any]]) -> None:
        with self._named(key):
            # The kind of checksum goes with each part already; in the list it is not among the known fields.
            known = [{k: v for k, v in part.items() if k != "ChecksumType"} for part in parts]
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": known})

    def abort_upload(self, key: str, upload: str) -> None:
        with self._named(key):
            self._call("abort_multipart_upload", key, UploadId=upload)

    def uploads(self) -> list[tuple[str, str]]:
        """(key, id) of every object of many parts that was begun here and not ended. Raises OSError."""
        found: list[tuple[str, str]] = []
        more: dict[str, str] = {}
        with self._named(""):
            while True:
                page = self._call("list_multipart_uploads", None, Prefix=self._prefix, **more)
                for item in page.get("Uploads", []):
                    # Some stores pass over the prefix.
                    if item["Key"].startswith(self._prefix):
                        found.append((item["Key"][len(self._prefix) :], item["UploadId"]))
                if not page.get("IsTruncated"):
                    return found
                more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _call(self, method: str, key: str | None, **words: Any) -> Any:
        named = {} if key is None else {"Key": self._prefix + key}
        return _connection(os.getpid()).call_s3(method, Bucket=self.bucket, **named, **words)

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.strerror is not None and e.filename is not None:
                raise
            raise type(e)(e.errno or errno.EIO, e.strerror or str(e) or type(e).__name__, self.url(key)) from e
        except Exception as e:
            if not type(e).__module__.startswith(_FOREIGN):
                raise
            raise OSError(errno.EIO, f"{type(e).__name__}: {e}", self.url(key)) from e


@lru_cache(maxsize=1)
def _connection(process: int) -> Any:
    """s3fs' file system, made in this process. Raises OSError: s3fs is not installed."""
    try:
        import s3fs  # type: ignore[import-untyped]
    except ImportError as e:
        text = f"checkpoint.storage=s3://... needs s3fs in this interpreter ({e}): pip install 'stoker[s3]'"
        raise OSError(errno.ENOPKG, text) from e
    # Some makers' stores refuse checksums beyond what a request must have. Ours are checked at every read.
    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
        os.environ.setdefault(name, "when_required")
    waiting = {"connect_timeout": _TIMEOUT, "read_timeout": _TIMEOUT, "retries": {"max_attempts": _ATTEMPTS}}
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=waiting)

"""S3 and stores that speak its protocol, through s3fs: conditional create by If-None-Match, multipart uploads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsspec.asyn import sync

from checkpoint.storage.drivers import FileInfo, FsspecDriver, Upload
from checkpoint.storage.s3_sessions import shared_sessions
from statebackend.errors import InvalidRequest

PART_SIZE = 8 << 20
_DELETE_BATCH = 1000
_STREAM_CHUNK = 4 << 20


def s3_filesystem(options: dict[str, Any]) -> Any:
    """An s3fs filesystem without its own retries and listing cache: `FileStore` retries, and must know when it does.

    Endpoint, region and credentials come from the options or from where boto looks for them (environment
    variables such as AWS_ENDPOINT_URL, profiles, instance roles).
    """
    try:
        import s3fs
    except ImportError as error:
        raise InvalidRequest("S3 storage needs the s3fs package", hint="pip install 'holdfast[s3]'") from error
    options = dict(options)
    config = {"max_pool_connections": 32, **options.pop("config_kwargs", {})}
    config["retries"] = {"total_max_attempts": 1}
    options["use_listings_cache"] = False
    filesystem = s3fs.S3FileSystem(skip_instance_cache=True, config_kwargs=config, **options)
    filesystem.retries = 1
    return filesystem


_sessions = shared_sessions(s3_filesystem)
end_idle_sessions = _sessions.close


class S3Driver(FsspecDriver):
    """Objects below a bucket or a prefix of it."""

    default_timeout: float | None = None  # the client has its own, per connection and per read

    def __init__(self, options: dict[str, Any], root: str) -> None:
        super().__init__(_sessions.borrow(options), root, "s3", exclusive=True)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        bucket, key = self._key(path)
        byte_range = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        if end is not None and end <= start:
            return b""
        return bytes(_get(self.filesystem, bucket, key, byte_range))

    def stream(self, path: str, start: int = 0) -> Iterator[bytes]:
        """The bytes from `start` on by one request; a chunk is on its way while the one before is being used."""
        bucket, key = self._key(path)
        loop = self.filesystem.loop
        body = sync(loop, _body, self.filesystem, bucket, key, {"Range": f"bytes={start}-"} if start else {})
        coming = asyncio.run_coroutine_threadsafe(_next_chunk(body), loop)
        try:
            while chunk := coming.result():
                coming = asyncio.run_coroutine_threadsafe(_next_chunk(body), loop)
                yield chunk
        finally:
            coming.cancel()
            loop.call_soon_threadsafe(body.close)

    def create(self, path: str, data: bytes) -> None:
        bucket, key = self._key(path)
        try:
            self.filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except OSError as error:
            if _code(error) in ("PreconditionFailed", "412"):
                raise FileExistsError(path) from error
            raise

    def put(self, path: str, data: bytes) -> None:
        bucket, key = self._key(path)
        self.filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=data)

    def upload(self, path: str) -> Upload:
        bucket, key = self._key(path)
        return _S3Upload(self.filesystem, bucket, key)

    def info(self, path: str) -> FileInfo:
        bucket, key = self._key(path)
        head = self.filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        return FileInfo(path, int(head["ContentLength"]), int(head["LastModified"].timestamp() * 1000))

    def files(self, prefix: str) -> Iterable[FileInfo]:
        found: list[FileInfo] = []
        for page in self._pages(prefix, delimiter=""):
            for item in page.get("Contents", ()):
                path = self._below_root(item["Key"])
                if path and not path.endswith("/"):
                    found.append(FileInfo(path, int(item["Size"]), int(item["LastModified"].timestamp() * 1000)))
        return found

    def folders(self, prefix: str) -> list[str]:
        return sorted(item["Prefix"].rstrip("/").rpartition("/")[2]
                      for page in self._pages(prefix, delimiter="/") for item in page.get("CommonPrefixes", ()))

    def delete(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), _DELETE_BATCH):
            keys = [self._key(path) for path in paths[first:first + _DELETE_BATCH]]
            reply = self.filesystem.call_s3(
                "delete_objects", Bucket=keys[0][0],
                Delete={"Objects": [{"Key": key} for _, key in keys], "Quiet": True})
            if reply.get("Errors"):
                failed = reply["Errors"][0]
                raise OSError(f"{failed.get('Code')} for {failed.get('Key')}: {failed.get('Message')}")

    def delete_tree(self, prefix: str) -> None:
        self.delete([info.path for info in self.files(prefix)])

    def local(self, path: str) -> Path | None:
        return None

    def stale_uploads(self, prefix: str, before_ms: int) -> list[tuple[str, str]]:
        """Multipart uploads that were begun below a folder before a moment and never ended: (path, upload id)."""
        bucket, key = self._key(prefix)
        reply = self.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "")
        return [(self._below_root(item["Key"]), item["UploadId"]) for item in reply.get("Uploads", ())
                if item["Initiated"].timestamp() * 1000 < before_ms]

    def abort_upload(self, path: str, upload_id: str) -> None:
        bucket, key = self._key(path)
        self.filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)

    def close(self) -> None:
        filesystem, self.filesystem = self.filesystem, None
        if filesystem is not None:
            _sessions.give_back(filesystem)

    def _pages(self, prefix: str, delimiter: str) -> Iterable[dict[str, Any]]:
        bucket, key = self._key(prefix)
        token: dict[str, str] = {}
        while True:
            page = self.filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{key}/" if key else "",
                                           **({"Delimiter": delimiter} if delimiter else {}), **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _key(self, path: str) -> tuple[str, str]:
        bucket, _, key = self._at(path).partition("/")
        return bucket, key.strip("/")

    def _below_root(self, key: str) -> str:
        root = self.root.partition("/")[2].strip("/")
        return key[len(root):].lstrip("/") if root else key


class _S3Upload:
    part_size, repeatable, concurrent = PART_SIZE, True, True

    def __init__(self, filesystem: Any, bucket: str, key: str) -> None:
        self._filesystem, self._place = filesystem, {"Bucket": bucket, "Key": key}
        self._parts: dict[int, str] = {}
        self._upload_id: str | None = filesystem.call_s3("create_multipart_upload", **self._place)["UploadId"]

    def put(self, number: int, offset: int, data: bytes | memoryview) -> None:
        reply = self._filesystem.call_s3("upload_part", **self._place, UploadId=self._upload_id, PartNumber=number,
                                         Body=bytes(data))
        self._parts[number] = reply["ETag"]

    def complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._parts.items())]
        self._filesystem.call_s3("complete_multipart_upload", **self._place, UploadId=self._upload_id,
                                 MultipartUpload={"Parts": parts})
        self._upload_id = None

    def abort(self) -> None:
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None:
            self._filesystem.call_s3("abort_multipart_upload", **self._place, UploadId=upload_id)


async def _body(filesystem: Any, bucket: str, key: str, byte_range: dict[str, str]) -> Any:
    reply = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **byte_range)
    return reply["Body"]


async def _next_chunk(body: Any) -> bytes:
    parts, size = [], 0
    while size < _STREAM_CHUNK:
        part = await body.read(_STREAM_CHUNK - size)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _get(filesystem: Any, bucket: str, key: str, byte_range: dict[str, str]) -> bytes:
    async def get() -> bytes:
        async with await _body(filesystem, bucket, key, byte_range) as body:
            data: bytes = await body.read()
            return data

    result: bytes = sync(filesystem.loop, get)
    return result


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    code = response.get("Error", {}).get("Code", "")
    return "PreconditionFailed" if isinstance(error, FileExistsError) else str(code)

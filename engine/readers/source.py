"""The source of a log: a file on this machine or a shared disk, or an object in an S3 bucket."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import obstore
from obstore.exceptions import BaseError

from undertow.engine.storage.location import S3, s3_client

DAMAGED = (OSError, EOFError, zlib.error)  # gzip raises all three
HEAD_BYTES = 4096
_BUFFER_BYTES = 1 << 20
# The size of a request to an object store, so that transfer outweighs latency.
_REQUEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Log:
    """One log file. Plain data, valid in processes with other working folders.

    `uri`: absolute path or s3://BUCKET/KEY. `shown`: the name as the user gave it, for messages; its file
    name enters dedupe keys. `size_bytes`: the size when listed, 0 if unknown. `tenant`: the owner of its
    turns, where the user names one.
    """

    uri: str
    shown: str
    size_bytes: int = field(default=0, compare=False)
    tenant: str | None = None

    @classmethod
    def of(cls, path: Log | Path | str) -> Self | Log:
        """The log at a path or an s3:// address, whether or not it exists."""
        if isinstance(path, Log):
            return path
        if isinstance(path, str) and path.startswith(S3):
            return cls(path, path)
        path = Path(path)
        try:
            size_bytes = path.stat().st_size
        except OSError:  # opening it will report the error
            size_bytes = 0
        return cls(str(path.resolve()), str(path), size_bytes)

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        return self.shown.rsplit("/", 1)[-1]

    @property
    def identity(self) -> str:
        """What tells this log from others, also when one file is read for several tenants."""
        return self.uri if self.tenant is None else f"{self.uri}\x1f{self.tenant}"

    @property
    def is_folder(self) -> bool:
        """Whether it is the folder of an unpacked export."""
        return not self.on_s3 and Path(self.uri).is_dir()

    @property
    def on_s3(self) -> bool:
        return self.uri.startswith(S3)

    def open(self) -> BinaryIO:
        """The file's raw bytes. OSError, now or while reading."""
        if self.on_s3:
            return io.BufferedReader(S3File(self.uri), _REQUEST_BYTES)
        return Path(self.uri).open("rb", buffering=_BUFFER_BYTES)

    def unpacked(self) -> BinaryIO:
        """The file's bytes, decompressed if its name ends in .gz. Reading raises the errors in DAMAGED."""
        if not self.name.endswith(".gz"):
            return self.open()
        return cast(BinaryIO, _ClosingGzip(self.open()))

    def head(self, size_bytes: int = HEAD_BYTES) -> dict[str, Any]:
        """A digest of the file's first bytes, to recognise the same log later, also after it has grown."""
        try:
            # Unbuffered, so that a request to S3 fetches no more than this.
            with S3File(self.uri) if self.on_s3 else Path(self.uri).open("rb", buffering=0) as file:
                begins = file.read(size_bytes)
        except OSError:  # the reader will report the error
            begins = b""
        digest = hashlib.blake2b(begins, digest_size=16).hexdigest()
        return {"head": digest, "head_bytes": len(begins)}

    def seekable(self) -> Any:
        """A seekable source for pyarrow: a path, or an unbuffered file. OSError."""
        return S3File(self.uri) if self.on_s3 else self.uri


class _ClosingGzip(gzip.GzipFile):
    """Also closes the compressed file, which GzipFile leaves to its caller."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed, mode="rb")
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


class S3File(io.RawIOBase):
    """An S3 object as a readable file, fixed to its version at opening.

    OSError if it cannot be read, or was replaced meanwhile.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._position = 0
        bucket, _, self._key = uri.removeprefix(S3).partition("/")
        try:
            self._client = s3_client(bucket)
            found = obstore.head(self._client, self._key)
        except BaseError as problem:
            raise _refused(problem) from problem
        self._size_bytes = found["size"]
        self._version = found["e_tag"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size_bytes)
        if end <= self._position:
            return 0
        options: dict[str, Any] = {"range": (self._position, end)}
        if self._version is not None:
            options["if_match"] = self._version
        try:
            data = obstore.get(self._client, self._key, options=cast(Any, options)).bytes()
        except BaseError as problem:
            raise _refused(problem) from problem
        count = len(data)
        buffer[:count] = memoryview(data)
        self._position += count
        return count


def objects_below(uri: str) -> Iterator[tuple[str, int]]:
    """Address and size in bytes of each object in an s3:// folder, or of the object itself. OSError."""
    bucket, _, key = uri.removeprefix(S3).partition("/")
    key = key.strip("/")
    try:
        client = s3_client(bucket)
        listed = chain.from_iterable(obstore.list(client, f"{key}/" if key else None))
        below = [(f"{S3}{bucket}/{entry['path']}", entry["size"]) for entry in listed]
        if not below and key:
            below = [(f"{S3}{bucket}/{key}", obstore.head(client, key)["size"])]
    except FileNotFoundError:
        return
    except BaseError as problem:
        raise _refused(problem) from problem
    yield from below


def _refused(problem: BaseError) -> OSError:
    return OSError(f"{problem}. Check the bucket, the AWS_* variables and the network")

"""The location of a store: a folder (of this machine, or a shared disk) or a prefix of an S3 bucket.

This module reads, replaces and creates small files; Lance accesses its datasets itself, at `uri`. Both take
credentials, region and endpoint of S3 from the AWS_* variables.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from undertow.engine.base.model import UndertowError

S3 = "s3://"
DRAFT = ".draft"
# other users of the machine read neither turns nor the hash key; what is there already keeps its rights
PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600


class StoreError(UndertowError):
    """The store cannot be opened or written; the message names the cure."""


@dataclass(frozen=True, slots=True)
class Location:
    """A folder or a prefix of a bucket, whether or not it exists. Picklable and comparable.

    Names are relative and use slashes. Methods raise StoreError if the disk or the object store refuses.
    """

    uri: str

    @classmethod
    def of(cls, where: Location | Path | str) -> Location:
        """Parse a location. A folder becomes absolute, so that it is valid in other processes.

        ValueError: the text is an address of another kind.
        """
        if isinstance(where, Location):
            return where
        if isinstance(where, Path) or "://" not in where:
            return cls(str(Path(where).absolute()))
        bucket = where.removeprefix(S3).split("/")[0]
        if not where.startswith(S3) or not bucket:
            raise ValueError(f"{where!r} is no place of a store. Name a folder or s3://BUCKET/PREFIX.")
        return cls(S3 + "/".join(part for part in where.removeprefix(S3).split("/") if part))

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.uri.rstrip('/')}/{name}")

    @property
    def folder(self) -> Path | None:
        """The folder; None on an object store."""
        return _folder_at(self.uri)

    def read(self, name: str) -> bytes | None:
        """The whole file; None if there is none."""
        try:
            if self.folder is not None:
                with open(f"{self.uri}/{name}", "rb", buffering=0) as file:  # noqa: PTH123 - for each commit
                    return file.read()
            client, key = self._at(name)
            return bytes(obstore.get(client, key).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _refusal("read", self / name, error) from error

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file, atomically and durably."""
        with _store_errors("write", self / name):
            if self.folder is None:
                client, key = self._at(name)
                obstore.put(client, key, data, mode="overwrite", use_multipart=False)
                return
            replace_file(self.folder / name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Like `write`, only if there is no such file. Returns whether it was created."""
        with _store_errors("write", self / name):
            if self.folder is None:
                client, key = self._at(name)
                try:
                    obstore.put(client, key, data, mode="create")
                except AlreadyExistsError:
                    return False
                return True
            target = self.folder / name
            with _draft(target, data) as draft:
                try:
                    os.link(draft, target)
                except FileExistsError:
                    return False
            fsync_path(target.parent)
            return True

    def begin(self, name: str, *, fsync: bool) -> Appender:
        """Create a file of a folder to append to. StoreError if there is one. `fsync`: make it durable."""
        assert self.folder is not None, "objects cannot be appended to"
        with _store_errors("write", self / name):
            return Appender(self.folder / name, fsync)

    def exists(self, name: str = "") -> bool:
        """Whether there is a file or folder of this name (on an object store: anything below it)."""
        with _store_errors("read", self / name):
            if self.folder is not None:
                return (self.folder / name).exists()
            client, key = self._at(name)
            with suppress(FileNotFoundError):
                if key:
                    obstore.head(client, key)
                    return True
            return any(map(len, obstore.list(client, _below(key), chunk_size=1)))

    def children(self, prefix: str = "") -> list[str]:
        """The names of the files and folders directly in the folder `prefix`, sorted, relative to it."""
        with _store_errors("read", self / prefix):
            if self.folder is not None:
                folder = self.folder / prefix
                return (
                    sorted(p.name for p in folder.iterdir() if p.suffix != DRAFT) if folder.is_dir() else []
                )
            client, key = self._at(prefix)
            found = obstore.list_with_delimiter(client, _below(key))
            paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
            return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def list(self, prefix: str = "", *, before: datetime | None = None) -> list[str]:
        """The names of all files in the folder `prefix` and below, sorted, relative to this location.

        `before`, zoned: only files last written earlier.
        """
        bound = datetime.max.replace(tzinfo=UTC) if before is None else before
        with _store_errors("read", self / prefix):
            if self.folder is not None:
                return sorted(name for name, moment in _files(self.folder, prefix) if moment < bound)
            client, key = self._at(prefix)
            found = chain.from_iterable(obstore.list(client, _below(key)))
            return sorted(self._name(entry["path"]) for entry in found if entry["last_modified"] < bound)

    def remove(self, prefix: str) -> None:
        """Remove a file or a folder with its contents, if it exists."""
        with _store_errors("remove", self / prefix):
            if self.folder is None:
                client, key = self._at(prefix)
                below = [entry["path"] for entry in chain.from_iterable(obstore.list(client, _below(key)))]
                obstore.delete(client, [key, *below] if key else below)
                return
            path = self.folder / prefix
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files, those that exist, on an object store by one request."""
        with _store_errors("remove", self):
            if self.folder is not None:
                for name in names:
                    (self.folder / name).unlink(missing_ok=True)
            elif names:
                obstore.delete(self._at("")[0], [self._at(name)[1] for name in names])

    def _at(self, name: str) -> tuple[S3Store, str]:
        """The client of the bucket, and the key of a file in it."""
        bucket, _, prefix = self.uri.removeprefix(S3).partition("/")
        return s3_client(bucket), "/".join(part for part in (prefix, name.strip("/")) if part)

    def _name(self, key: str) -> str:
        _, _, prefix = self.uri.removeprefix(S3).partition("/")
        return key.removeprefix(f"{prefix}/") if prefix else key


class Appender:
    """A new file that grows. `fsync`: each append is durable on return."""

    def __init__(self, path: Path, fsync: bool) -> None:
        make_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        self._fsync = fsync
        if fsync:
            fsync_path(path.parent)

    def append(self, data: bytes) -> None:
        """Write data at the end of the file. OSError: a part of it may be there."""
        written = 0
        while written < len(data):
            written += os.write(self._descriptor, data[written:] if written else data)
        if self._fsync:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@lru_cache
def _folder_at(uri: str) -> Path | None:
    return None if uri.startswith(S3) else Path(uri)


def _below(key: str) -> str | None:
    """The prefix of all keys below a key."""
    return f"{key}/" if key else None


@lru_cache
def s3_client(bucket: str) -> S3Store:
    """The client of a bucket, configured by the AWS_* variables."""
    return S3Store(bucket)


def _files(root: Path, prefix: str) -> Iterator[tuple[str, datetime]]:
    """The name and modification time of every file."""
    for path in (root / prefix).rglob("*"):
        if path.suffix != DRAFT and path.is_file():
            yield path.relative_to(root).as_posix(), datetime.fromtimestamp(path.stat().st_mtime, UTC)


def replace_file(target: Path, data: bytes) -> None:
    """Create or replace a file, atomically and durably. OSError."""
    for tried in range(3):
        try:
            with _draft(target, data) as draft:
                draft.replace(target)
            break
        except FileNotFoundError:  # another writer may have taken the draft for that of a killed one
            if tried == 2 or not target.parent.exists():
                raise
    fsync_path(target.parent)


def remove_drafts(target: Path) -> None:
    """Remove the drafts of killed writers of a file. The caller must exclude other writers. OSError."""
    for draft in target.parent.glob(f".{target.name}.*{DRAFT}"):
        draft.unlink(missing_ok=True)


@contextmanager
def _draft(target: Path, data: bytes) -> Iterator[Path]:
    """A durable file with `data` beside `target`, with a unique name."""
    make_folder(target.parent)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}{DRAFT}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, for this user alone. OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
        fsync_path(folder.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _store_errors(verb: str, location: Location) -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        raise _refusal(verb, location, error) from error


def _refusal(verb: str, location: Location, error: Exception) -> StoreError:
    if location.folder is None:
        why = str(error).partition("\n")[0]  # the rest is for developers of the client
        cure = "Check the bucket, the AWS_* variables and the network"
    else:
        why = str(getattr(error, "strerror", error))
        cure = "Check the path, its rights and the disk's space"
    return StoreError(f"cannot {verb} {location}: {why}. {cure}.")

"""The store's folder: its description (`store.json`), its format version and its single writer.

store/store.json      format version, encoder fingerprint, key of the tenant hashes, epoch
store/writer.lock     held by the one process that may append
store/journal.lance   the journal (after a reindex journal-EPOCH.lance)
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, get_type_hints

import orjson
from filelock import FileLock, Timeout

from undertow.engine.model import UndertowError

FORMAT_VERSION = 1

HASH_KEY = re.compile(r"[0-9a-f]{64}")
JOURNAL_NAME = re.compile(r"journal[0-9A-Za-z_-]*\.lance")


class StoreError(UndertowError):
    """The store cannot be opened or written; the text names the cure."""


class StoreLocked(StoreError):
    """Another process holds the writer's lock."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What `store.json` holds. `epoch` counts writers: each row carries that of its writer.

    `journal` names the dataset in force, so that replacing this one file puts another in its place.
    """

    format_version: int
    dim: int
    encoder: dict[str, Any]
    hash_key: str
    epoch: int = 0
    journal: str = "journal.lance"

    @classmethod
    def new(cls, dim: int, encoder: dict[str, Any]) -> Self:
        return cls(FORMAT_VERSION, dim, encoder, secrets.token_hex(32))

    def tenant_key(self, tenant: str) -> str:
        """Keyed 128-bit hash of a tenant's name: what the index and deletions name it by."""
        key = bytes.fromhex(self.hash_key)
        return hashlib.blake2b(tenant.encode(errors="surrogatepass"), key=key, digest_size=16).hexdigest()


def is_store(folder: Path) -> bool:
    """Whether the folder holds a description and a journal, whatever is in them."""
    return (folder / "store.json").is_file() and any(folder.glob("journal*.lance"))


def read_info(folder: Path) -> StoreInfo:
    """Read `store.json`; StoreError when it is missing, damaged, no description or of a newer format."""
    path = folder / "store.json"
    try:
        raw = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(f"{folder} is not an Undertow store (no store.json). Check --store.") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({error}). Restore it from a backup.") from error
    if not isinstance(raw, dict):
        raise _no_description(path, "it is no JSON object")
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{folder} has format version {version}; this Undertow reads version {FORMAT_VERSION}. "
            "Install the Undertow that wrote it, or export there and ingest here."
        )
    if flaw := _flaw(raw):
        raise _no_description(path, flaw)
    return StoreInfo(**raw)


def _no_description(path: Path, flaw: str) -> StoreError:
    return StoreError(f"{path} does not describe a store: {flaw}. Restore it from a backup.")


def _flaw(raw: dict[str, Any]) -> str | None:
    """What keeps a JSON object from being a description of this format; None for nothing."""
    types = {"encoder": dict} | {n: t for n, t in get_type_hints(StoreInfo).items() if n != "encoder"}
    needed = [f.name for f in fields(StoreInfo) if f.default is MISSING]
    if missing := [name for name in needed if name not in raw]:
        return f"it lacks {', '.join(missing)}"
    if unknown := sorted(raw.keys() - types):
        return f"it has the unknown field {unknown[0]!r}"
    # JSON's true would pass for an int
    wrong = [n for n, v in raw.items() if isinstance(v, bool) or not isinstance(v, types[n])]
    if wrong:
        return f"{wrong[0]} is {raw[wrong[0]]!r:.60}"
    if not HASH_KEY.fullmatch(raw["hash_key"]):
        return "hash_key is not 64 hexadecimal digits"
    if not JOURNAL_NAME.fullmatch(raw["journal"]):
        return f"journal is {raw['journal']!r:.60}"
    return None if raw["dim"] > 0 and raw["epoch"] >= 0 else "dim or epoch is out of range"


def write_info(folder: Path, info: StoreInfo) -> None:
    """Replace `store.json` atomically and durably."""
    draft = folder / "store.json.new"
    try:
        with draft.open("wb") as file:
            file.write(orjson.dumps(asdict(info), option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / "store.json")
        fsync_path(folder)
    except OSError as error:
        raise StoreError(
            f"cannot write {draft}: {error.strerror}. Free space or change its rights."
        ) from error


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WriterLock:
    """The right to append to one store: held by one process at a time, until closed or killed."""

    def __init__(self, folder: Path) -> None:
        path = folder / "writer.lock"
        self._lock = FileLock(path)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self._lock.acquire(timeout=0)
            path.write_text(f"process {os.getpid()} on {os.uname().nodename} since {since}")
        except Timeout:
            raise StoreLocked(
                f"{folder} is being written by {_holder(path)}. Wait for it, or stop it."
            ) from None
        except OSError as error:
            self._lock.release()
            raise StoreError(
                f"cannot lock {path}: {error.strerror}. Is the folder read-only, or the disk full?"
            ) from error

    def close(self) -> None:
        self._lock.release()


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"


def next_epoch(folder: Path) -> StoreInfo:
    """Begin a new writer's epoch; call it with the lock held."""
    info = read_info(folder)
    info = replace(info, epoch=info.epoch + 1)
    write_info(folder, info)
    return info

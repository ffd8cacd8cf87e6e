"""The description of a store (`store.json`), its format version, and its writer's lock.

store/store.json      format version, encoder fingerprint, key of the tenant hashes, journal in force
store/writer.lock     only in a folder: held by the process that may append
store/journal.lance   the journal (after a reindex journal-EPOCH.lance)
store/wal             commits that are not in the journal yet, see engine/storage/wal.py
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, get_type_hints

import orjson
from filelock import FileLock, Timeout

from undertow.engine.storage.location import PRIVATE_FILE, Location
from undertow.engine.storage.location import StoreError as StoreError

FORMAT_VERSION = 4
# Version 1 counts its writers in store.json, without marks (engine/storage/fencing.py); version 2 has no
# write-ahead log; version 3 has neither thresholds by share nor vectors that come later than their turns. The
# first writer makes it this version.
READABLE_VERSIONS = (1, 2, 3, FORMAT_VERSION)
DESCRIPTION = "store.json"

HASH_KEY = re.compile(r"[0-9a-f]{64}")
JOURNAL_NAME = re.compile(r"journal[0-9A-Za-z_-]*\.lance")


class StoreLocked(StoreError):
    """Another process holds the writer's lock."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The contents of `store.json`.

    `journal` names the dataset in force, so that replacing this file switches to another. `policy` made the
    memories; old stores do not name it.
    """

    format_version: int
    dim: int
    encoder: dict[str, Any]
    hash_key: str
    journal: str = "journal.lance"
    policy: str = "recmem"

    @classmethod
    def new(
        cls, dim: int, encoder: dict[str, Any], hash_key: str | None = None, policy: str = "recmem"
    ) -> Self:
        """A new description, by default with a new key. ValueError: the key is not 64 hexadecimal digits."""
        if hash_key is not None and not HASH_KEY.fullmatch(hash_key):
            raise ValueError(f"hash_key is {hash_key!r:.80}; it must be 64 hexadecimal digits in lower case")
        return cls(FORMAT_VERSION, dim, encoder, hash_key or secrets.token_hex(32), policy=policy)

    @property
    def as_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    def tenant_key(self, tenant: str) -> str:
        """The keyed 128-bit hash of a tenant's name, for the index and for deletions."""
        key = bytes.fromhex(self.hash_key)
        return hashlib.blake2b(tenant.encode(errors="surrogatepass"), key=key, digest_size=16).hexdigest()


def is_store(where: Location | Path | str) -> bool:
    """Whether the location has a description and a journal, whatever their contents."""
    names = Location.of(where).children()
    return DESCRIPTION in names and any(JOURNAL_NAME.fullmatch(name) for name in names)


def read_info(where: Location | Path | str) -> StoreInfo:
    """Read `store.json`. StoreError if it is missing, damaged, no description, or of another format."""
    location = Location.of(where)
    data = location.read(DESCRIPTION)
    if data is None:
        raise StoreError(f"{location} is not an Undertow store (no {DESCRIPTION}). Check --store.")
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise StoreError(
            f"{location / DESCRIPTION} cannot be read ({error}). Restore it from a backup."
        ) from error
    if not isinstance(raw, dict):
        raise _no_description(location, "it is no JSON object")
    version = raw.get("format_version")
    if version not in READABLE_VERSIONS:
        raise StoreError(
            f"{location} has format version {version}; this Undertow reads versions "
            f"{READABLE_VERSIONS[0]} to {FORMAT_VERSION}. "
            "Install the Undertow that wrote it, or export there and import here."
        )
    if version == 1:
        raw.pop("epoch", None)
    if flaw := _flaw(raw):
        raise _no_description(location, flaw)
    return StoreInfo(**raw)


def _no_description(location: Location, flaw: str) -> StoreError:
    return StoreError(
        f"{location / DESCRIPTION} does not describe a store: {flaw}. Restore it from a backup."
    )


def _flaw(raw: dict[str, Any]) -> str | None:
    """Why a JSON object is no description of this format; None if it is one."""
    types = {"encoder": dict} | {n: t for n, t in get_type_hints(StoreInfo).items() if n != "encoder"}
    needed = [f.name for f in fields(StoreInfo) if f.default is MISSING]
    if missing := [name for name in needed if name not in raw]:
        return f"it lacks {', '.join(missing)}"
    if unknown := sorted(raw.keys() - types):
        return f"it has the unknown field {unknown[0]!r}"
    # JSON's true would pass as an int.
    wrong = [n for n, v in raw.items() if isinstance(v, bool) or not isinstance(v, types[n])]
    if wrong:
        return f"{wrong[0]} is {raw[wrong[0]]!r:.60}"
    if not HASH_KEY.fullmatch(raw["hash_key"]):
        return "hash_key is not 64 hexadecimal digits"
    if not JOURNAL_NAME.fullmatch(name := raw.get("journal", "journal.lance")):
        return f"journal is {name!r:.60}"
    return None if raw["dim"] > 0 else "dim is out of range"


def write_info(location: Location, info: StoreInfo) -> None:
    """Replace `store.json` atomically and durably. StoreError."""
    location.write(DESCRIPTION, info.as_json)


class WriterLock:
    """The exclusive right to append to a store, held by one process until closed or killed."""

    def __init__(self, folder: Path) -> None:
        path = folder / "writer.lock"
        # not of one thread: a shard on an event loop may open its store on one and close it on another
        self._lock = FileLock(path, mode=PRIVATE_FILE, thread_local=False)
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

"""The file of API keys: hashes, never secrets. Written here; `authenticator` reads it too.

keys.json        every key; replaced as a whole, so that a reader sees the old file or the new one
.keys.json.lock  held during read, change and replace, so that concurrent writers lose no change

A key's text is `ut_ID_SECRET`: secret scanners match `KEY_TEXT`, and the id finds the key in one lookup.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import orjson
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import PRIVATE_FILE, make_folder, remove_drafts, replace_file
from undertow.serving.auth.principal import (
    LONGEST_LABEL_CHARS,
    NO_LIMITS,
    KeyLimits,
    Principal,
    Scope,
    StrictModel,
    TenantScope,
)

FILE_NAME = "keys.json"
FORMAT_VERSION = 1
SECRET_BYTES = 32
KEY_ID = re.compile(r"[0-9a-f]{12}")
KEY_TEXT = re.compile(rf"ut_({KEY_ID.pattern})_[A-Za-z0-9_-]{{43}}")
DIGEST = re.compile(r"[0-9a-f]{64}")
# for its owner alone: whoever can write it can make keys
PATIENCE_S = 10.0


class KeyFileError(UndertowError):
    """The key file cannot be read or changed; the text names the cure."""


def utc_now() -> datetime:
    return datetime.now(UTC)


def digest_of(text: str) -> str:
    """The stored hash of a key's text. It covers the id, so that it is useless in another key's record.

    One round of SHA-256: a slow hash protects guessable words, but 256 random bits cannot be guessed at any
    speed, and every request would pay for it.
    """
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PreviousSecret(StrictModel):
    """A replaced secret, valid until a moment."""

    digest: str = field(repr=False)
    until: datetime


@dataclass(frozen=True, slots=True)
class Key(StrictModel):
    """A stored key. Times are zoned. ValueError for an invalid field.

    `label` is free text for people; keep tenants' names out of it, because erasure does not look there.
    """

    id: str
    digest: str = field(repr=False)
    reach: TenantScope
    scopes: tuple[Scope, ...]
    created_at: datetime
    label: str = ""
    limits: KeyLimits = NO_LIMITS
    expires_at: datetime | None = None
    rotated_at: datetime | None = None
    revoked_at: datetime | None = None
    former: tuple[PreviousSecret, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not KEY_ID.fullmatch(self.id):
            raise ValueError("a key's id is 12 hexadecimal digits")
        if not all(DIGEST.fullmatch(d) for d in self.digests):
            raise ValueError("a digest is 64 hexadecimal digits")
        if not self.scopes or len(set(self.scopes)) < len(self.scopes):
            raise ValueError(f"a key needs one or more of {', '.join(Scope)}, each once")
        if len(self.label) > LONGEST_LABEL_CHARS or not self.label.isprintable():
            raise ValueError(f"a label is at most {LONGEST_LABEL_CHARS} characters on one line")
        times = (self.created_at, self.expires_at, self.rotated_at, self.revoked_at)
        if any(moment and moment.tzinfo is None for moment in (*times, *(f.until for f in self.former))):
            raise ValueError("a moment needs its zone, such as 2026-05-08T13:56:00+00:00")

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of the current secret, then those of former ones."""
        return (self.digest, *(former.digest for former in self.former))

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    @property
    def principal(self) -> Principal:
        return Principal(self.id, self.label, self.reach, frozenset(self.scopes), self.limits)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A key and its text, which is stored nowhere: show it once."""

    key: Key
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Contents(StrictModel):
    format_version: int
    keys: tuple[Key, ...]


_CONTENTS = TypeAdapter(_Contents)


def parse(data: bytes, path: Path) -> dict[str, Key]:
    """The keys in a file's contents, by id. KeyFileError says what is wrong and quotes nothing."""
    try:
        raw = orjson.loads(data)
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if isinstance(version, int) and version != FORMAT_VERSION:
            raise KeyFileError(
                f"{path} has format version {version}; this Undertow reads version {FORMAT_VERSION}. "
                "Install the Undertow that wrote it."
            )
        contents = _CONTENTS.validate_json(data)
    except orjson.JSONDecodeError as error:
        raise _broken(path, f"it is no JSON ({error.msg} in line {error.lineno})") from None
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _broken(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
    keys = {key.id: key for key in contents.keys}
    if len(keys) < len(contents.keys):
        raise _broken(path, "two keys have the same id")
    return keys


def _broken(path: Path, flaw: str) -> KeyFileError:
    return KeyFileError(f"{path} is no key file: {flaw}. Restore it from a backup.")


class KeyFile:
    """The keys of one service. Several processes may change them; each change is durable on return."""

    def __init__(self, path: Path, *, now: Callable[[], datetime] = utc_now) -> None:
        """The file may be missing: then there is no key. `now` is zoned."""
        self.path = path
        self._now = now

    def read(self) -> dict[str, Key]:
        """The keys by id, oldest first; none where there is no file. KeyFileError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise KeyFileError(
                f"cannot read {self.path}: {error.strerror}. Run this as the user of the service."
            ) from error
        return parse(data, self.path)

    def require(self, key_id: str) -> Key:
        """The key of this id. KeyFileError: there is none."""
        return _one_of(self.read(), key_id)

    def create(
        self,
        reach: TenantScope,
        scopes: Iterable[Scope],
        *,
        label: str = "",
        limits: KeyLimits = NO_LIMITS,
        expires_at: datetime | None = None,
    ) -> NewSecret:
        """Add a key. ValueError for what a key cannot be; KeyFileError."""
        now = self._second()
        with self._changing() as keys:
            key_id = next(i for i in iter(lambda: secrets.token_hex(6), None) if i not in keys)
            text = _new_text(key_id)
            key = Key(key_id, digest_of(text), reach, tuple(scopes), now, label, limits, expires_at)
            if key.state(now) != "active":
                raise ValueError("a key that has expired is of no use; let it expire later")
            keys[key_id] = key
        return NewSecret(key, text)

    def rotate(self, key_id: str, grace: timedelta) -> NewSecret:
        """Give a key a new secret; every earlier one holds for `grace` at the most. KeyFileError."""
        now = self._second()
        text = _new_text(key_id)
        with self._changing() as keys:
            key = _one_of(keys, key_id)
            if (state := key.state(now)) != "active":
                raise KeyFileError(f"key {key_id} is {state}. Create a new one.")
            until = now + grace
            former = [PreviousSecret(f.digest, min(f.until, until)) for f in key.former]
            former.insert(0, PreviousSecret(key.digest, until))
            holding = tuple(f for f in former if f.until > now)
            keys[key_id] = replace(key, digest=digest_of(text), former=holding, rotated_at=now)
            changed = keys[key_id]
        return NewSecret(changed, text)

    def revoke(self, key_id: str) -> Key:
        """End a key for good; one that was revoked stays as it is. KeyFileError: there is none of this id."""
        with self._changing() as keys:
            key = _one_of(keys, key_id)
            if key.revoked_at is None:
                keys[key_id] = replace(key, revoked_at=self._second(), former=())
            return keys[key_id]

    def forget(self, erased: Callable[[str], bool]) -> list[str]:
        """Remove tenants' names from the file; ids of the keys that had one. KeyFileError.

        A key that was bound to no one else goes with its last name. Prefixes stay: they are of groups.
        """
        with self._changing() as keys:
            touched = [key for key in keys.values() if any(map(erased, key.reach.tenants))]
            for key in touched:
                left = tuple(name for name in key.reach.tenants if not erased(name))
                if left:
                    keys[key.id] = replace(key, reach=TenantScope(left))
                else:
                    del keys[key.id]
        return [key.id for key in touched]

    def _second(self) -> datetime:
        return self._now().replace(microsecond=0)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Key]]:
        """The keys, to be changed in place: written unless the body raises or leaves them as they were."""
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=PATIENCE_S, mode=PRIVATE_FILE)
        try:
            make_folder(self.path.parent)
            lock.acquire()
        except Timeout:
            raise KeyFileError(
                f"another process has been changing {self.path} for {PATIENCE_S:g} s. Wait, or stop it."
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            keys = self.read()
            before = dict(keys)
            yield keys
            if keys != before:
                self._write(keys.values())
        finally:
            lock.release()

    def _write(self, keys: Iterable[Key]) -> None:
        contents = _Contents(FORMAT_VERSION, tuple(keys))
        try:
            # replaced by another user, the file would be unreadable for the service
            if self.path.exists() and (owner := self.path.stat().st_uid) != os.geteuid():
                raise KeyFileError(f"{self.path} belongs to user {owner}. Run this as that user.")
            remove_drafts(self.path)
            replace_file(self.path, _CONTENTS.dump_json(contents, indent=2))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> KeyFileError:
        return KeyFileError(
            f"cannot write {self.path}: {error.strerror}. Check the path, its rights and the disk's space."
        )


def _new_text(key_id: str) -> str:
    return f"ut_{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def _one_of(keys: dict[str, Key], key_id: str) -> Key:
    """The id is not quoted in the error: it may be a key's whole text, and errors go into logs."""
    if key_id not in keys:
        raise KeyFileError("no key has this id. `undertow keys list` shows the ids.")
    return keys[key_id]


def describe(key: Key, now: datetime) -> dict[str, Any]:
    """A key for people: everything but the digests."""
    times = {
        **{name: getattr(key, name) for name in ("created_at", "expires_at", "rotated_at", "revoked_at")},
        "former_until": max((f.until for f in key.former if f.until > now), default=None),
    }
    return {
        "id": key.id,
        "state": key.state(now),
        "label": key.label,
        "tenants": list(key.reach.tenants),
        "prefix": key.reach.prefix,
        "all_tenants": key.reach.all_tenants,
        "scopes": [scope.value for scope in key.scopes],
        **{name: moment and moment.isoformat(timespec="seconds") for name, moment in times.items()},
        "requests_per_s": key.limits.requests_per_s,
        "burst": None if key.limits.requests_per_s is None else key.limits.burst_size,
        "tokens_per_day": key.limits.tokens_per_day,
    }

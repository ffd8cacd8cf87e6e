"""Checks the keys of requests. A change of the key file takes effect with the next request."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from undertow.engine.base.model import UndertowError
from undertow.serving.auth.key_file import KEY_TEXT, Key, KeyFileError, digest_of, parse, utc_now
from undertow.serving.auth.principal import Principal

log = logging.getLogger(__name__)

# compared with if the id is unknown, so that the check takes as long; no known text has this digest
NO_DIGEST = "0" * 64


class KeyRefused(UndertowError):
    """The key is unknown, expired or revoked; the caller is not told which.

    `reason` says it, for the log, without any part of the secret.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("this key is not accepted. Check it, or ask for a new one where you got it.")
        self.reason = reason


class Authenticator:
    """The keys in force, from a key file that may change at any time. Thread-safe.

    A file that is broken or gone leaves the last good keys in force: `trouble` and the log say so.
    """

    def __init__(self, path: Path, *, now: Callable[[], datetime] = utc_now) -> None:
        """Without a file every key is refused until there is one. KeyFileError: it is broken already."""
        self._path, self._name = path, str(path)
        self._now = now
        self._keys: Mapping[str, Key] = {}
        self._identity: tuple[int, ...] | None = None
        # the file that was read last stays open: while it is, no other file can have its inode number
        self._file: BinaryIO | None = None
        self._reading = threading.Lock()
        self.trouble: str | None = None
        """Why the file cannot be used as it is now; None: it can."""
        self._refresh()
        if self.trouble is not None:
            self.close()
            raise KeyFileError(self.trouble)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def check(self, text: str) -> Principal:
        """The holder of this key. KeyRefused, after the same time for a wrong secret and an unknown key."""
        self._refresh()
        form = KEY_TEXT.fullmatch(text)
        if form is None:  # no secret is compared: the form of a key is public
            raise KeyRefused("not of a key's form")
        key_id = form[1]
        key = self._keys.get(key_id)
        offered = digest_of(text)
        same = [hmac.compare_digest(offered, digest) for digest in (key.digests if key else [NO_DIGEST])]
        if key is None:
            raise KeyRefused(f"{key_id}: no such key")
        if flaw := _flaw(key, same, self._now()):
            raise KeyRefused(f"{key_id}: {flaw}")
        return key.principal

    def _refresh(self) -> None:
        """Read the file again if it is not the one that was read last."""
        try:
            if _identity(os.stat(self._name)) != self._identity:  # noqa: PTH116 - for each request
                with self._reading:
                    self._read()
        except OSError as error:
            self._unreadable(error)

    def _read(self) -> None:
        file = self._path.open("rb")
        try:
            identity, data = _identity(os.fstat(file.fileno())), file.read()
        except OSError:
            file.close()
            raise
        if identity == self._identity:  # another thread was faster
            file.close()
            return
        trouble = None
        try:
            self._keys = parse(data, self._path)
        except KeyFileError as error:
            trouble = str(error)
        self.close()
        # only now: threads that see this identity use `_keys` without waiting
        self._file, self._identity = file, identity
        self._report(trouble)

    def _unreadable(self, error: OSError) -> None:
        """A file that is missing at the start is no trouble: nobody has made a key yet."""
        if isinstance(error, FileNotFoundError) and self._identity is None:
            return
        self._identity = () if self._identity is not None else None
        self._report(f"cannot read {self._path}: {error.strerror}. Put it back, readable for this process.")

    def _report(self, trouble: str | None) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble is None:
            log.info("%s can be used again", self._path)
        else:
            log.error("%s The keys that were read last stay in force.", trouble)


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _flaw(key: Key, same: list[bool], now: datetime) -> str | None:
    """Why a key is not accepted; None: it is. `same`: for each of its secrets, whether it was offered."""
    if not any(same):
        return "wrong secret"
    state = key.state(now)
    if state != "active":
        return state
    if not same[0] and not any(s and f.until > now for s, f in zip(same[1:], key.former, strict=True)):
        return "former secret, whose time of grace is over"
    return None


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or "localhost"; other names might resolve elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

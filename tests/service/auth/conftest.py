"""A key file, an authenticator that reads it, and the clock of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from undertow.serving.auth.authenticator import Authenticator
from undertow.serving.auth.key_file import KeyFile

from ...support.service.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> KeyFile:
    return KeyFile(tmp_path / "keys.json", now=clock)


@pytest.fixture
def keys(file: KeyFile, clock: Clock) -> Iterator[Authenticator]:
    opened = Authenticator(file.path, now=clock)
    yield opened
    opened.close()

"""A store of its own for each test, and its journal opened to be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from undertow.engine.storage.journal import Journal

from ....support.storage.journal import DIM


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Journal.create(tmp_path / "store", DIM, {"model": "none"})
    return tmp_path / "store"


@pytest.fixture
def journal(store: Path) -> Iterator[Journal]:
    opened = Journal.open(store, writable=True)
    yield opened
    opened.close()

"""A store of its own for each test: in a folder, with its journal opened to be written, or in each place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location

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


@pytest.fixture(params=["folder", "s3"])
def empty_place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A place for a store: in a folder, and in a bucket."""
    if request.param == "folder":
        return Location.of(tmp_path / "store")
    request.getfixturevalue("s3")
    return Location.of(f"s3://memories/{uuid4().hex}/store")


@pytest.fixture
def place(empty_place: Location) -> Location:
    """A store in a folder, and one in a bucket."""
    Journal.create(empty_place, DIM, {"model": "none"})
    return empty_place

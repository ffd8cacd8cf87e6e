"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from ..support.faults.harness import Driver, shared_driver


@pytest.fixture(scope="session")
def driver() -> Driver:
    return shared_driver()

"""Packages of npm that tests run: `make setup-node` fetches them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def packages_of(folder: Path) -> Path:
    """The node_modules of a folder. Without it the test is skipped, and fails in CI."""
    found = folder / "node_modules"
    if not found.is_dir():
        cure = f"{found} is missing: install Node.js 20, then run `make setup-node`"
        if os.environ.get("CI"):
            pytest.fail(cure)
        pytest.skip(cure)
    return found

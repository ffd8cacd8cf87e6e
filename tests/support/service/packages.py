"""Packages that some tests need."""

from __future__ import annotations

import importlib
import os

import pytest


def needed(*names: str) -> None:
    """Skip the module where a package is not installed; in CI that is an error, as `make setup` adds all."""
    for name in names:
        if "CI" in os.environ:
            importlib.import_module(name)
        else:
            pytest.importorskip(name, reason=f"{name} is not installed: make setup", exc_type=ImportError)

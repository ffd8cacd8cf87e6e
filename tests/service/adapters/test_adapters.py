"""All adapters: what they load, how tenants are named, and the page about them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.base.model import UndertowError
from undertow.serving.adapters.memories import Memories, absence, tenant_name
from undertow.serving.client.errors import RateLimited

from ...support.engine import open_engine

PACKAGES = ["google.adk", "langgraph", "llama_index", "agents"]
LOADED = """
import sys
import undertow, undertow.serving.client, undertow.engine.api.engine, undertow.serving.adapters.memories
import undertow.serving.cli, undertow.serving.http.app, undertow.serving.mcp.server
print([name for name in {names} if name in sys.modules])
"""


def test_nothing_else_loads_a_framework() -> None:
    code = LOADED.format(names=PACKAGES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_error_of_a_service_needs_no_package_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "undertow.engine.tenants.registry", None)
    with pytest.raises(RateLimited), absence():
        raise RateLimited("busy", status=429)


PARTS = st.lists(st.text(st.sampled_from("a/%2F."), max_size=3), max_size=3)


@given(one=PARTS, other=PARTS)
def test_a_tenant_s_name_tells_its_parts(one: list[str], other: list[str]) -> None:
    assert (tenant_name("x", *one) == tenant_name("x", *other)) == (one == other)


def test_half_a_surrogate_pair_names_no_tenant() -> None:
    with pytest.raises(ValueError):
        tenant_name("x", "\ud800")


def test_an_engine_is_refused(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine, pytest.raises(UndertowError, match="serves one thread"):
        Memories(engine)
    with pytest.raises(UndertowError, match="serves one thread"):
        Memories(cast(Any, None))

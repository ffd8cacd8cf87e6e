"""`undertow mcp --url` without a key: told before an agent calls its first tool."""

from __future__ import annotations

import asyncio
from pathlib import Path

from undertow.serving.cli.commands.mcp import KEY_VARIABLE
from undertow.serving.mcp.stdio import wants_key

from ..support.cli import run
from ..support.service.http import serving


def test_a_service_that_wants_a_key_is_told_with_the_cure(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        ran = run("mcp", "--url", service.url, env={KEY_VARIABLE: ""})
        assert (ran.code, ran.out) == (2, "")
        assert "wants a key" in ran.err and KEY_VARIABLE in ran.err and "--key-file" in ran.err


def test_a_service_without_keys_wants_none(tmp_path: Path) -> None:
    with serving(tmp_path, open_to_all=True) as service:
        assert not asyncio.run(wants_key(service.url))
        closed = service.url
    assert not asyncio.run(wants_key(closed)), "it may be there later"

"""`undertow mcp`: the server as an agent's program starts it, over standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from undertow.serving.cli.commands.mcp import KEY_VARIABLE
from undertow.serving.mcp.stdio import refuses

from ...support.cli import ENV, PROGRAM, run
from ...support.service.http import Running, serving
from ...support.service.mcp import EVERY_TOOL, MODES, TOOLS, done, refused

pytestmark = pytest.mark.anyio
BOAT = "the boat needs new planks before summer"
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}


@asynccontextmanager
async def session(
    *args: str, mode: str = "auto", told: Path | None = None, key: str | None = None
) -> AsyncIterator[Client]:
    """A session with `undertow mcp ARGS` as a process of its own; `told` is given its standard error."""
    environment = {**os.environ, **ENV, **({} if key is None else {KEY_VARIABLE: key})}
    command, *rest = [*PROGRAM, "mcp", *args]
    server = StdioServerParameters(command=command, args=rest, env=environment)
    with (told or Path(os.devnull)).open("w") as log:
        async with Client(stdio_client(server, errlog=log), mode=mode) as client:
            yield client


@pytest.mark.parametrize("mode", MODES)
async def test_a_remote_service_s_tools(running: Running, tmp_path: Path, mode: str) -> None:
    file, told = tmp_path / "key", tmp_path / "stderr"
    file.write_text(running.key(tenants=("ann",)) + "\n")
    async with session("--url", running.url, "--key-file", str(file), mode=mode, told=told) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == EVERY_TOOL
        added = await done(client, "add_memory", tenant="ann", text=BOAT)
        found = await done(client, "search_memories", tenant="ann", query=BOAT, top_k=1)
        assert found["memories"][0]["memory"] == f"user: {BOAT}"
        memory = added["results"][0]["id"]
        assert "lacks the scope" in await refused(client, "get_memory", tenant="eve", memory_id=memory)
        assert "top_k:" in await refused(client, "search_memories", tenant="ann", query="x", top_k=0)
    assert told.read_text() == ""


async def test_one_tenant_alone_with_the_key_of_the_environment(running: Running) -> None:
    async with session("--url", running.url, "--tenant", "acme/bob", key=running.key()) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == TOOLS
        assert all("tenant" not in tool.input_schema["properties"] for tool in tools)
        await done(client, "add_memory", text=BOAT)
        assert (await done(client, "search_memories", query=BOAT))["memories"]
        assert "one tenant's" in await refused(client, "search_memories", query=BOAT, tenant="ann")


async def test_a_refusal_of_the_service_is_an_error(running: Running) -> None:
    key = running.key(tenants=("bob",))
    async with session("--url", running.url, "--tenant", "ann", key=key) as client:
        said = await refused(client, "search_memories", query=BOAT)
        assert "lacks the scope" in said and "memories" not in said


async def test_a_store_without_a_service_keeps_what_was_answered(tmp_path: Path) -> None:
    store = tmp_path / "store"
    add = {"name": "add_memory", "arguments": {"tenant": "ann", "text": BOAT}}
    with started("--store", str(store)) as process:
        assert ask(process, 1, "initialize", HELLO)["serverInfo"]["name"] == "undertow"
        assert not ask(process, 2, "tools/call", add)["isError"]
        process.kill()  # a session destroyed
    async with session("--store", str(store), "--tenant", "ann") as client:
        found = await done(client, "search_memories", query=BOAT)
        assert [memory["memory"] for memory in found["memories"]] == [f"user: {BOAT}"]
        assert await refused(client, "answer_question", question="Which boat?")  # there is no LLM


def test_nothing_but_the_protocol_is_on_standard_output(running: Running) -> None:
    wrong = {"name": "get_memory", "arguments": {}}
    with started("--url", running.url, "--tenant", "ann", key=running.key()) as process:
        ask(process, 1, "initialize", HELLO)
        assert ask(process, 2, "tools/call", wrong)["isError"]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("this is no JSON\n")
        process.stdin.flush()
        assert ask(process, 3, "ping", {}) == {}
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0


def started(*args: str, key: str = "") -> subprocess.Popen[str]:
    """`undertow mcp ARGS`, to be spoken to in lines."""
    return subprocess.Popen(
        [*PROGRAM, "mcp", *args],
        env={**os.environ, **ENV, KEY_VARIABLE: key},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def ask(process: subprocess.Popen[str], number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of one request, which must be the next line."""
    assert process.stdin is not None and process.stdout is not None
    request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", number)
    result: dict[str, Any] = answer["result"]
    return result


def test_a_store_that_a_service_has_open_is_refused(running: Running) -> None:
    done = subprocess.run(
        [*PROGRAM, "mcp", "--store", str(running.folder)],
        env={**os.environ, **ENV},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr and str(running.folder) in done.stderr


@pytest.mark.parametrize(
    ("args", "cure"),
    [
        ([], "give --url URL"),
        (["--url", "http://h", "--store", "s"], "give --url URL"),
        (["--url", "h:80"], "such as http://localhost:8080"),
        (["--url", "http://h", "--tenant", ""], "tenant's name"),
        (["--url", "http://h", "--llm", "off"], "go with --store"),
        (["--store", "s", "--key-file", "k"], "goes with --url"),
    ],
)
def test_wrong_options_are_refused(args: list[str], cure: str) -> None:
    done = run("mcp", *args)
    assert (done.code, done.out) == (2, "")
    assert cure in done.err


def test_a_service_that_wants_a_key_is_told_with_the_cure(running: Running) -> None:
    done = run("mcp", "--url", running.url, env={KEY_VARIABLE: ""})
    assert (done.code, done.out) == (2, "")
    assert "wants a key" in done.err and KEY_VARIABLE in done.err and "--key-file" in done.err


def test_a_wrong_key_is_told_at_the_start(running: Running) -> None:
    done = run("mcp", "--url", running.url, env={KEY_VARIABLE: "ut_wrong"})
    assert (done.code, done.out) == (2, "")
    assert "refuses this key" in done.err and "ut_wrong" not in done.err


async def test_a_service_without_keys_wants_none(tmp_path: Path) -> None:
    with serving(tmp_path, open_to_all=True) as service:
        assert not await refuses(service.url, None)
        closed = service.url
    assert await refuses(closed, None) is None, "it may be there later"


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    done = run("mcp", "--url", "http://h", "--key-file", tmp_path / "no key")
    assert done.code == 2 and "no key" in done.err

"""Does the `openai` package cap requests per second? The client beside a bare HTTP loop.

    python -m undertow.bench.micro.llm_client

Both send the same merge prompts to a mock server in a process of its own, without latency. On a
machine with few cores server and client share them, so CPU time per request is printed as well:
its inverse is what one core could send to a server elsewhere. Ends in one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.table import Table

from undertow.bench.mock.llm import MODEL
from undertow.bench.mock.server import spawn_server
from undertow.engine.base.config import Settings
from undertow.engine.llm.client import OpenAILLM, read_reply
from undertow.prompts.builders import Prompt, ShownMemory, ShownTurn, merge_prompt

NEEDED_PER_S = 250  # what a server with a model of at most 2B parameters is meant to sustain
_TALK = "we went down to the harbour after work and talked about the garden plans for spring"


def some_prompts(count: int) -> list[Prompt]:
    """Merge prompts of an 80-word episode and a 60-word turn, all different."""
    episode = ShownMemory(1, "2023-05-01", " ".join([_TALK] * 5))
    return [
        merge_prompt(episode, ShownTurn(1, "2023-05-08", f"Ann: {n} {' '.join([_TALK] * 4)}"))
        for n in range(count)
    ]


def through_client(url: str, prompts: list[Prompt], in_flight: int) -> None:
    with OpenAILLM(Settings(llm_url=url, llm_model=MODEL, llm_in_flight=in_flight)) as llm:
        for future in [llm.submit(prompt, tenant="bench") for prompt in prompts]:
            future.result()


def through_bare_http(url: str, prompts: list[Prompt], in_flight: int) -> None:
    """The least that can be done: the same bodies, posted and validated, no retries or priorities."""

    async def send(client: httpx2.AsyncClient, free: asyncio.Semaphore, prompt: Prompt) -> None:
        assert prompt.reply is not None
        form = {"name": prompt.operation, "schema": prompt.reply.wire_schema(), "strict": True}
        body: dict[str, Any] = {"model": MODEL, "messages": prompt.messages, "temperature": 0, "seed": 0}
        body |= {"max_tokens": 1024, "response_format": {"type": "json_schema", "json_schema": form}}
        async with free:
            response = await client.post(f"{url}/chat/completions", json=body)
        read_reply(prompt, response.json()["choices"][0]["message"]["content"])

    async def send_all() -> None:
        free = asyncio.Semaphore(in_flight)
        async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_connections=in_flight)) as client:
            await asyncio.gather(*(send(client, free, prompt) for prompt in prompts))

    asyncio.run(send_all())


def measured(
    send: Callable[[str, list[Prompt], int], None], url: str, requests: int, in_flight: int
) -> list[float]:
    """[requests/s, CPU ms of this process a request], after a warm-up."""
    send(url, some_prompts(in_flight), in_flight)
    prompts = some_prompts(requests)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    send(url, prompts, in_flight)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return [requests / wall_s, cpu_s / requests * 1e3]


def main(
    requests: int = 1_500,
    in_flight: int = 64,
    rounds: Annotated[int, typer.Option(help="alternating; the best of each counts")] = 3,
) -> None:
    ways = {"openai package": through_client, "bare httpx2 loop": through_bare_http}
    best = {name: [0.0, float("inf")] for name in ways}
    with spawn_server() as url:
        for _ in range(rounds):
            for name, send in ways.items():
                per_s, cpu_ms = measured(send, url, requests, in_flight)
                best[name] = [max(best[name][0], per_s), min(best[name][1], cpu_ms)]
    table = Table(
        title=f"{requests} requests, {in_flight} in flight, best of {rounds}; needed: {NEEDED_PER_S}/s"
    )
    for column in ("client", "requests/s", "CPU ms a request", "requests/s a core"):
        table.add_column(column, justify="left" if column == "client" else "right")
    for name, (per_s, cpu_ms) in best.items():
        table.add_row(name, f"{per_s:.0f}", f"{cpu_ms:.2f}", f"{1e3 / cpu_ms:.0f}")
    Console().print(table)
    keys = {name: name.split()[0] for name in ways}
    figures = {
        f"{keys[name]}_{unit}": round(value, 2)
        for name, pair in best.items()
        for unit, value in zip(("requests_per_s", "cpu_ms_per_request"), pair, strict=True)
    }
    print(json.dumps({"bench": "llm_client", "in_flight": in_flight, "needed_per_s": NEEDED_PER_S} | figures))


if __name__ == "__main__":
    typer.run(main)

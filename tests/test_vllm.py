"""The protocol against a real vLLM server; the tiny model's words mean nothing, everything else is real."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import openai
import psutil
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from undertow.serving.local_vllm import LocalVLLM

pytestmark = pytest.mark.vllm

IN_FLIGHT = 24


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=20)]
    age: Annotated[int, Field(ge=0, le=150)]


class Episode(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=80)]
    people: Annotated[list[Person], Field(min_length=1, max_length=3)]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    episodes: Annotated[list[Episode], Field(min_length=1, max_length=2)]
    tags: Annotated[list[Annotated[str, Field(max_length=12)]], Field(max_length=4)]


@pytest.fixture
def client(tiny_vllm: LocalVLLM) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_vllm.url, api_key="none", max_retries=0, timeout=240) as made:
        yield made


def ask(client: openai.OpenAI, text: str, max_tokens: int = 16) -> ChatCompletion:
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=max_tokens, temperature=0
    )


def ask_schema(client: openai.OpenAI, text: str) -> ChatCompletion:
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": text}],
        max_tokens=2048,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": Reply.model_json_schema(), "strict": True},
        },
    )


def metrics(server: LocalVLLM) -> dict[str, float]:
    """The server's counters and gauges by bare name, added up over their labels."""
    with urllib.request.urlopen(f"{server.root_url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name = series.split("{", 1)[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_schema_holds_for_many_requests_at_once_and_they_share_steps(
    client: openai.OpenAI, tiny_vllm: LocalVLLM
) -> None:
    texts = [f"note {index}: " + "rain " * index for index in range(IN_FLIGHT)]
    before = metrics(tiny_vllm)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        replies = list(pool.map(lambda text: ask_schema(client, text), texts))
    after = metrics(tiny_vllm)

    contents = [reply.choices[0].message.content or "" for reply in replies]
    assert [reply.choices[0].finish_reason for reply in replies] == ["stop"] * IN_FLIGHT
    for content in contents:
        Reply.model_validate_json(content)
    assert len(set(contents)) > 1, "the replies do not depend on the prompts"

    generated = sum(reply.usage.completion_tokens for reply in replies if reply.usage)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == generated
    # one request at a time takes a step a token
    steps = after["vllm:iteration_tokens_total_count"] - before["vllm:iteration_tokens_total_count"]
    assert 0 < steps < generated / 2


def test_usage_counts_the_tokens_of_the_template_and_the_reply(
    client: openai.OpenAI, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for text in ("hi", "Grüße, 東京 🚆", "a line\nand <b>another</b>" * 20):
        reply = ask(client, text, max_tokens=7)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(tokenizer.encode(prompt, add_special_tokens=False))
        assert reply.usage.completion_tokens == 7
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + 7
        assert reply.choices[0].finish_reason == "length"


def test_a_shared_prefix_is_cached_and_counted(client: openai.OpenAI, tiny_vllm: LocalVLLM) -> None:
    prefix = "These rules hold for every note that follows. " * 20
    first = ask(client, prefix + "first")
    before = metrics(tiny_vllm)
    second = ask(client, prefix + "second")
    after = metrics(tiny_vllm)

    cached = [
        reply.usage.prompt_tokens_details.cached_tokens or 0
        for reply in (first, second)
        if reply.usage and reply.usage.prompt_tokens_details
    ]
    assert cached[0] == 0
    assert len(prefix) // 2 < cached[1] < len(prefix) + 40
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    assert hits == cached[1]


def test_a_prompt_over_the_context_is_a_400_and_harms_nobody(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x" * 5_000)
    assert caught.value.status_code == 400
    assert "4096" in str(caught.value)
    assert ask(client, "still there?").usage is not None


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such", messages=[{"role": "user", "content": "hi"}])


def test_stop_leaves_no_process_and_the_same_port_serves_again(
    client: openai.OpenAI, tiny_vllm: LocalVLLM
) -> None:
    answer = ask(client, "the same again").choices[0].message.content
    assert tiny_vllm.pid is not None
    leader = psutil.Process(tiny_vllm.pid)
    family = [leader, *leader.children(recursive=True)]
    assert len(family) > 1, "vLLM runs its engine in a process of its own"
    url = tiny_vllm.url

    tiny_vllm.stop()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    with pytest.raises(openai.APIConnectionError):
        ask(client, "anybody?")

    tiny_vllm.start()
    assert tiny_vllm.url == url
    assert ask(client, "the same again").choices[0].message.content == answer

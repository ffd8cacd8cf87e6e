"""The mock LLM: schema-valid, deterministic, echoing, and the same over HTTP as in process."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.mock.server import options, spawn_server
from undertow.engine.llm.client import BadReply
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    answer_prompt,
    consolidate_prompt,
    episode_prompt,
    merge_prompt,
    narrate_prompt,
    partition_prompt,
    refine_prompt,
    select_prompt,
)
from undertow.prompts.reply_schemas import (
    ConsolidateReply,
    EpisodesReply,
    FactsReply,
    MergeReply,
    NarrativeReply,
    PartitionReply,
    Reply,
    SelectReply,
)

WORDS = ["harbour", "kite", "violin", "garden", "winter", "marathon", "recipe", "telescope", "lamp", "fern"]


def turns(count: int, start: int = 0) -> list[ShownTurn]:
    return [
        ShownTurn(
            i + 1,
            "2023-05-08",
            f"Ann: {WORDS[(start + i) % 10]} {i + start}\nBo: {WORDS[(start + 2 * i) % 10]}",
        )
        for i in range(count)
    ]


def prompts(n: int) -> list[Prompt]:
    memory = ShownMemory(1, "2023-05-01", f"Ann began to learn the violin, part {n}.")
    shown = turns(4, n)
    return [
        episode_prompt(shown),
        merge_prompt(memory, shown[0]),
        refine_prompt(
            memory, shown, [ShownMemory(1, None, "Ann likes kites."), ShownMemory(2, None, "Bo runs.")]
        ),
        answer_prompt(f"Who likes {WORDS[n % 10]}?", [memory], [], [], None),
    ]


def schema_of(prompt: Prompt) -> dict[str, Any] | None:
    return None if prompt.reply is None else prompt.reply.wire_schema()


def answer(prompt: Prompt, replies: MockReplies) -> Reply | str:
    with MockLLM(replies) as llm:
        return llm.submit(prompt, tenant="t").result().reply


def merges(prompt: Prompt, replies: MockReplies) -> bool:
    reply = answer(prompt, replies)
    assert isinstance(reply, MergeReply)
    return reply.same_story


@given(st.lists(st.text(), min_size=1, max_size=12), st.integers(0, 3))
def test_replies_are_valid_whatever_is_shown(texts: list[str], seed: int) -> None:
    shown = [ShownTurn(i + 1, None, text) for i, text in enumerate(texts)]
    memory = ShownMemory(1, None, texts[0])
    for replies in (MockReplies(seed), MockReplies(seed, refusal_rate=1.0, empty_rate=1.0)):
        episodes = answer(episode_prompt(shown), replies)
        assert isinstance(episodes, EpisodesReply)
        assert all(set(e.turns) <= set(range(1, len(texts) + 1)) and e.turns for e in episodes.episodes)
        facts = answer(refine_prompt(memory, shown, []), replies)
        assert isinstance(facts, FactsReply)
        assert all(fact.replaces is None for fact in facts.facts)
        assert isinstance(answer(merge_prompt(memory, shown[0]), replies), MergeReply)
        assert answer(answer_prompt("?", [memory], [], [], None), replies)


def test_windows_are_parted_and_told_and_some_parts_are_none() -> None:
    """NEMORI: whole partitions, and where it refuses, one with a message missing, one twice, one invented."""
    shown = turns(6)
    whole = answer(partition_prompt(shown), MockReplies(1))
    assert isinstance(whole, PartitionReply)
    assert sorted(n for group in whole.groups for n in group.messages) == [1, 2, 3, 4, 5, 6]
    broken = answer(partition_prompt(shown), MockReplies(1, refusal_rate=1.0))
    assert isinstance(broken, PartitionReply)
    assert sorted(n for group in broken.groups for n in group.messages) != [1, 2, 3, 4, 5, 6]
    memory = ShownMemory(1, None, "Ann sails.")
    for seed in range(5):
        chosen = answer(select_prompt(memory, [memory, memory]), MockReplies(seed))
        assert isinstance(chosen, SelectReply) and chosen.continues in (None, 1, 2)
        stored = [ShownMemory(n, None, f"fact {n}") for n in (1, 2, 3)]
        decided = answer(consolidate_prompt(memory, stored), MockReplies(seed))
        assert isinstance(decided, ConsolidateReply) and set(decided.targets) <= {1, 2, 3}
        told = answer(narrate_prompt(shown), MockReplies(seed))
        assert isinstance(told, NarrativeReply) and len(told.cue) < len(told.narrative)


class Leaf(BaseModel):
    colour: Literal["red", "green"]
    weight: float = Field(ge=2, le=3)
    names: list[str] = Field(min_length=2, max_length=3)
    fixed: Literal["x"]
    maybe: int | None
    code: str = Field(min_length=200, max_length=210)


class Tree(BaseModel):
    leaves: list[Leaf] = Field(min_length=1, max_length=4)
    other: Leaf | bool
    count: int = Field(ge=50, le=60)


@pytest.mark.parametrize("seed", range(20))
def test_any_schema_is_satisfied(seed: int) -> None:
    schema = Tree.model_json_schema()
    value = json.loads(MockReplies(seed).reply(episode_prompt(turns(3)).messages, schema))
    Tree.model_validate(value)


def test_a_reply_depends_on_seed_and_messages_alone() -> None:
    def run(seed: int, order: list[int]) -> dict[int, list[str]]:
        replies = MockReplies(seed, refusal_rate=0.3, empty_rate=0.3, malformed_rate=0.3)
        return {n: [replies.reply(p.messages, schema_of(p)) for p in prompts(n)] for n in order}

    forward = run(7, list(range(30)))
    assert forward == run(7, list(reversed(range(30))))
    assert forward != run(8, list(range(30)))


def test_the_server_replies_as_the_process_does() -> None:
    replies = MockReplies(3, refusal_rate=0.3, empty_rate=0.3)
    with spawn_server(seed=3, refusal_rate=0.3, empty_rate=0.3) as url:
        for prompt in prompts(1) + prompts(2):
            schema = schema_of(prompt)
            body: dict[str, Any] = {"model": "mock-llm", "messages": prompt.messages}
            if schema is not None:
                form = {"name": prompt.operation, "schema": schema, "strict": True}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
            content = post(url + "/chat/completions", body)["choices"][0]["message"]["content"]
            assert content == replies.reply(prompt.messages, schema)
        with urllib.request.urlopen(url.removesuffix("/v1") + "/stats", timeout=10) as response:
            stats = json.load(response)
    assert stats["calls"] == {"episode": 2, "merge": 2, "refine": 2, "answer": 2}
    assert stats["prompt_tokens"] > stats["cached_prompt_tokens"] > 0


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def test_episodes_and_merges_echo_what_was_shown() -> None:
    shown = turns(4)
    reply = answer(episode_prompt(shown), MockReplies())
    assert isinstance(reply, EpisodesReply)
    covered = set()
    for episode in reply.episodes:
        named = {word for turn in shown if turn.number in episode.turns for word in turn.text.split()}
        assert set(episode.text.split()) == named
        covered |= set(episode.turns)
    assert covered == {1, 2, 3, 4}
    long_episode = ShownMemory(1, None, " ".join(f"old{i}" for i in range(200)))
    merged = answer(merge_prompt(long_episode, ShownTurn(1, None, "Ann: fresh kite")), MockReplies())
    assert isinstance(merged, MergeReply)
    assert merged.narrative.endswith("Ann: fresh kite")
    assert merged.narrative.count("old") == 60


def test_rates_are_shares_of_prompts() -> None:
    memory = ShownMemory(1, None, "Ann sails.")
    asked = [merge_prompt(memory, ShownTurn(1, None, f"Ann: {i}")) for i in range(400)]
    replies = MockReplies(0, refusal_rate=0.25)
    merged = [merges(p, replies) for p in asked]
    assert 0.65 < sum(merged) / len(merged) < 0.85
    assert not any(merges(p, MockReplies(0, refusal_rate=1.0)) for p in asked[:20])
    empty = answer(episode_prompt(turns(3)), MockReplies(empty_rate=1.0))
    assert empty == EpisodesReply(episodes=[])


def test_a_malformed_reply_is_repaired_unless_it_sticks() -> None:
    prompt = episode_prompt(turns(3))
    with MockLLM(MockReplies(malformed_rate=1.0)) as llm:
        done = llm.submit(prompt, tenant="t").result()
    assert done.reply == answer(prompt, MockReplies())
    assert done.usage.calls == 2
    with MockLLM(MockReplies(malformed_rate=1.0, malformed_sticky=True)) as llm:
        for each in prompts(0):
            error = llm.submit(each, tenant="t").exception()
            assert isinstance(error, BadReply)
            assert error.usage.calls == 2
            assert error.usage.prompt_tokens > 0
    assert llm.calls == {"episode": 2, "merge": 2, "refine": 2, "answer": 2}


def test_every_option_of_the_server_says_what_it_does() -> None:
    text = options().format_help()
    assert text.count("\n  --") > 10
    assert all(action.help for action in options()._actions)


def test_latency_cancel_and_close() -> None:
    seen: list[tuple[str, str, str]] = []
    llm = MockLLM(
        latency_s=0.02,
        jitter_s=0.02,
        on_call=lambda t, op, start, end, usage, outcome: seen.append((t, op, outcome)),
    )
    first, second = (llm.submit(p, tenant="t") for p in prompts(0)[:2])
    assert llm.in_flight == 2
    llm.cancel(second)
    assert first.result(5).reply == answer(prompts(0)[0], MockReplies())
    with pytest.raises(CancelledError):
        second.result(5)
    late = llm.submit(prompts(0)[2], tenant="t")
    llm.close()
    assert late.done()
    assert llm.max_in_flight == 2
    assert ("t", "episode", "ok") in seen
    assert all(operation != "merge" for _, operation, _ in seen)
    with pytest.raises(RuntimeError):
        llm.submit(prompts(0)[0], tenant="t")


@pytest.mark.parametrize(
    ("model", "key", "tokens", "status"),
    [
        ("mock-llm", "no", 10, 401),
        ("gpt", "yes", 10, 404),
        ("mock-llm", "yes", 700, 400),
        ("mock-llm", "yes", 10, 200),
    ],
)
def test_the_server_refuses_what_it_must(
    strict_url: str, model: str, key: str, tokens: int, status: int
) -> None:
    body = {"model": model, "messages": prompts(0)[0].messages, "max_tokens": tokens}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(strict_url + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            assert response.status == status
    except urllib.error.HTTPError as error:
        assert error.code == status


@pytest.fixture(scope="module")
def strict_url() -> Iterator[str]:
    with spawn_server(api_key="yes", context_tokens=1_000) as url:
        yield url

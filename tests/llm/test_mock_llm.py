"""The mock LLM: schema-valid, deterministic and echoing; test_client.py holds its server to the same."""

import json
from concurrent.futures import CancelledError
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.mock.server import options
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    answer_prompt,
    episode_prompt,
    merge_prompt,
    refine_prompt,
)
from undertow.prompts.reply_schemas import EpisodesReply, FactsReply, MergeReply, Reply

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


def test_every_option_of_the_server_says_what_it_does() -> None:
    assert options().format_help().count("\n  --") > 10
    assert all(action.help for action in options()._actions)


def test_latency_cancel_and_close() -> None:
    seen: list[tuple[str, str, str]] = []
    llm = MockLLM(
        latency_s=1.0,
        jitter_s=0.02,
        on_call=lambda t, op, start, end, usage, outcome: seen.append((t, op, outcome)),
    )
    first, second = (llm.submit(p, tenant="t") for p in prompts(0)[:2])
    assert llm.in_flight == 2
    llm.cancel(second)
    assert first.result(60).reply == answer(prompts(0)[0], MockReplies())
    with pytest.raises(CancelledError):
        second.result(60)
    late = llm.submit(prompts(0)[2], tenant="t")
    llm.close()
    assert late.done()
    assert llm.max_in_flight == 2
    assert ("t", "episode", "ok") in seen
    assert all(operation != "merge" for _, operation, _ in seen)
    with pytest.raises(RuntimeError):
        llm.submit(prompts(0)[0], tenant="t")

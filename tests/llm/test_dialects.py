"""Servers that refuse a part of OpenAI's API or answer in their own way, and replies that were cut off."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from undertow.engine.base.config import Settings
from undertow.engine.llm.client import BadReply, OpenAILLM, ServerRefused
from undertow.engine.llm.replies import behind_reasoning, read_reply
from undertow.prompts.builders import answer_prompt, size_tokens
from undertow.prompts.reply_schemas import EPISODE_CHARS, MergeReply
from undertow.serving import doctor

from ..support.llm_servers import SOON_S, USED, Act, client, completion, end, merge, odd_server, scripted

CONTENT = '{"same_story": false, "narrative": ""}'
GOOD = MergeReply(same_story=False, narrative="")
FULL = json.dumps({"same_story": True, "narrative": "x" * EPISODE_CHARS})
Refusal = tuple[str, str | None] | None
"""What a server says is wrong with a request, and the parameter that it names."""


@contextmanager
def answering(
    *said: str | dict[str, Any],
    refusal: Callable[[dict[str, Any]], Refusal] = lambda body: None,
    status: int = 400,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL, and the bodies that it is sent. What it says, or replies, last it goes on with."""
    asked: list[dict[str, Any]] = []

    def handle(body: dict[str, Any], number: int) -> tuple[int, Any]:
        asked.append(body)
        if (refused := refusal(body)) is not None:
            return status, {"error": {"message": refused[0], "param": refused[1]}}
        reply = said[min(number, len(said) - 1)]
        return 200, completion(reply) if isinstance(reply, str) else reply

    with odd_server(handle) as url:
        yield url, asked


def outcomes(llm: OpenAILLM, *numbers: int) -> list[Any]:
    """For each prompt the number of its calls, or the type of its error."""
    told: list[Any] = []
    for n in numbers:
        future = llm.submit(merge(n), tenant="t")
        error = future.exception(SOON_S)
        told.append(future.result().usage.calls if error is None else type(error))
    return told


def as_o_series(body: dict[str, Any]) -> Refusal:
    if "max_tokens" in body:
        words = "Unsupported parameter: 'max_tokens' is not supported with this model."
        return f"{words} Use 'max_completion_tokens' instead.", "max_tokens"
    if "temperature" in body:
        return "Unsupported value: 'temperature' does not support 0 with this model.", "temperature"
    return None


def test_a_reasoning_model_of_openai_is_asked_its_own_way() -> None:
    with answering(CONTENT, refusal=as_o_series) as (url, asked), client(url, reply_tokens=99) as llm:
        assert outcomes(llm, 0, 1) == [1, 1]
    assert len(asked) == 4, "learned with the first prompt, and remembered"
    assert {*asked[3]} == {"model", "messages", "response_format", "seed", "max_completion_tokens"}
    assert asked[3]["max_completion_tokens"] == 99


def test_the_doctor_tells_what_a_server_refuses() -> None:
    with answering('{"facts": []}', refusal=as_o_series) as (url, _):
        found = doctor._server(Settings(llm_url=url))
    assert found.ok and found.text == f"{url} serves a; it refuses max_tokens, temperature"
    with answering("Sorry.") as (url, _):
        assert "Invalid JSON" in doctor._server(Settings(llm_url=url)).text


@pytest.mark.parametrize(
    ("words", "param", "status"),
    [
        ("Invalid schema: In context=('properties',), 'maxLength' is not permitted", "response_format", 400),
        ("The provided JSON schema contains features not supported by xgrammar.", None, 400),
        ("minLength: Extra inputs are not permitted", None, 422),
    ],
)
def test_a_server_that_refuses_lengths_gets_the_schema_without(
    words: str, param: str | None, status: int
) -> None:
    def refusal(body: dict[str, Any]) -> Refusal:
        return (words, param) if "maxLength" in json.dumps(body["response_format"]) else None

    with answering(CONTENT, refusal=refusal, status=status) as (url, asked), client(url) as llm:
        assert outcomes(llm, 0, 1) == [1, 1]
    assert len(asked) == 3
    form = asked[2]["response_format"]["json_schema"]
    assert form == {"name": "merge", "schema": MergeReply.unbounded_schema(), "strict": True}
    assert form["schema"]["properties"]["narrative"] == {"type": "string"}


def test_a_server_that_refuses_schemas_gets_none() -> None:
    def refusal(body: dict[str, Any]) -> Refusal:
        return ("This response_format type is unavailable now", None) if "response_format" in body else None

    with answering(CONTENT, refusal=refusal) as (url, asked), client(url) as llm:
        assert outcomes(llm, 0, 1) == [1, 1]
    assert ["response_format" in body for body in asked] == [True, True, False, False]


def test_a_server_that_ignores_the_schema_is_asked_for_the_object_alone() -> None:
    with answering(f"Sure!\n```json\n{CONTENT}\n```", CONTENT) as (url, _), client(url) as llm:
        assert outcomes(llm, 0) == [2]


# ---- servers that refuse everything


def test_a_server_that_rejects_prompt_after_prompt_in_the_same_words_is_not_asked_on() -> None:
    ids = itertools.count(100)

    def refusal(body: dict[str, Any]) -> Refusal:
        good = "number 2" in body["messages"][1]["content"]
        return None if good else (f"The adapter is not loaded (req-{next(ids)})", None)

    with answering(CONTENT, refusal=refusal) as (url, _), client(url) as llm:
        assert outcomes(llm, 0, 0, 0, 1) == [BadReply] * 4, "a prompt asked again shows nothing of others"
        assert outcomes(llm, 2, 3, 4, 5, 6) == [1, BadReply, BadReply, ServerRefused, ServerRefused]
        assert "each prompt gets HTTP 400" in (llm.last_error or "")


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 2000 tokens",
        "'max_tokens' or 'max_completion_tokens' is too large: 99",
        "Your prompt was flagged as potentially violating our usage policy",
    ],
)
def test_complaints_about_a_prompt_stay_that_prompts(words: str) -> None:
    with answering(refusal=lambda body: (words, None)) as (url, asked), client(url) as llm:
        assert outcomes(llm, *range(4)) == [BadReply] * 4
    assert len(asked) == 4


def test_parameters_of_the_users_are_sent_and_checked() -> None:
    extra = '{"chat_template_kwargs": {"enable_thinking": false}, "temperature": 0.5}'
    with answering(CONTENT) as (url, asked), client(url, llm_extra_body=extra) as llm:
        assert outcomes(llm, 0) == [1]
    assert asked[0].items() >= json.loads(extra).items()
    for wrong in ("{", "[]", '{"messages": []}'):
        with pytest.raises(ValueError, match="UNDERTOW_LLM_EXTRA_BODY"):
            Settings(llm_extra_body=wrong)
    words = "Unrecognized request argument supplied: chat_template_kwargs"
    with answering(refusal=lambda body: (words, None)) as (url, _), client(url, llm_extra_body=extra) as llm:
        assert outcomes(llm, 0) == [ServerRefused]
        assert "UNDERTOW_LLM_EXTRA_BODY adds chat_template_kwargs" in (llm.last_error or "")


# ---- reasoning, and replies that were cut off


def test_reasoning_is_no_part_of_a_reply() -> None:
    reasoned = completion(f"\n<think>\nIs it {{the same}}?\n</think>\n\n{CONTENT}")
    reasoned["choices"][0]["message"]["reasoning_content"] = "Is it?"
    with odd_server(lambda body, n: (200, reasoned)) as url, client(url) as llm:
        assert outcomes(llm, 0) == [1]


def streamed(*scripts: list[Act]) -> tuple[Any, str, list[dict[str, Any]]]:
    """The answer, its pieces put together, and the bodies that the server was sent."""
    pieces: list[str] = []
    with scripted(*scripts) as (url, asked), client(url, reply_tokens=99) as llm:
        prompt = answer_prompt("Where does Ann sail?", [], [], [], None)
        answer = llm.stream(prompt, tenant="t", on_text=pieces.append).result(SOON_S).reply
    return answer, "".join(pieces), asked


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("<think>\nLake </thin Como?\n</think>\n\n Como <think>.", "Como <think>."),
        ("<think></think>\n <think>so</think>Como", "Como"),
        ("<thin", "<thin"),
    ],
)
def test_reasoning_is_not_streamed(said: str, reply: str, size: int) -> None:
    acts: list[Act] = [said[at : at + size] for at in range(0, len(said), size)]
    reasoning: Act = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]}
    answer, told, asked = streamed([reasoning, *acts, end(), USED])
    assert (answer, told, len(asked)) == (reply, reply, 1)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_reply_that_ends_in_its_reasoning_was_cut_off(reason: str) -> None:
    answer, told, asked = streamed(["<think>It is Lake", end(reason), USED], ["Como.", end(), USED])
    assert answer == told == "Como."
    assert [body["max_tokens"] for body in asked] == [99, 198]
    assert "be shorter" in asked[1]["messages"][-1]["content"]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("Notes: Lake Como, May\nAnswer: On Lake Como.\nAnswer: twice", "On Lake Como.\nAnswer: twice"),
        ("**Notes:**\n- Como\n\n**Answer:** **Lake** Como ", "**Lake** Como"),
        ("<think>So.</think>\n## Notes\nComo\n## Answer:\n* Lake\n* Como", "* Lake\n* Como"),
        ("answer: Como", "Como"),
        ("Lake Como, as the answer: Como.", "Lake Como, as the answer: Como."),
        ("Notes on a lake.", "Notes on a lake."),
    ],
)
def test_what_stands_before_the_answer_is_not_streamed(said: str, reply: str, size: int) -> None:
    acts: list[Act] = [said[at : at + size] for at in range(0, len(said), size)]
    answer, told, asked = streamed([*acts, end(), USED])
    assert (answer, told, len(asked)) == (reply, reply, 1)
    assert read_reply(answer_prompt("Where?", [], [], [], None), said) == reply
    papers = answer_prompt("Where?", [], [], [], None, style="paper")
    assert read_reply(papers, said) == behind_reasoning(said).strip()


@pytest.mark.parametrize(
    ("said", "reason", "problem"),
    [
        ("Notes: Lake Como", "stop", 'no line begins with "Answer:"'),
        ("**Notes**\nLake Como\nAnswer:", "stop", 'no line begins with "Answer:"'),
        ("Notes: Lake Co", "length", "be shorter"),
        ("Lake Co", "length", "be shorter"),
    ],
)
def test_notes_alone_are_no_answer(said: str, reason: str, problem: str) -> None:
    answer, told, asked = streamed([said, end(reason), USED], ["Answer: Como.", end(), USED])
    assert answer == told == "Como."
    assert problem in asked[1]["messages"][-1]["content"]
    assert "without notes" in asked[1]["messages"][-1]["content"], "a small model may write them without end"


@pytest.mark.parametrize("context_tokens", [8_192, 1_024])
def test_a_reply_that_was_cut_off_may_be_as_long_as_its_schema_allows(context_tokens: int) -> None:
    bounds = {"reply_tokens": 99, "context_tokens": context_tokens}
    with answering(completion(CONTENT, "length"), CONTENT) as (url, asked), client(url, **bounds) as llm:
        assert outcomes(llm, 0) == [2]
    room = context_tokens - size_tokens(asked[1]["messages"])
    most = min(room, 99 + MergeReply.most_tokens())
    assert [body["max_tokens"] for body in asked] == [99, most] and most > 200
    assert [body.get("frequency_penalty") for body in asked] == [None, 0.3], "against endless repetition"


def test_a_server_without_a_penalty_for_repetition_is_asked_without() -> None:
    def refusal(body: dict[str, Any]) -> Refusal:
        return ("frequency_penalty is not supported", None) if "frequency_penalty" in body else None

    cut_off = completion(CONTENT, "length")
    with answering(cut_off, CONTENT, refusal=refusal) as (url, asked), client(url) as llm:
        assert outcomes(llm, 0) == [2]
    assert ["frequency_penalty" in body for body in asked] == [False, True, False]


def test_a_narrative_that_fills_its_bound_is_asked_again_and_never_stored() -> None:
    with answering(FULL, CONTENT) as (url, _), client(url) as llm:
        assert llm.submit(merge(), tenant="t").result(SOON_S).reply == GOOD
    with answering(FULL) as (url, _), client(url) as llm:
        assert "longest allowed" in str(llm.submit(merge(), tenant="t").exception(SOON_S))

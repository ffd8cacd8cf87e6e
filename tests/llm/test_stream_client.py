"""Streamed replies of a server: pieces, retries before the first piece, failures after it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.mock.server import spawn_server
from undertow.engine.base.model import Usage
from undertow.engine.llm.client import BadReply, BrokenOff, Completion, OpenAILLM, ServerRefused
from undertow.prompts.builders import Prompt, ShownMemory, answer_prompt

from ..support.cluster.in_process import settings
from ..support.llm_servers import SOON_S, USED, Act, client, end, scripted, server_stats, wait_until


def question(n: int = 0) -> Prompt:
    memory = ShownMemory(1, "2026-01-05", f"Ann sails on lake number {n}, and the wind was fair")
    return answer_prompt("Where does Ann sail?", [memory], [], [], None, style="paper")


def told_by(llm: OpenAILLM | MockLLM, prompt: Prompt) -> tuple[list[str], Future[Completion]]:
    pieces: list[str] = []
    return pieces, llm.stream(prompt, tenant="t", on_text=pieces.append)


def test_a_streamed_reply_is_the_whole_one_in_pieces() -> None:
    with spawn_server() as url, client(url) as llm:
        for n in range(5):
            pieces, told = told_by(llm, question(n))
            streamed, whole = told.result(SOON_S), llm.submit(question(n), tenant="t").result(SOON_S)
            assert "".join(pieces) == streamed.reply == whole.reply
            assert len(pieces) > 1
            assert streamed.usage == whole.usage
            assert streamed.usage.completion_tokens > 0
            assert streamed.model == whole.model


def test_the_mock_in_process_tells_what_its_server_tells() -> None:
    with spawn_server() as url, client(url) as llm, MockLLM(MockReplies()) as mock:
        served, told = told_by(llm, question())
        replied = told.result(SOON_S)
        made, here = told_by(mock, question())
        assert (made, here.result(SOON_S).reply) == (served, replied.reply)


def test_pieces_come_while_the_reply_is_being_written() -> None:
    written = threading.Event()
    with (
        scripted(["  Ann ", "sails", written, "\non Lake", " Como.", " \n", end(), USED]) as (url, asked),
        client(url) as llm,
    ):
        pieces, told = told_by(llm, question())
        wait_until(lambda: pieces == ["Ann", " sails"])
        assert not told.done()
        written.set()
        assert told.result(SOON_S).reply == "Ann sails\non Lake Como."
        assert pieces == ["Ann", " sails", "\non Lake", " Como."]  # what is around it is not told
        assert told.result().usage == Usage(1, 50, 0, 7)
        assert asked[0]["stream"] is True
        assert asked[0]["stream_options"] == {"include_usage": True}


ERROR = {"error": {"message": "the engine died", "type": "internal", "code": 500}}


WHOLE: Sequence[Act] = ["Como.", end(), USED]


@pytest.mark.parametrize("trouble", [[None], [" "], [ERROR], ["", None], [{"choices": []}, None]], ids=str)
def test_what_fails_before_the_first_piece_is_asked_again(trouble: Sequence[Act]) -> None:
    with scripted(trouble, WHOLE) as (url, asked), client(url) as llm:
        pieces, told = told_by(llm, question())
        assert told.result(SOON_S).reply == "Como."
        assert pieces == ["Como."]
        assert len(asked) == 2


def test_another_server_is_tried_before_the_first_piece_and_none_after() -> None:
    with (
        scripted([None]) as (dead, of_dead),
        scripted(WHOLE) as (alive, of_alive),
        client(f"{dead},{alive}") as llm,
    ):
        for pieces, told in [told_by(llm, question(n)) for n in range(8)]:  # both are asked
            assert (told.result(SOON_S).reply, pieces) == ("Como.", ["Como."])
        assert of_dead
        assert len(of_alive) == 8
    with (
        scripted(["Lake", None]) as (dying, of_dying),
        scripted(["Lake", None]) as (other, of_other),
        client(f"{dying},{other}") as llm,
    ):
        pieces, told = told_by(llm, question())
        with pytest.raises(BrokenOff, match=r"broke off in the middle.*Ask again"):
            told.result(SOON_S)
        assert pieces == ["Lake"]
        assert len(of_dying) + len(of_other) == 1


@pytest.mark.parametrize("trouble", [[None], [], [ERROR]], ids=["died", "ended", "error"])
def test_a_half_reply_is_never_called_whole(trouble: Sequence[Act]) -> None:
    outcomes: list[str] = []
    with scripted(["Ann sails", *trouble]) as (url, asked):
        with OpenAILLM(settings(llm_url=url), on_call=lambda *call: outcomes.append(call[-1])) as llm:
            pieces, told = told_by(llm, question())
            with pytest.raises(BrokenOff):
                told.result(SOON_S)
            assert pieces == ["Ann sails"]
        assert len(asked) == 1
        assert outcomes == ["broken"]


def test_a_reply_that_was_cut_off_at_the_limit_is_a_bad_one_and_not_repaired() -> None:
    with scripted(["Ann sails on", end("length"), USED]) as (url, asked), client(url) as llm:
        _, told = told_by(llm, question())
        with pytest.raises(BadReply, match="cut off at the token limit") as bad:
            told.result(SOON_S)
        assert bad.value.usage == Usage(1, 50, 0, 7)
        assert len(asked) == 1


def test_an_empty_reply_is_repaired_and_the_repair_is_told() -> None:
    with scripted([" ", end(), USED], WHOLE) as (url, asked), client(url) as llm:
        pieces, told = told_by(llm, question())
        assert told.result(SOON_S).reply == "Como."
        assert pieces == ["Como."]
        assert told.result().usage == Usage(2, 100, 0, 14)
        assert "empty" in asked[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("script", "why"),
    [([{"whole": {"choices": []}}], "does not stream"), ([{"choices": 3}], "choices")],
    ids=["whole", "odd"],
)
def test_a_server_that_cannot_stream_is_told_apart(script: Sequence[Act], why: str) -> None:
    with scripted(script) as (url, _), client(url) as llm:
        _, told = told_by(llm, question())
        with pytest.raises(ServerRefused, match=why):
            told.result(SOON_S)


def test_who_gives_up_ends_the_request_at_the_server() -> None:
    with spawn_server(piece_ms=200) as url, client(url, llm_in_flight=1) as llm:
        pieces, told = told_by(llm, question())
        wait_until(lambda: bool(pieces))
        llm.cancel(told)
        with pytest.raises(CancelledError):
            told.result(SOON_S)
        wait_until(lambda: server_stats(url)["faults"] == {"client left": 1})
        assert server_stats(url)["in_flight"] == 0
        wait_until(lambda: llm.in_flight == 0)  # its slot is free

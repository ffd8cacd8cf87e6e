"""What one LLM server can take, its outages, and the addresses of several."""

import time

import pytest

from undertow.engine.base.config import Settings
from undertow.engine.llm.circuit_breaker import CircuitBreaker
from undertow.engine.llm.client import OpenAILLM, ServerRefused
from undertow.engine.llm.discovery import server_addresses


def test_an_outage_ends_by_a_knock_and_one_request_on_trial() -> None:
    slots = CircuitBreaker(limit=4, timeout_s=300.0)
    for _ in range(12):
        assert slots.free == 4 and not slots.is_open
        slots.began()
        slots.failed()
        slots.active -= 1
    assert slots.is_open and slots.free == 0
    slots.probed(answered=False)
    assert slots.free == 0
    slots.probed(answered=True)
    assert slots.free == 1, "one request tries it"
    slots.began()
    assert slots.free == 0
    slots.failed()
    slots.active -= 1
    assert slots.free == 0, "the trial failed: it is knocked at again"
    slots.probed(answered=True)
    slots.answered()
    slots.probed(answered=True)  # a knock that was on its way when the request was answered
    assert (slots.free, slots.is_open, slots.half_open, slots.silent_s) == (4, False, False, None)


def test_pauses_grow_up_to_a_quarter_of_a_minute() -> None:
    slots = CircuitBreaker(limit=1, timeout_s=300.0)
    slots.lost()
    assert slots.is_open
    first_s = slots.pause_s
    for _ in range(20):
        slots.probed(answered=False)
    assert first_s < 0.1 < 7 < slots.pause_s <= 15


def test_a_failure_beside_a_slow_reply_proves_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    slots = CircuitBreaker(limit=2, timeout_s=10.0)
    slots.began()
    slots.began()
    slots.failed()
    now = 105.0
    slots.failed()
    assert slots.silent_s == 0.0, "the other request may be about to be answered"
    now = 111.0
    slots.failed()
    assert slots.silent_s == 11.0, "it has timed out by now"
    slots.refused(ServerRefused("no"))
    assert slots.silent_s is None and slots.is_open, "a refusal is an answer"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("http://a:1/v1", ("http://a:1/v1",)),
        ("http://a:1, https://b/llm/ ,", ("http://a:1/v1", "https://b/llm")),
        ("http://a:1,http://a:1/v1/,http://b:1", ("http://a:1/v1", "http://b:1/v1")),
        ("ray:vllm-0, ray:vllm-1,ray:vllm-0,http://a:1", ("ray:vllm-0", "ray:vllm-1", "http://a:1/v1")),
    ],
)
def test_addresses_by_commas_each_once(text: str, addresses: tuple[str, ...]) -> None:
    assert server_addresses(text) == addresses


@pytest.mark.parametrize(
    "text",
    ["http://a:1,b:2", "http://a:1 http://b:2 ,ftp://c", ",", " , ", "ray:", "ray://head:10001", "ray:a b"],
)
def test_one_bad_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"llm_url.*ray:vllm-0"):
        OpenAILLM(Settings(llm_url=text))


@pytest.mark.parametrize(("text", "count"), [(None, 1), ("http://a:1", 1), ("http://a:1, http://b:2,", 2)])
def test_the_engine_keeps_work_ready_for_every_server(text: str | None, count: int) -> None:
    assert Settings(llm_url=text, llm_in_flight=7).llm_requests == 7 * count

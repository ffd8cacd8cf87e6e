"""An embedding endpoint as the encoder: batches, retries, replies that are refused, and an outage."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders import endpoint, outage
from undertow.engine.encoders.endpoint import EndpointEncoder, in_parts, in_requests
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.serving.vllm.local_server import free_port

from ...support.engine import NEVER, turns_of
from ...support.llm_servers import odd_server, wait_until
from ...support.service.scripted_server import Reply

HASHED = HashingEncoder(32)


def vectors_of(texts: Sequence[str], model: str = "m") -> dict[str, Any]:
    """What an endpoint replies, in another order than it was asked, and not normalised."""
    vectors = 3.0 * HASHED.encode(texts).astype(float)
    data = [{"index": i, "embedding": vector.tolist()} for i, vector in enumerate(vectors)]
    return {"object": "list", "model": model, "data": data[::-1]}


class Endpoint:
    """Keeps the requests; gives each of `first` once, before it replies as it should."""

    def __init__(self, *first: tuple[int, Any] | Reply | Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.asked: list[list[str]] = []
        self.first = list(first)

    def __call__(self, body: dict[str, Any], _: int) -> tuple[int, Any] | Reply:
        self.asked.append(body["input"])
        assert body["model"] == "m"
        odd = self.first.pop(0) if self.first else (lambda good: good)
        return (200, odd(vectors_of(body["input"]))) if callable(odd) else odd


def settings(url: str, **given: Any) -> Settings:
    return Settings(device="cpu", encoder="openai:m", embedding_url=url, **{**NEVER, **given})


def test_texts_go_in_batches_and_vectors_come_back_in_order() -> None:
    texts = [f"word{n} and more" for n in range(7)]
    with odd_server(good := Endpoint()) as url:
        encoder = make_encoder(settings(url, embedding_batch_texts=3))
        assert np.array_equal(encoder.encode(texts), HASHED.encode(texts))
        assert sorted(map(len, good.asked)) == [1, 3, 3]
        assert encoder.encode([]).shape == (0, 32)
        assert encoder.encode(["", "a \ud800"]).shape == (2, 32)
        assert good.asked[-1] == [" ", "a \ufffd"]
    assert (encoder.fingerprint.model, encoder.fingerprint.dim) == ("openai:m", 32)


def test_prompts_are_sent_and_that_of_documents_is_in_the_fingerprint() -> None:
    with odd_server(Endpoint()) as one, odd_server(asked := Endpoint()) as other:
        here = EndpointEncoder(settings(one)).fingerprint
        prompted = EndpointEncoder(settings(other, query_prompt="query: "))
        assert prompted.fingerprint == here, "at any URL"
        assert np.array_equal(prompted.encode_queries(["a"]), prompted.encode(["query: a"]))
        both = EndpointEncoder(settings(other, document_prompt="passage: "))
        both.encode(["a"])
        assert here.mismatch(both.fingerprint)
    assert asked.asked[1:] == [["query: a"], ["query: a"], ["passage: a"]]


def test_long_texts_and_requests_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("one two three four", "né" * 30, " " * 40, "🙂" * 9):
        parts = list(in_parts(text, 10))
        assert "".join(parts) == text and max(len(part.encode()) for part in parts) <= 10
    assert list(in_parts("one two three", 10)) == ["one two ", "three"]
    with odd_server(Endpoint()) as url:
        (vector,) = EndpointEncoder(settings(url, embedding_window_bytes=64)).encode(["one " * 16 + "two"])
    mean = HASHED.encode(["one " * 16, "two"]).astype(float).sum(axis=0)
    assert np.allclose(vector, mean / np.linalg.norm(mean), atol=2e-3)
    monkeypatch.setattr(endpoint, "REQUEST_BYTES", 10)
    assert list(in_requests(["a" * 6, "b" * 4, "c", "d" * 20, "e"], 8)) == [
        ["a" * 6, "b" * 4], ["c"], ["d" * 20], ["e"]
    ]  # fmt: skip


def test_a_request_is_repeated_where_that_helps() -> None:
    flaws: list[Any] = [(429, {}), (500, {}), Reply(cut=-1), (503, "busy")]
    with odd_server(good := Endpoint(*flaws)) as url:
        assert np.array_equal(EndpointEncoder(settings(url)).encode(["a", "b"]), HASHED.encode(["a", "b"]))
    assert good.asked == [["a", "b"]] * 5


def with_first(good: dict[str, Any], vector: list[float]) -> dict[str, Any]:
    return {**good, "data": [{"index": 1, "embedding": vector}, good["data"][1]]}


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        (lambda good: {**good, "data": good["data"][1:]}, "to 2 texts"),
        (lambda good: {**good, "data": [good["data"][0]] * 2}, r"vectors \[1, 1\]"),
        (lambda good: {**good, "model": "n"}, "with the model n"),
        (lambda good: {"data": "none"}, "OpenAI's API"),
        (lambda good: with_first(good, [1.0] * 31), r"\[31, 32\] dimensions"),
        (lambda good: with_first(good, [math.nan] * 32), "not finite"),
        (lambda good: with_first(good, [0.0] * 32), "zero"),
        ((401, {"error": {"message": "no such key"}}), "401.*no such key"),
        ((200, "<html>"), "OpenAI's API"),
    ],
)
def test_a_reply_that_cannot_be_used_is_refused(
    flaw: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "backoff_s", lambda _: 60.0)
    with odd_server(bad := Endpoint(lambda good: good, flaw)) as url:
        encoder = EndpointEncoder(settings(url))
        assert encoder.dim == 32
        with pytest.raises(EncoderDown, match=rf"{url}.*{said}.*UNDERTOW_EMBEDDING_URL") as refused:
            encoder.encode(["a", "b"])
        assert refused.value.silent_s == math.inf and len(bad.asked) == 2, "to repeat it would not help"
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
        with pytest.raises(EncoderDown, match=said):
            encoder.encode(["a", "b"])
        assert len(bad.asked) == 2, "it is not asked again at once"
        encoder._outage._due_s = 0.0
        assert _works(encoder)


def _works(encoder: EndpointEncoder) -> bool:
    try:
        return np.array_equal(encoder.encode(["a"]), HASHED.encode(["a"]))
    except EncoderDown:
        return False


@pytest.mark.parametrize(
    ("name", "url"), [("openai:", "http://127.0.0.1/v1"), ("openai:m", None), ("openai:m", "x")]
)
def test_settings_name_a_model_and_a_url(name: str, url: str | None) -> None:
    with pytest.raises(ValueError, match="name a model"):
        make_encoder(Settings(encoder=name, embedding_url=url))


def test_an_engine_outlives_an_outage_and_stores_each_vector_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_RETRIED_S", 0.2)
    port, turns = free_port(), turns_of("ann", 4)
    given = settings(f"http://127.0.0.1:{port}", llm_patience_s=0.2)
    with odd_server(good := Endpoint(), port=port):
        engine = Engine(tmp_path, given, make_encoder(given))
        engine.add_batch(turns[:2])
        found = engine.search("ann", "word1")
    with pytest.raises(EncoderDown, match=rf"127.0.0.1:{port}/v1.*doctor"):
        engine.search("ann", "another question")
    assert engine.search("ann", "word1") == found, "its vector is known"
    assert engine.embeds_in_s == math.inf, "no event loop waits for an endpoint"
    assert [receipt.duplicate for receipt in engine.add_batch(turns[2:])] == [False, False]
    with odd_server(good, port=port):
        wait_until(lambda: _works(engine._texts._encoder))  # type: ignore[arg-type]
        assert [receipt.duplicate for receipt in engine.add_batch(turns)] == [True] * 4
        engine.close()
        good.asked.clear()
        with Engine(tmp_path, given, make_encoder(given)) as engine:
            assert len(engine.search("ann", "word1").turns) == 4
    assert good.asked == [["hello"], ["word1"]]

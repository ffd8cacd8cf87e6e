"""An OpenAI-compatible embedding endpoint as an encoder: batched, retried, and every reply checked.

An endpoint does not promise that a text gets the same bits in other company. A stored vector is kept: nothing
that is read from a journal is embedded again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from undertow.engine.base.config import Settings
from undertow.engine.encoders.base import TEXT_FORMAT, Fingerprint, Float16, speakable, unit, with_prompt
from undertow.engine.encoders.outage import Outage
from undertow.engine.llm.circuit_breaker import backoff_s
from undertow.engine.llm.discovery import http_url
from undertow.engine.llm.replies import ServerRefused, Trouble, in_words
from undertow.engine.llm.server import JSON, passing_trouble, status_text

if TYPE_CHECKING:  # imported at the first request, as for LLM servers
    import openai

Float64 = NDArray[np.float64]

PREFIX = "openai:"
CURE = (
    "Check UNDERTOW_ENCODER, UNDERTOW_EMBEDDING_URL and UNDERTOW_EMBEDDING_API_KEY "
    "(`undertow doctor` tests them)"
)
IN_FLIGHT = 8
REQUEST_BYTES = 1 << 18  # OpenAI takes 300,000 tokens a request, and a token has at least a byte
# A caller waits so long for further attempts. Turns wait longer, in the queue, where searches pass them.
_RETRIED_S = 2.0
_TIMEOUT_S, _CONNECT_TIMEOUT_S = 30.0, 5.0


class _Row(BaseModel):
    index: int
    embedding: list[float]


class _Reply(BaseModel):
    data: list[_Row]
    model: str | None = None


class EndpointEncoder:
    """Vectors from `POST /embeddings`, normalised. Thread-safe. Does not connect before it is asked.

    A text longer than the setting `embedding_window_bytes` is embedded in parts, whose vectors are averaged.
    """

    asks_a_server = True  # so that no event loop waits for it, see EmbeddingCache.text_s

    def __init__(self, settings: Settings) -> None:
        """`settings.encoder` is `openai:MODEL`. ValueError: it names no model, or there is no URL."""
        self._name, self._model = settings.encoder, settings.encoder.removeprefix(PREFIX)
        url = http_url(settings.embedding_url or "")
        if not self._model or url is None:
            raise ValueError(
                f"the encoder is {self._name!r} and embedding_url {settings.embedding_url!r}; name a model, "
                "as in openai:text-embedding-3-small, and its endpoint's URL, such as http://127.0.0.1:8000/v1"
            )
        self._url, self._settings = url, settings
        self._dim: int | None = None
        self._outage = Outage(url)
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "embedding-requests")

    @property
    def dim(self) -> int:
        """Learned from the first reply. EncoderDown."""
        if self._dim is None:
            return int(self._embed(["hello"]).shape[1])
        return self._dim

    @property
    def fingerprint(self) -> Fingerprint:
        """Of model, dimension, prompt and window; the same at any URL. EncoderDown."""
        of = self._settings
        parts = (TEXT_FORMAT, of.embedding_window_bytes, of.document_prompt or "", self._model, self.dim)
        digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).hexdigest()
        return Fingerprint(self._name, digest, self.dim, "float64", "endpoint")

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised, row i of text i; [0, dim] for no texts.

        EncoderDown: the endpoint does not answer, refuses, or its reply cannot be used.
        """
        return self._encode(with_prompt(self._settings.document_prompt, texts))

    def encode_queries(self, texts: Sequence[str]) -> Float16:
        """As `encode`, with the prompt for queries."""
        return self._encode(with_prompt(self._settings.query_prompt, texts))

    def _encode(self, texts: Sequence[str]) -> Float16:
        if not texts:
            return np.zeros((0, self.dim), np.float16)
        parts = [list(in_parts(speakable(text), self._settings.embedding_window_bytes)) for text in texts]
        requests = list(in_requests(chain.from_iterable(parts), self._settings.embedding_batch_texts))
        vectors = np.concatenate(list(self._pool.map(self._embed, requests)))
        first = np.cumsum([0, *map(len, parts[:-1])])
        return unit(np.add.reduceat(vectors, first, axis=0)).astype(np.float16)

    def _embed(self, texts: Sequence[str]) -> Float64:
        """One request, repeated while it may help: float64 [n, dim], unit vectors. EncoderDown."""
        until_s = time.monotonic() + (0.0 if self._outage.check() else _RETRIED_S)
        for attempt in itertools.count():
            try:
                vectors = self._vectors(self._post(texts), len(texts))
            except Trouble as trouble:
                wait_s = max(backoff_s(attempt), trouble.retry_after_s)
                if time.monotonic() + wait_s > until_s:
                    raise self._outage.noted(f"{trouble}. {CURE}", trouble.retry_after_s) from trouble
                time.sleep(wait_s)
            except ServerRefused as refusal:
                raise self._outage.noted(str(refusal), waiting_helps=False) from refusal
            else:
                self._outage.end()
                return vectors
        raise AssertionError("a count without end ended")

    @cached_property
    def _client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(
            base_url=self._url,
            api_key=self._settings.embedding_api_key,
            max_retries=0,
            timeout=openai.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
        )

    def _post(self, texts: Sequence[str]) -> str:
        """The body of the reply. Trouble; ServerRefused."""
        import openai

        body = orjson.dumps({"model": self._model, "input": texts, "encoding_format": "float"})
        try:
            return self._client.post("/embeddings", content=body, options=JSON, cast_to=str)
        except openai.APIStatusError as error:
            if (trouble := passing_trouble(self._url, error)) is not None:
                raise trouble from error
            raise self._refused(status_text(error)) from error
        except openai.APIConnectionError as error:
            raise Trouble(f"{self._url}: {error.message} ({error.__cause__!r})") from error

    def _vectors(self, body: str, count: int) -> Float64:
        """The vectors of a reply in the order of the texts: float64 [count, dim], unit. ServerRefused."""
        try:
            reply = _Reply.model_validate_json(body)
        except ValidationError as invalid:
            raise self._refused(f"it does not answer as OpenAI's API does ({in_words(invalid)})") from invalid
        if reply.model not in (None, self._model):
            raise self._refused(f"it answers with the model {reply.model}")
        rows = sorted(reply.data, key=lambda row: row.index)
        if [row.index for row in rows] != list(range(count)):
            raise self._refused(f"its reply to {count} texts has the vectors {[row.index for row in rows]}")
        sizes, dim = {len(row.embedding) for row in rows}, self._dim or len(rows[0].embedding)
        if sizes != {dim}:
            raise self._refused(f"it gives vectors of {sorted(sizes)} dimensions, where others have {dim}")
        with np.errstate(all="ignore"):
            vectors = unit(np.array([row.embedding for row in rows]))
        if not (np.isfinite(vectors).all() and vectors.any(axis=1).all()):
            raise self._refused("it gives vectors that are zero or not finite")
        self._dim = dim
        return vectors

    def _refused(self, why: str) -> ServerRefused:
        return ServerRefused(f"{self._url} cannot be used for {self._name}: {why}. {CURE}"[:1_000])


def in_parts(text: str, most_bytes: int) -> Iterator[str]:
    """The text in parts of at most so many bytes, cut after a space if possible; a space for no text."""
    data = text.encode() or b" "  # endpoints refuse empty texts
    start = 0
    while start < len(data):
        end = start + most_bytes
        if end < len(data):
            while data[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            end = data.rfind(b" ", start + 1, end) + 1 or end
        yield data[start:end].decode()
        start = end


def in_requests(texts: Iterable[str], most_texts: int) -> Iterator[list[str]]:
    """The texts in groups of at most `REQUEST_BYTES`, each for one request."""
    group: list[str] = []
    size = 0
    for text in texts:
        size += len(text.encode())
        if group and (len(group) == most_texts or size > REQUEST_BYTES):
            yield group
            group, size = [], len(text.encode())
        group.append(text)
    if group:
        yield group

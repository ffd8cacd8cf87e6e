"""What an engine gets for an estimate in place of an encoder and an LLM server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Turn, Usage, as_embedded, lines_of
from undertow.engine.encoders.base import Fingerprint, Float16, unit
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.guessed_replies import GuessedReplies
from undertow.engine.llm.client import Completion, OnCall, OnText
from undertow.prompts.builders import Prompt

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class TenantLog:
    """One tenant's turns in order, as `dated`, and their vectors: float32 [n, dim], normalised."""

    turns: Sequence[Turn]
    vectors: Vectors


class StandInEncoder:
    """An Encoder that looks turns up, and assumes the vectors of what an LLM writes.

    A written text has the cosine `likeness` with the mean of the turns that it rests on; the rest of its
    vector is random. A message counts as its turn, and a text that was not written itself as its lines.
    """

    def __init__(self, logs: Iterable[TenantLog], likeness: float, *, embed_timestamp: bool) -> None:
        self._turns: dict[str, Float16] = {}
        self._sums: dict[str, Vectors] = {}
        self._likeness = likeness
        self.dim = 16
        for log in logs:
            self.dim = log.vectors.shape[1]
            for turn, vector in zip(log.turns, log.vectors, strict=True):
                embedded = as_embedded(turn.text, turn.timestamp, embed_timestamp)
                self._turns[embedded] = vector.astype(np.float16)
                self._sums |= dict.fromkeys((*lines_of(turn.messages), turn.text), vector)
        self.fingerprint = Fingerprint("estimate", "estimate", self.dim, "float16", "cpu")

    def encode(self, texts: Sequence[str]) -> Float16:
        found = np.empty((len(texts), self.dim), np.float16)
        for row, text in zip(found, texts, strict=True):
            known = self._turns.get(text)
            row[:] = self._written(text) if known is None else known
        return found

    def _written(self, text: str) -> Any:
        mean = unit(self._sum([text])[None].astype(np.float64))
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        noise = np.random.default_rng(seed).standard_normal((1, self.dim))
        noise = unit(noise - (noise @ mean.T) * mean)
        return unit(self._likeness * mean + math.sqrt(1 - self._likeness**2) * noise)[0]

    def add(self, text: str, parts: Sequence[str]) -> None:
        """Remember a text that is made of `parts`."""
        self._sums[text] = self._sum(parts)

    def _sum(self, texts: Sequence[str]) -> Vectors:
        total = np.zeros(self.dim, np.float32)
        for text in texts:
            whole = self._sums.get(text)
            for part in [whole] if whole is not None else map(self._sums.get, text.split("\n")):
                if part is not None:
                    total += part
        return total


class GuessingLLM:
    """An LLMClient that gives each prompt its guessed reply at once, and counts the tokens.

    `warm`: as of a prefix cache that holds every system message.
    """

    on_call: OnCall | None = None
    in_flight = 0
    unreachable_s: float | None = None
    last_error: str | None = None

    def __init__(self, replies: GuessedReplies, tokens: TokenCount, *, warm: bool = False) -> None:
        self._replies = replies
        self._tokens = tokens
        self._warm = warm

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        reply = self._replies.to(prompt)
        completion_tokens = self._tokens.of_text(reply.model_dump_json())
        cached_tokens = self._tokens.of_text(prompt.system) if self._warm else 0
        usage = Usage(1, self._tokens.of_prompt(prompt), cached_tokens, completion_tokens)
        done: Future[Completion] = Future()
        done.set_result(Completion(reply, usage, "guess", 0.0))
        return done

    def stream(self, prompt: Prompt, *, tenant: str, on_text: OnText) -> Future[Completion]:
        raise NotImplementedError("an estimate answers no questions")

    def cancel(self, future: Future[Completion]) -> None:
        pass

    def close(self) -> None:
        pass

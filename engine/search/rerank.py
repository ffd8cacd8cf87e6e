"""Reranks what a search found with a cross-encoder, on a thread of its own (UNDERTOW_RERANK).

A cross-encoder reads a turn alone; the search knows its neighbours too. So the model's order does not replace
that of the search: both are joined (docs/quality.md, "Reranking").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.encoders.model_files import model_folder, working_dtype

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings

log = logging.getLogger(__name__)

CROSS_ENCODER = "cross-encoder:"
# Cormack et al. 2009, whose ranks begin with 1; 5 to 60 make no difference
RANK_CONSTANT = 10


class Reranker:
    """Scores texts against a question with a cross-encoder. Loads the model at the first call.

    One thread serves all tenants, a call at a time, so that a long call delays other reranks, which have a
    time limit, and nothing else.
    """

    def __init__(self, model: str) -> None:
        """`model`: a sentence-transformers cross-encoder's name or folder. EncoderError: it is not here."""
        self._folder = model_folder(model)
        self._model: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rerank")

    def submit(self, question: str, texts: Sequence[str]) -> Future[list[float]]:
        """The score of each text, higher is better. The future has any error of the model's."""
        return self._thread.submit(self._scores, question, texts)

    def _scores(self, question: str, texts: Sequence[str]) -> list[float]:
        if self._model is None:
            from sentence_transformers import CrossEncoder

            self._model = CrossEncoder(
                str(self._folder),
                device="cpu",
                local_files_only=True,
                model_kwargs={"dtype": working_dtype("auto", "cpu")},
            )
        scores = self._model.predict([(question, text) for text in texts], show_progress_bar=False)
        if scores.shape != (len(texts),) or not np.isfinite(scores).all():
            raise UndertowError(
                f"{self._folder} gives no score for each pair. Name a cross-encoder of one output."
            )
        found: list[float] = scores.tolist()
        return found

    def close(self) -> None:
        """Drop what waits. A call that runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_reranker(settings: Settings) -> Reranker | None:
    """The reranker that `settings.rerank` names; None: off."""
    if settings.rerank == "off":
        return None
    return Reranker(settings.rerank.removeprefix(CROSS_ENCODER))


@dataclass(slots=True)
class Rerank:
    """The rerank of one question's hits, best first: under way until `due_s` (time.monotonic).

    `order`: their ids by the reciprocal ranks in both orders, once it has come in time; empty: the order of
    the search stays.
    """

    hits: Sequence[Hit]
    scores: Future[list[float]]
    due_s: float
    order: tuple[str, ...] = field(default=())

    def wait(self) -> Self:
        """Ended, however long it takes. Raises the model's error."""
        self.scores.result()
        self.settle()
        return self

    @property
    def waits(self) -> bool:
        """Whether it is under way and in time."""
        return not self.scores.done() and time.monotonic() < self.due_s

    def settle(self) -> str | None:
        """How it ended: "rerank", "rerank_late" or "rerank_failed"; None: it is under way."""
        if self.waits:
            return None
        if not self.scores.done():
            self.scores.cancel()
            log.warning("a rerank is late: the order of the search stays")
            return "rerank_late"
        if (error := self.scores.exception()) is not None:
            log.warning("a rerank failed, the order of the search stays: %r", error)
            return "rerank_failed"
        scores = self.scores.result()
        by_model = sorted(range(len(scores)), key=lambda place: -scores[place])
        joined = {
            place: 1 / (RANK_CONSTANT + place + 1) + 1 / (RANK_CONSTANT + rank + 1)
            for rank, place in enumerate(by_model)
        }
        self.order = tuple(self.hits[place].id for place in sorted(joined, key=lambda at: (-joined[at], at)))
        return "rerank"


def reordered(found: SearchResult, order: Sequence[str]) -> SearchResult:
    """The hits of these ids in this order; the others stay where they are.

    They exchange their scores, so that the best has the highest: what packs and sorts goes by scores.
    """
    known = {hit.id: hit for hit in found.ranked()}
    ranked = [known[one] for one in order if one in known]
    scores = sorted((hit.score for hit in ranked), reverse=True)
    score_of = {hit.id: score for hit, score in zip(ranked, scores, strict=True)}

    def tier(hits: tuple[Hit, ...]) -> tuple[Hit, ...]:
        moved = (replace(hit, score=score_of.get(hit.id, hit.score)) for hit in hits)
        return tuple(sorted(moved, key=lambda hit: -hit.score))

    return replace(found, episodes=tier(found.episodes), facts=tier(found.facts), turns=tier(found.turns))

"""Reranking: a cross-encoder's order where it comes in time, the order of the search where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from undertow.bench.mock.llm import MockReplies
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.evidence.recall import retrieve
from undertow.bench.quality.systems.base import Means
from undertow.bench.quality.systems.registry import SYSTEMS
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import AnswerQuery
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.base.trace import Phase, Trace
from undertow.engine.encoders.model_files import EncoderError, working_dtype
from undertow.engine.search.rerank import Reranker, reordered

from ...support.engine import ENCODER, NEVER, RecordingLLM, settings_of, turns_of
from ...support.llm_servers import wait_until
from ...support.policies.driver import lines_under

QUESTION = "word3 and other5, or word8?"
ON = {"rerank": "cross-encoder:here", "rerank_ms": 60_000, "answer_tokens": 400, "k_sub": 20}
Score = Callable[[str], float]


class Phases:
    """An observer that notes how reranks ended."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ended(self, phase: Phase) -> None:
        if phase.name.startswith("rerank"):
            self.seen.append(phase.name)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class FakeReranker(Reranker):
    """Scores by a function, or holds the calls."""

    def __init__(self, score: Score | None = None) -> None:
        self.score = score
        self.calls: list[Future[list[float]]] = []

    def submit(self, question: str, texts: Sequence[str]) -> Future[list[float]]:
        future: Future[list[float]] = Future()
        self.calls.append(future)
        if self.score is not None:
            future.set_result([self.score(text) for text in texts])
        return future

    def close(self) -> None:
        pass


def number(text: str) -> float:
    """The n of `word{n} other{n}`, as `turns_of` writes it."""
    return float(text.split("word")[1].split()[0])


def opened(
    store: Path, llm: RecordingLLM, phases: Phases, fake: Reranker | None, **options: object
) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        if fake is not None:
            patch.setattr("undertow.engine.api.engine.make_reranker", lambda _: fake)
        settings = settings_of(**{**NEVER, **ON, **options})
        engine = Engine(store, settings, ENCODER, llm=llm, trace=Trace(observers=[phases]))
    engine.resume()
    for tenant in ("ann", "bob"):
        engine.add_batch(turns_of(tenant, 60))
    return engine


def joined(found: Sequence[Hit], scores: Sequence[float]) -> list[Hit]:
    """Hits by the sum of their reciprocal ranks in the search's order and in that of the scores."""
    by_score = sorted(found, key=lambda hit: -scores[found.index(hit)])
    sums = [1 / (10 + place) + 1 / (10 + by_score.index(hit)) for place, hit in enumerate(found)]
    return [hit for _, hit in sorted(zip(sums, found, strict=True), key=lambda one: -one[0])]


def shown(llm: RecordingLLM, tenant: str = "ann") -> list[str]:
    return lines_under(llm.prompts[tenant][-1], "Turns")


def test_the_answer_is_given_what_is_best_in_both_orders(tmp_path: Path) -> None:
    llm, phases = RecordingLLM(MockReplies()), Phases()
    with opened(tmp_path, llm, phases, FakeReranker(number), rerank_candidates=10) as engine:
        found = engine.search("ann", QUESTION, k_sub=10, k_epi=0, k_sem=0).turns
        engine.answer("ann", QUESTION)
    best = [number(hit.memory) for hit in joined(found, [number(hit.memory) for hit in found])]
    assert [number(line) for line in shown(llm)][:3] == best[:3] != [number(h.memory) for h in found][:3]
    assert phases.seen == ["rerank"]


@pytest.mark.parametrize("ends", ["rerank_late", "rerank_failed"])
def test_late_or_broken_the_order_of_the_search_stays_and_the_trace_says_so(
    tmp_path: Path, ends: str
) -> None:
    usual, llm, phases, held = (
        RecordingLLM(MockReplies()),
        RecordingLLM(MockReplies()),
        Phases(),
        FakeReranker(),
    )
    with opened(tmp_path / "off", usual, Phases(), None, rerank="off") as engine:
        engine.answer("ann", QUESTION)
    limit_ms = 1 if ends == "rerank_late" else 60_000
    with opened(tmp_path / "on", llm, phases, held, rerank_ms=limit_ms) as engine:
        asked = engine.ask(AnswerQuery("ann", QUESTION))
        if ends == "rerank_failed":
            held.calls[0].set_exception(RuntimeError("no such weights"))
        wait_until(lambda: engine.heard(asked) is not None)
        assert held.calls[0].done(), "cancelled, or failed"
    assert shown(llm) == shown(usual)
    assert phases.seen == [ends]


def test_nobody_waits_for_anothers_rerank(tmp_path: Path) -> None:
    llm, phases, held = RecordingLLM(MockReplies()), Phases(), FakeReranker()
    with opened(tmp_path, llm, phases, held) as engine:
        asked = engine.ask(AnswerQuery("ann", QUESTION))
        assert engine.heard(asked) is None and not llm.prompts["ann"]
        assert engine.search("bob", QUESTION).turns
        held.score = number
        assert engine.answer("bob", QUESTION).text
        held.calls[0].set_result([0.0] * 20)
        wait_until(lambda: engine.heard(asked) is not None)
        gone = engine.ask(AnswerQuery("ann", "word4?"))
        held.score = None
        given_up = engine.ask(AnswerQuery("ann", "word5?"))
        engine.let_go(given_up)
        assert held.calls[-1].cancelled()
        engine.erase("ann")
        with pytest.raises(UndertowError):
            engine.heard(gone)


def test_a_deleted_turn_is_not_shown_though_it_was_reranked(tmp_path: Path) -> None:
    llm, held = RecordingLLM(MockReplies()), FakeReranker()
    with opened(tmp_path, llm, Phases(), held) as engine:
        best = engine.search("ann", QUESTION, k_sub=1, k_epi=0, k_sem=0).turns[0]
        asked = engine.ask(AnswerQuery("ann", QUESTION))
        engine.delete(best.id)
        held.calls[0].set_result([float(-n) for n in range(20)])
        wait_until(lambda: engine.heard(asked) is not None)
    assert best.memory not in "\n".join(shown(llm)) and shown(llm)


def test_hits_exchange_their_scores_and_the_others_stay() -> None:
    scores = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.1}
    hits = [Hit(name, "turn", name, score, None, (0,)) for name, score in scores.items()]
    fact = Hit("f", "fact", "f", 0.6, None, (9,))
    found = reordered(SearchResult((), (fact,), tuple(hits)), ["c", "f", "gone", "a", "b"])
    assert [(hit.id, hit.score) for hit in found.ranked()] == [
        ("c", 0.9),
        ("f", 0.7),
        ("a", 0.6),
        ("b", 0.5),
        ("d", 0.1),
    ]
    assert found.facts[0].id == "f" and len(found.turns) == 4
    assert reordered(found, []) == found


def test_what_is_measured_within_a_budget_is_what_an_answer_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = Question("q", QUESTION, "single-hop", ("3",), "", None)
    turns = tuple(turns_of("ann", 60))
    sample = Sample("ann", turns, tuple((str(n),) for n in range(60)), (question,))
    monkeypatch.setattr("undertow.engine.api.engine.make_reranker", lambda _: FakeReranker(number))
    llm = RecordingLLM(MockReplies())
    with opened(tmp_path / "answers", llm, Phases(), None) as engine:
        engine.answer("ann", QUESTION)
    means = Means("locomo", settings_of(**NEVER, **ON), tmp_path / "eval", lambda: KeptVectors(ENCODER))
    with closing(SYSTEMS["turns-only"](means)) as system:
        system.build([sample], lambda *_: None)
        measured = system.material(sample, question).turns
    assert [number(turn.text) for turn in measured] == [number(line) for line in shown(llm)]


def test_only_a_cross_encoder_that_is_here_can_be_set(tmp_path: Path) -> None:
    for text in ("on", "cross-encoder:", "llm"):
        with pytest.raises(ValidationError):
            Settings(rerank=text)
    with pytest.raises(EncoderError):
        Engine(tmp_path, settings_of(rerank=f"cross-encoder:{tmp_path / 'nowhere'}"), ENCODER)


def cross_encoder_in(folder: Path, words: Sequence[str]) -> str:
    """A cross-encoder of one small layer with random weights, and a tokenizer of these words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    hub: Any = transformers  # its classes take more than their types say

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: n for n, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    hub.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = hub.BertConfig(vocab_size=len(vocabulary), num_labels=1, initializer_range=1.0, **sizes)
    hub.BertForSequenceClassification(config).save_pretrained(folder)
    return f"cross-encoder:{folder}"


def test_a_real_cross_encoder_ranks_answers_and_the_evidence_that_is_measured(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    words = [f"{kind}{n}" for kind in ("word", "other") for n in range(60)]
    rerank = cross_encoder_in(tmp_path / "model", words)
    llm, phases = RecordingLLM(MockReplies()), Phases()
    with opened(tmp_path / "store", llm, phases, None, rerank=rerank, rerank_candidates=12) as engine:
        found = engine.search("ann", QUESTION, k_sub=12, k_epi=0, k_sem=0).turns
        engine.answer("ann", QUESTION)
        turns = tuple(turns_of("eve", 60))
        question = Question("q", QUESTION, "single-hop", ("3",), "", None)
        sample = Sample("eve", turns, tuple((str(n),) for n in range(60)), (question,))
        (measured,) = retrieve(engine, KeptVectors(ENCODER), [sample])
    dtype = {"dtype": working_dtype("auto", "cpu")}
    model = CrossEncoder(str(tmp_path / "model"), device="cpu", model_kwargs=dtype)
    scores = model.predict([(QUESTION, hit.memory) for hit in found]).tolist()
    expected = [hit.memory for hit in joined(found, scores)]
    assert [number(line) for line in shown(llm)][:5] == [number(text) for text in expected][:5]
    assert expected[:5] == [hit.memory for hit in measured.hits][:5] != [hit.memory for hit in found][:5]
    assert phases.seen == ["rerank"]

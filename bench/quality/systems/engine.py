"""Undertow's own engine as one of the systems that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from undertow.bench.quality.ablations import varied
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.systems.base import Material, Means, OnProgress, Steps, System, each_once, shown
from undertow.bench.quality.systems.baselines import chunked
from undertow.bench.quality.systems.telling import Telling
from undertow.engine.api.engine import WAIT_FOR_REPLY_S, Engine, make_llm
from undertow.engine.api.ingest_files import obstacles
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.model import AnswerStyle, Message, Turn, UndertowError, Usage
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.base.timestamps import in_words
from undertow.engine.llm.client import BadReply, ServerRefused
from undertow.engine.policies.base import PromptBudget
from undertow.engine.search.answer_modes import Question as Asked
from undertow.engine.search.answer_modes import answering
from undertow.prompts.builders import ShownMemory
from undertow.prompts.operations import QUERY_OPERATIONS

# Small enough that some chunks fit into 600 tokens.
HYBRID_CHUNK_TOKENS = 256


class EngineSystem(System):
    """An engine with a store in the run's folder, so that a run that was stopped goes on where it was.

    Turns are taken in as `undertow ingest` does; batched decisions are those of streamed ones.
    """

    def __init__(self, name: str, means: Means) -> None:
        self.name = name
        self._encoder = means.encoder()
        llm = means.llm or make_llm(means.settings)
        self._settings = means.settings
        self._engine = Engine(means.folder, means.settings, self._encoder, llm=llm)
        self._holds: dict[str, dict[int, tuple[str, ...]]] = {}
        self._telling: dict[str, Telling] = {}

    def build(self, samples: Sequence[Sample], on_progress: OnProgress) -> None:
        """ServerRefused: the LLM server cannot be used; what was built by then is stored."""
        self._engine.resume()
        for sample in samples:
            self._engine.add_batch(sample.turns)  # those stored already change nothing
            keys = [turn.dedupe_key for turn in sample.turns]
            stored = self._engine.turns_by_key(sample.tenant, keys)
            held = zip(keys, sample.holds, strict=True)
            self._end(sample.tenant)
            self._holds[sample.tenant] = {stored[key]["seq"]: pieces for key, pieces in held}
            self._telling[sample.tenant] = Telling(sample)
            # a question at a time would leave the encoder's batches nearly empty
            self._encoder.encode_queries([question.text for question in sample.questions])
        self._settle(sum(len(sample.turns) for sample in samples), on_progress)

    def _end(self, tenant: str) -> None:
        """Flush, unless that was done before: no turn of a conversation that is over waits for others."""
        log = self._engine.tenants.existing(tenant)
        if all(control.kind != "flush" for control in log.controls_from(log.seq_by_row[-1])):
            self._engine.log_flush(tenant)

    def _settle(self, turns: int, on_progress: OnProgress) -> None:
        engine = self._engine
        while not engine.idle:
            engine.step(WAIT_FOR_REPLY_S)
            on_progress("turns decided", turns - engine.lag.undecided_turns, turns)
            if engine.is_stalled:
                break
        if reasons := obstacles(engine):
            raise ServerRefused(
                f"not all turns are consolidated: {'; '.join(reasons)}. "
                "What is there is kept: run the same command again once the server works."
            )

    def material(self, sample: Sample, question: Question) -> Material:
        return self._given(sample, question, self._recall(sample.tenant, question.text))

    def _recall(self, tenant: str, text: str) -> SearchResult:
        """What an answer is given, reranked if the settings say so, however long it takes."""
        rerank = self._engine.begin_rerank(tenant, text)
        return self._engine.recall(tenant, text, rerank and rerank.wait())

    def _given(self, sample: Sample, question: Question, found: SearchResult) -> Material:
        tenant, memories = sample.tenant, (*found.episodes, *found.facts)
        return Material(
            _shown(found.episodes),
            _shown(found.facts),
            _shown(found.turns),
            order=found.order,
            in_turns=self._evidence(tenant, found.turns),
            behind_memories=self._evidence(tenant, memories),
            in_memories=each_once([self._told(tenant, question, hit) for hit in memories]),
        )

    def _told(self, tenant: str, question: Question, memory: Hit) -> list[str]:
        """The evidence for the question that a memory rests on and tells of."""
        text = f"{memory.memory} {memory.timestamp and in_words(memory.timestamp)}"
        behind = set(question.evidence).intersection(self._evidence(tenant, [memory]))
        return [piece for piece in sorted(behind) if self._telling[tenant].tells(text, piece, question)]

    def _evidence(self, tenant: str, hits: Sequence[Hit]) -> tuple[str, ...]:
        """What the turns hold that these are, or rest on."""
        holds = self._holds[tenant]
        return each_once([holds.get(seq, ()) for hit in hits for seq in hit.source_seqs])

    def construction(self, tenant: str) -> dict[str, Usage]:
        by_operation = store_usage(self._engine.tenants, tenant)
        return {op: Usage(**used) for op, used in by_operation.items() if op not in QUERY_OPERATIONS}

    def counts(self) -> dict[str, int]:
        """Of all tenants together; `dead_letters` are jobs that no usable reply was given to."""
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()


class BestEffort(EngineSystem):
    """The engine in its answer mode `best_effort`: the judgements are those of engine/search/answer_modes.py.

    No question changes a memory: what the notes missed is not logged, so that the order of the questions,
    and where a run was stopped, does not matter.
    """

    def steps(self, sample: Sample, question: Question, material: Material, style: AnswerStyle) -> Steps:
        recall = partial(self._recall, sample.tenant, question.text)
        budget = PromptBudget(self._settings.context_tokens, self._settings.reply_tokens)
        asking = answering("best_effort", Asked(question.text, question.asked_on, recall, budget, style))
        try:
            say = next(asking)
            while True:
                try:
                    reply = yield say.prompt
                except BadReply as bad:
                    say = asking.throw(bad)
                else:
                    say = asking.send(reply)
        except StopIteration as ended:
            answer, found = ended.value
            return answer, self._given(sample, question, found)


class WithoutMemories(EngineSystem):
    """The engine's search over turns alone: what consolidated memories have to surpass at equal tokens.

    Nothing is consolidated. The prompt's tokens are those of `answer_tokens`, as for the whole engine.
    """

    def __init__(self, name: str, means: Means) -> None:
        settings = varied(means.settings, llm_url=None, k_epi=0, k_sem=0)
        if not settings.answer_budget:
            cure = "Set UNDERTOW_ANSWER_TOKENS, and another profile than paper."
            raise UndertowError(f"{name} fills a budget of tokens. {cure}")
        super().__init__(name, replace(means, settings=settings, folder=means.folder / name))

    def _settle(self, turns: int, on_progress: OnProgress) -> None:
        """Turns are searched as soon as they are stored."""


class NaiveRagHybrid(WithoutMemories):
    """Naive RAG with the engine's own search: small chunks of messages, each stored as a turn."""

    def build(self, samples: Sequence[Sample], on_progress: OnProgress) -> None:
        super().build([_in_chunks(sample) for sample in samples], on_progress)


def _in_chunks(sample: Sample) -> Sample:
    """The sample with its chunks as turns."""
    chunks = list(chunked(sample, HYBRID_CHUNK_TOKENS, repeat_dates=False))
    turns = [
        Turn(sample.tenant, (Message("user", chunk.text, "log"),), f"chunk {n}", "log", chunk.date)
        for n, chunk in enumerate(chunks)
    ]
    return replace(sample, turns=tuple(turns), holds=tuple(chunk.holds for chunk in chunks))


def _shown(hits: Sequence[Hit]) -> tuple[ShownMemory, ...]:
    return shown([(hit.timestamp, hit.memory) for hit in hits])


def engine_system(name: str, means: Means) -> System:
    """The engine, in the answer mode that the settings name."""
    made = BestEffort if means.settings.answer_mode == "best_effort" else EngineSystem
    return made(name, means)

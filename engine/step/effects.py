"""Carries out the effects that policies yield: gate, nearest, embed, thetas. Each call is one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.trace import Trace
from undertow.engine.policies.base import Effect, Embed, GateReading, Nearest, PairThetas, ReadGate, Scored
from undertow.engine.step.decision_queue import DecisionRun
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena
from undertow.kernels.gate.gate import Gate as GateKernel
from undertow.kernels.pair_cosines import pair_quantiles, sample_order
from undertow.kernels.topk.topk import top_k_many

if TYPE_CHECKING:
    from undertow.engine.encoders.embedding_cache import EmbeddingCache


# Turns among which thetas are found: all but a few tenants' thetas then lie within 0.01 of that of all turns.
SAMPLE_TURNS = 256


class EffectReader:
    """Reads the arena for tenants and translates its rows into turns and memories."""

    def __init__(self, arena: Arena, gate: GateKernel, encoder: EmbeddingCache) -> None:
        self._arena = arena
        self._gate = gate
        self._encoder = encoder

    def gate(self, queries: Sequence[tuple[Tenant, int]]) -> list[GateReading]:
        """Nearest episode and relevant set of each (tenant, seq), before seq (RecMem, equations 5, 6)."""
        if not queries:
            return []
        thetas = [t.thresholds_at(s) for t, s in queries]
        handles = [Arena.handle(t.turns_segment, t.row_by_seq[s]) for t, s in queries]
        episodes = [t.making.tiers["episode"] for t, _ in queries]
        found = self._gate.read(
            queries=self._arena.take(np.array(handles, dtype=np.int64)),
            turn_segments=np.array([t.turns_segment for t, _ in queries], dtype=np.int64),
            episode_segments=np.array([tier.segment for tier in episodes], dtype=np.int64),
            visible=np.array([t.row_by_seq[s] for t, s in queries], dtype=np.int64),
            theta=np.array([theta.theta_sim for theta in thetas]),
            k=np.array([theta.k_gate for theta in thetas], dtype=np.int64),
        )
        nearest, scores = found.nearest_row.tolist(), found.nearest_score.tolist()
        counts, offsets = found.count.tolist(), found.offsets.tolist()
        readings = []
        for i, (tenant, _) in enumerate(queries):
            part = slice(offsets[i], offsets[i + 1])
            reading = GateReading(
                episode=episodes[i].rows[nearest[i]] if nearest[i] >= 0 else None,
                episode_score=scores[i] if nearest[i] >= 0 else None,
                relevant=tuple(map(tenant.seq_by_row.__getitem__, found.rows[part].tolist())),
                scores=tuple(found.scores[part].tolist()),
                count=counts[i],
            )
            readings.append(reading)
        return readings

    def embed(self, asks: Sequence[tuple[Tenant, tuple[str, ...]]]) -> list[NDArray[np.float16]]:
        """Vectors of each request's texts, float16 [len(texts), dim]; one batch for all (at least one)."""
        names = [t.name for t, texts in asks for _ in texts]
        vectors = self._encoder.encode(names, [text for _, texts in asks for text in texts])
        bounds = np.cumsum([len(texts) for _, texts in asks])[:-1]
        return np.split(vectors, bounds)

    def nearest(self, asks: Sequence[tuple[Tenant, Nearest]]) -> list[list[Scored]]:
        """The k nearest current memories of each request (at least one), nearest first; exact."""
        tiers = [tenant.making.tiers[ask.kind] for tenant, ask in asks]
        segments = np.array([tier.segment for tier in tiers], dtype=np.int64)
        queries = np.stack([ask.vector for _, ask in asks])
        most = max(ask.k for _, ask in asks)
        scores, rows = top_k_many(self._arena, segments, queries, most, self._gate)
        return [
            [
                Scored(memory, score)
                for score, row in zip(scores[i, : ask.k].tolist(), rows[i, : ask.k].tolist(), strict=True)
                if row >= 0 and (memory := tiers[i].rows[row]) is not None
            ]
            for i, (_, ask) in enumerate(asks)
        ]

    def pair_thetas(self, asks: Sequence[tuple[Tenant, PairThetas]]) -> list[tuple[float, ...]]:
        """The cosine that each share of a tenant's pairs reaches, in a sample of its turns; () if none.

        The sample is drawn by a fixed hash of the turns' seqs, without deleted turns.
        """
        found = []
        for tenant, ask in asks:
            seqs = np.frombuffer(tenant.seq_by_row, np.int32)[: tenant.rows_before(ask.seq + 1)]
            drawn = (seq for seq in seqs[sample_order(seqs)].tolist() if tenant.exists(seq))
            rows = [tenant.row_by_seq[seq] for seq in islice(drawn, SAMPLE_TURNS)]
            handles = np.array([Arena.handle(tenant.turns_segment, row) for row in rows], np.int64)
            found.append(pair_quantiles(self._arena.take(handles), ask.shares) if len(rows) > 1 else ())
        return found


def read_by_kind(
    reader: EffectReader, trace: Trace, pending: Iterable[tuple[DecisionRun, Effect]]
) -> list[tuple[DecisionRun, Any]]:
    """Carry out all effects but LLM calls, each kind as one batch. Returns each run with its result."""
    pending = list(pending)
    gates = [(r, (r.tenant, e.seq)) for r, e in pending if isinstance(e, ReadGate)]
    embeds = [(r, (r.tenant, e.texts)) for r, e in pending if isinstance(e, Embed)]
    nearest = [(r, (r.tenant, e)) for r, e in pending if isinstance(e, Nearest)]
    thetas = [(r, (r.tenant, e)) for r, e in pending if isinstance(e, PairThetas)]
    return [
        *_batch(trace, "gate", reader.gate, gates),
        *_batch(trace, "embed", reader.embed, embeds),
        *_batch(trace, "nearest", reader.nearest, nearest),
        *_batch(trace, "thetas", reader.pair_thetas, thetas),
    ]


def _batch(
    trace: Trace,
    name: str,
    read: Callable[[list[Any]], Sequence[Any]],
    requests: Sequence[tuple[DecisionRun, Any]],
) -> Iterable[tuple[DecisionRun, Any]]:
    """One kind of effect for all runs, as one phase of the trace."""
    if not requests:
        return ()
    with trace.span(name, asks=len(requests)):
        return zip((run for run, _ in requests), read([request for _, request in requests]), strict=True)

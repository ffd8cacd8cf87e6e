"""Warm-up before the first call: compiles the kernels and runs the model once.

    python -m undertow.engine.step.warm_up

compiles the CPU's kernels into numba's cache, so that no process has to do it later.
"""

from __future__ import annotations

import numpy as np

from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.base import Encoder, Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.array_types import Float64s
from undertow.kernels.bm25 import Bm25, add_context, find_related, place_rows
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.few_queries import FEW_QUERIES
from undertow.kernels.key_table import KeyTable, add_keys, may_hold
from undertow.kernels.pair_cosines import pair_quantiles
from undertow.kernels.topk.hybrid import hybrid_top_k
from undertow.kernels.topk.topk import top_k_many

TEXTS = ("Nobody has said this.", "Nor has anybody said that, at any other time or in any other place.")


class WarmUpFailed(UndertowError):
    """The encoder or a kernel does not work on this machine; the message says which and why."""


def warm_up(encoder: Encoder, arena: Arena) -> None:
    """Embed, read the gate and search once, with vectors that are then released. WarmUpFailed.

    Without a cache numba compiles for seconds, and torch and CUDA initialise on first use. Involves no tenant
    and no journal, so nothing is written or counted.
    """
    at = "the encoder"
    try:
        vectors = encoder.encode(TEXTS)
        at = "the kernels"
        _read(vectors, arena)
        _find_keys()
    except Exception as error:
        raise WarmUpFailed(
            f"{at} cannot be used: {type(error).__name__}: {error}. `undertow doctor` checks this machine."
        ) from error


def _read(vectors: Float16, arena: Arena) -> None:
    """Run the kernels of a decision and of a search on two segments with these vectors each."""
    gate, count = make_gate(arena), len(vectors)
    turns, episodes = arena.new_segment(), arena.new_segment()
    try:
        handles = arena.extend(np.repeat([turns, episodes], count), np.concatenate([vectors, vectors]), True)
        for times in (1, FEW_QUERIES):  # few queries and many take kernels of their own
            many = count * times
            gate.read(
                queries=arena.take(np.repeat(handles[:count], times)),
                turn_segments=np.full(many, turns),
                episode_segments=np.full(many, episodes),
                visible=np.full(many, count),
                theta=np.zeros(many),
                k=np.full(many, count),
            )
        arena.set_live(handles, live=False)
        pair_quantiles(arena.take(handles[:count]), (0.5,))
        top_k_many(arena, np.array([turns, episodes]), vectors, count, gate)
        beside = np.full((count, 2), -1)
        for shares in (None, _shares_of_words(count)):
            hybrid_top_k(arena, turns, vectors[:1], count, None, shares, gate, beside)
    finally:
        arena.release(turns)
        arena.release(episodes)


def _shares_of_words(count: int) -> Float64s:
    """Run the kernels of a search by keywords over so many texts; their scores, float64 [count]."""
    index = Bm25()
    for row in range(count):
        index.put(row, [row])
    shares = index.scores([0], count)
    index.common([0])
    stretch, beside = np.empty(count, np.int64), np.empty((count, 2), np.int64)
    place_rows(np.zeros(count, np.int32), 1, stretch, beside)
    add_context(shares.copy(), stretch, beside, 0.5, 0.5, shares)
    closeness, found = np.empty((0, 1)), np.empty((0, 1), np.uint32)
    find_related(
        found[:, 0], found[:, 0], found.astype(np.uint16), found.astype(np.uint8), 1.0, found, closeness
    )
    return shares


def _find_keys() -> None:
    """Run the kernels of a turn's dedupe key."""
    tables, owners = [KeyTable()], np.zeros(2, np.int64)
    add_keys(tables, owners, np.arange(2))
    may_hold(tables, owners, np.arange(2))


if __name__ == "__main__":
    warm_up(HashingEncoder(16), make_arena(16, "cpu"))

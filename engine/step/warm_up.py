"""What a first call would wait for is done before it: kernels are compiled, the model runs once."""

from __future__ import annotations

import numpy as np

from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.base import Encoder, Float16
from undertow.kernels.arena.arena import Arena
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.topk.topk import top_k_many

TEXTS = ("Nobody has said this.", "Nor has anybody said that, at any other time or in any other place.")


class WarmUpFailed(UndertowError):
    """The encoder or a kernel fails with anything that it is given; the text says which and how."""


def warm_up(encoder: Encoder, arena: Arena) -> None:
    """Embed, read the gate and search once, with vectors that leave the arena again. WarmUpFailed.

    numba compiles for seconds where it finds no cache, and torch and CUDA set up what they need as they are
    first used. Nothing is written and nothing counted: no tenant and no journal is involved.
    """
    at = "the encoder"
    try:
        vectors = encoder.encode(TEXTS)
        at = "the kernels"
        _read(vectors, arena)
    except Exception as error:
        raise WarmUpFailed(
            f"{at} cannot be used: {type(error).__name__}: {error}. `undertow doctor` checks this machine."
        ) from error


def _read(vectors: Float16, arena: Arena) -> None:
    """What a decision and a search ask of the kernels, of two segments with the vectors each."""
    gate, count = make_gate(arena), len(vectors)
    turns, episodes = arena.new_segment(), arena.new_segment()
    try:
        handles = arena.extend(np.repeat([turns, episodes], count), np.concatenate([vectors, vectors]), True)
        gate.read(
            queries=arena.take(handles[:count]),
            turn_segments=np.full(count, turns),
            episode_segments=np.full(count, episodes),
            visible=np.full(count, count),
            theta=np.zeros(count),
            k=np.full(count, count),
        )
        top_k_many(arena, np.array([turns, episodes]), vectors, count, gate)
    finally:
        arena.release(turns)
        arena.release(episodes)

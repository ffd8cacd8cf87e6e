"""The encoder on the card: token rate on the device, from text to the arena, of the tokenizer alone."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from undertow.bench.gpu_figures import Part, WrongResults
from undertow.bench.gpu_load import exchanges
from undertow.bench.gpu_rig import Limits, Rig, Scale
from undertow.engine.cuda_encoder import CudaSentenceEncoder
from undertow.engine.sentence_encoder import SentenceEncoder
from undertow.engine.sentence_model import DEFAULT_MODEL, model_folder
from undertow.kernels.arena import make_arena

_TENANTS = 1_000
_REPEATS = 5
_ALONE = 8
# of vectors of 16-bit arithmetic with those in fp32
_LEAST_COSINE = 0.999


def measure(rig: Rig, scale: Scale, limits: Limits) -> Part:
    """Rates count the tokens of the texts: neither padding nor filler. Medians."""
    part = Part()
    encoder = CudaSentenceEncoder(device=rig.device.type)
    encoder.prepare()
    texts = exchanges(scale.encode_texts)
    began_s = time.perf_counter()
    windows = encoder.windows(texts)
    first_tokenizing_s = time.perf_counter() - began_s
    tokens = len(windows.ids)
    _check(encoder, texts)
    device_s = statistics.median(_on_device(rig, encoder, texts))
    arena_s = statistics.median(_to_arena(rig, encoder, texts, _REPEATS))
    tokenizer_s = statistics.median(rig.wall_s(lambda: encoder.windows(texts), _REPEATS, warmup=1))
    rate = tokens / device_s / 1e6
    limit = limits.matmul_flop_per_s / flop_per_token(DEFAULT_MODEL, tokens / len(texts)) / 1e6
    part.reach("encoder_device", rate, limit)
    part.reach("encoder_to_arena", 100 * device_s / arena_s, 100.0, f"{tokens / arena_s / 1e6:.1f} Mtok/s")
    part.tell("tokenizer", "tokenizer alone", "Mtok/s", tokens / tokenizer_s / 1e6, lower=False)
    share = 100 * encoder.padding_share(texts)
    part.tell("padding", "padding and filler, of the token places computed", "%", share, limit=0.0)
    part.details = {
        "texts": len(texts),
        "tokens": tokens,
        "model": DEFAULT_MODEL,
        "dtype": encoder.fingerprint.dtype,
        "tokenizer": encoder.tokenizer_note,
        "device_s": device_s,
        "text_to_arena_s": arena_s,
        "tokenizer_s": tokenizer_s,
        "tokenizer_first_call_s": first_tokenizing_s,
    }
    return part


def _on_device(rig: Rig, encoder: CudaSentenceEncoder, texts: Sequence[str]) -> list[float]:
    """Seconds for all texts, their ids on the device before the clock starts."""
    windows = encoder.windows(texts)
    ready = []
    for batch in encoder.batches(windows.lengths):
        width, rows = batch.shape
        packed = np.empty((rows, width + 1), np.int32)
        encoder.pack(windows, batch, packed)
        ready.append((encoder._shape(batch.shape), torch.from_numpy(packed).to(rig.device)))

    def run() -> None:
        for compute, packed_ids in ready:
            compute(packed_ids)

    return rig.device_s(run, _REPEATS, warmup=1)


def _to_arena(rig: Rig, encoder: CudaSentenceEncoder, texts: Sequence[str], repeats: int) -> list[float]:
    """Seconds from Python strings to searchable rows, each time in new segments."""
    rows = len(texts) * (repeats + 1)
    arena = make_arena(
        encoder.dim, "cuda" if rig.cuda else "cpu", 4 * rows * (2 * encoder.dim + 16) + (64 << 20)
    )
    offsets = np.arange(len(texts)) % _TENANTS
    rounds = count()

    def run() -> None:
        first = next(rounds) * _TENANTS
        for _ in range(_TENANTS):
            arena.new_segment()
        arena.extend(first + offsets, encoder.embed(texts).on(arena.device), live=True)

    return rig.wall_s(run, repeats, warmup=1)


def _check(encoder: CudaSentenceEncoder, texts: Sequence[str]) -> None:
    """WrongResults: company changes a text's bits, or the vectors are not those of the model in fp32."""
    together = encoder.encode(texts[:512])
    alone = np.concatenate([encoder.encode([text]) for text in texts[:_ALONE]])
    if alone.tobytes() != together[:_ALONE].tobytes():
        raise WrongResults("a text alone and the same text in a batch have different vectors")
    reference = SentenceEncoder(DEFAULT_MODEL, dtype="float32").encode(texts[:_ALONE])
    cosines = (reference.astype(np.float64) * together[:_ALONE].astype(np.float64)).sum(axis=1)
    if not cosines.min() >= _LEAST_COSINE:
        raise WrongResults(f"a vector has a cosine of {cosines.min():.5f} with the one computed in fp32")


def flop_per_token(model: str, tokens_per_text: float) -> float:
    """Of a BERT-like model's layers: the projections, and attention over a text of that length."""
    form = json.loads((model_folder(model) / "config.json").read_text())
    hidden, inner, layers = form["hidden_size"], form["intermediate_size"], form["num_hidden_layers"]
    return float(2 * layers * (4 * hidden**2 + 2 * hidden * inner + 2 * tokens_per_text * hidden))

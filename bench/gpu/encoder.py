"""The encoder on the card: token rates on the device, from text to the arena, and of the tokenizer alone.

The goals refer to the default batch size. Twice and half as many token places are measured too, to show which
number is best for this card; and where batches are packed, the model's own forward pass in padded ones.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from undertow.bench.gpu.figures import Figure, NotMeasured, Part, WrongResults
from undertow.bench.gpu.load import exchanges
from undertow.bench.gpu.rig import Limits, Rig, Scale
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.cpu import SentenceEncoder
from undertow.engine.encoders.cuda import CudaSentenceEncoder
from undertow.engine.encoders.model_files import DEFAULT_MODEL, model_folder
from undertow.kernels.arena.arena import make_arena

_TENANTS = 1_000
_REPEATS = 5
_ALONE = 8
# of vectors of 16-bit arithmetic with those in fp32
_LEAST_COSINE = 0.999
# of the default token places a batch
_TIMES_PLACES = (2.0, 0.5)


@dataclass(frozen=True, slots=True)
class Found:
    """The encoder with one number of token places a batch. Times are medians for all texts, but `alone_s`."""

    places: int
    device_s: float
    arena_s: float
    alone_s: float  # one text by itself, from Python string to vector
    padding: float  # share of the places computed that holds padding or filler


def measure(rig: Rig, scale: Scale, limits: Limits, encoder: str | None = None) -> Part:
    """Rates count the tokens of the texts: neither padding nor filler.

    `encoder`: a model's name or folder; by default the settings' model.
    """
    model = encoder or _settings_model()
    part = Part()
    texts = exchanges(scale.encode_texts)
    reference = SentenceEncoder(model, dtype="float32").encode(texts[:_ALONE])
    usual = _with_places(rig, model, None, texts, reference, part)
    sizes = (int(times * usual.places) for times in _TIMES_PLACES)
    others = [places for places in sizes if places >= part.details["window"]]
    found = [usual, *(_with_places(rig, model, places, texts, reference, part) for places in others)]
    tokens, numbers = part.details["tokens"], [f.places for f in found]
    limit = limits.matmul_flop_per_s / flop_per_token(model, tokens / len(texts)) / 1e6
    note = f"at {'/'.join(map(str, numbers))} places {_beside(tokens / f.device_s / 1e6 for f in found)}"
    part.reach("encoder_device", tokens / usual.device_s / 1e6, limit, note)
    rates, alone = _beside(tokens / f.arena_s / 1e6 for f in found), _beside(f.alone_s * 1e3 for f in found)
    note = f"{rates} Mtok/s; a text alone {alone} ms"
    part.reach("encoder_to_arena", 100 * usual.device_s / usual.arena_s, 100.0, note)
    what, note = "padding and filler, of the token places computed", _beside(100 * f.padding for f in found)
    part.figures += [
        Figure("tokenizer", "tokenizer alone", "Mtok/s", tokens / part.details["tokenizer_s"] / 1e6, False),
        Figure("padding", what, "%", 100 * usual.padding, limit=0.0, note=note),
    ]
    if part.details["packing"].startswith("packed"):
        padded_s = _on_device_s(rig, CudaSentenceEncoder(model, device=rig.kind, packed=False), texts)
        what = "the model's own forward pass in padded batches"
        part.figures.append(Figure("encoder_padded", what, "Mtok/s", tokens / padded_s / 1e6, False))
    name = Path(model).name if encoder else model
    part.details |= {"texts": len(texts), "model": name, "by_places": [asdict(f) for f in found]}
    return part


def _beside(values: Iterable[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)


def _settings_model() -> str:
    """The default model where the packages that settings need are not installed."""
    try:
        from undertow.engine.base.config import Settings
    except ImportError:
        return DEFAULT_MODEL
    model = Settings().encoder
    if model.startswith("hash:"):
        raise NotMeasured(
            f"UNDERTOW_ENCODER is {model}, which is no model; give the folder of one: --encoder"
        )
    return model


def _with_places(
    rig: Rig, model: str, places: int | None, texts: Sequence[str], reference: Float16, part: Part
) -> Found:
    """One encoder, and what does not depend on its places, in `part.details`, if it is the first."""
    gc.collect()  # the encoder before this one and its shapes hold each other
    encoder = CudaSentenceEncoder(model, device=rig.kind, places=places)
    encoder.prepare()
    if not part.details:
        part.details = _tokenizing(rig, encoder, texts)
        part.details |= {"dtype": encoder.fingerprint.dtype, "tokenizer": encoder.tokenizer_note}
        part.details["window"] = encoder.window
        part.details["packing"] = encoder.packing_note
    _check(encoder, texts, reference)
    some = texts[:_ALONE]
    alone_s = rig.wall_s(lambda: [encoder.encode([text]) for text in some], _REPEATS, warmup=1)
    return Found(
        encoder.places,
        _on_device_s(rig, encoder, texts),
        _to_arena_s(rig, encoder, texts),
        statistics.median(alone_s) / len(some),
        encoder.padding_share(texts),
    )


def _tokenizing(rig: Rig, encoder: CudaSentenceEncoder, texts: Sequence[str]) -> dict[str, Any]:
    began_s = time.perf_counter()
    windows = encoder.windows(texts)
    first_s = time.perf_counter() - began_s
    tokenizer_s = statistics.median(rig.wall_s(lambda: encoder.windows(texts), _REPEATS, warmup=1))
    return {"tokens": len(windows.ids), "tokenizer_s": tokenizer_s, "tokenizer_first_call_s": first_s}


def _on_device_s(rig: Rig, encoder: CudaSentenceEncoder, texts: Sequence[str]) -> float:
    """Median seconds for all texts, their ids on the device before the clock starts."""
    windows = encoder.windows(texts)
    ready = [encoder.fill(windows, batch).to(rig.device) for batch in encoder.batches(windows.lengths)]
    return statistics.median(rig.device_s(lambda: encoder.run_packed(ready), _REPEATS, warmup=1))


def _to_arena_s(rig: Rig, encoder: CudaSentenceEncoder, texts: Sequence[str]) -> float:
    """Median seconds from Python strings to searchable rows, each time in new segments."""
    rows = len(texts) * (_REPEATS + 1)
    nbytes = 4 * rows * (2 * encoder.dim + 16) + (64 << 20)
    arena = make_arena(encoder.dim, rig.kind, nbytes)
    offsets = np.arange(len(texts)) % _TENANTS
    rounds = count()

    def run() -> None:
        first = next(rounds) * _TENANTS
        for _ in range(_TENANTS):
            arena.new_segment()
        arena.extend(first + offsets, encoder.embed(texts).on(arena.device), live=True)

    return statistics.median(rig.wall_s(run, _REPEATS, warmup=1))


def _check(encoder: CudaSentenceEncoder, texts: Sequence[str], reference: Float16) -> None:
    """WrongResults: company changes a text's bits, or the vectors are not those of the model in fp32."""
    together = encoder.encode(texts[:512])
    alone = np.concatenate([encoder.encode([text]) for text in texts[:_ALONE]])
    if alone.tobytes() != together[:_ALONE].tobytes():
        raise WrongResults("a text alone and the same text in a batch have different vectors")
    cosines = (reference.astype(np.float64) * together[:_ALONE].astype(np.float64)).sum(axis=1)
    if not cosines.min() >= _LEAST_COSINE:
        raise WrongResults(f"a vector has a cosine of {cosines.min():.5f} with the one computed in fp32")


def flop_per_token(model: str, tokens_per_text: float) -> float:
    """Of the layers of a BERT or Qwen3: the products, and attention over a text of that length."""
    form = json.loads((model_folder(model) / "config.json").read_text())
    hidden, heads = form["hidden_size"], form["num_attention_heads"]
    key_heads, dim = form.get("num_key_value_heads", heads), form.get("head_dim", hidden // heads)
    products = 3 if "num_key_value_heads" in form else 2
    weights = 2 * hidden * dim * (heads + key_heads) + products * hidden * form["intermediate_size"]
    return float(2 * form["num_hidden_layers"] * (weights + 2 * tokens_per_text * heads * dim))

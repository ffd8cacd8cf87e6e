"""The CUDA gate on a card: the oracle's answers, the CPU's bits, nothing read or written out of place.

`test_gate.py` and the shim's cases run on the card as well; these tests need size or the hardware.
`make gpu-sanitize` runs some of both under compute-sanitizer.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from undertow.kernels.error_bounds import tensor_core_slack
from undertow.kernels.gate.cuda_gate import CudaGate, source
from undertow.kernels.gate.gate import Gate

from ..support.kernels.gate_worlds import (
    CODE_CUDA,
    CUDA,
    EVERYTHING,
    NUMPY_ON_DEVICE,
    World,
    fill,
    questions,
    same,
    shim_arena,
    unit,
)
from .test_gate_shim import (
    DIMS,
    adversarial,
    leaning_world,
    many_questions,
    rising_world,
    tall_world,
    thin_world,
)

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
# in the checkout, as it travels to another machine, or beside it
LOCOMO = [folder / "shared" / "data" / "locomo_dev.json" for folder in (ROOT, ROOT.parent)]
SCORES = Path(__file__).parents[1] / "support" / "kernels" / "cuda_shim" / "scores.cu"


@pytest.mark.parametrize("dim", DIMS)
def test_every_width_reads_as_the_reference_does(dim: int) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        world = World(dim, NUMPY_ON_DEVICE, CUDA, CODE_CUDA)
        pool = fill(world, rng, dim, (0, 1, 7, 80, 250))
        asked = many_questions(rng, pool)
        readings = world.read(asked)
        if dim <= 96:
            world.check(readings, asked)


@pytest.mark.parametrize("case", [tall_world, thin_world, rising_world, leaning_world])
def test_hard_cases_read_as_the_reference_does(case: Any) -> None:
    world, asked = case(NUMPY_ON_DEVICE, CUDA, CODE_CUDA)
    world.read(asked)


def test_ragged_batches_read_as_the_reference_does() -> None:
    roomy = replace(NUMPY_ON_DEVICE, arena=partial(shim_arena, nbytes=128 << 20))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        world = World(384, roomy, CUDA, CODE_CUDA)
        sizes = np.minimum(rng.zipf(1.5, 60), 2000) - rng.integers(0, 2, 60)
        pool = fill(world, rng, 384, tuple(sizes.tolist()))
        asked = questions(rng, pool, 200)
        for name, lowest in (("turn_segments", 0), ("episode_segments", -1)):
            asked[name] = rng.integers(lowest, 60, 200)
        world.read(asked)


def test_100_000_rows_and_the_same_bits_twice() -> None:
    rng = np.random.default_rng(6)
    arena, dim = CUDA.arena(384), 384
    for size in (100_000, 3, 500):
        segment = arena.new_segment()
        vectors = unit(rng.standard_normal((size, dim)) + rng.standard_normal(dim) * 0.7)
        handles = arena.extend(np.full(size, segment), vectors, live=True)
        arena.set_live(handles[rng.random(size) < 0.3], False)
    asked: dict[str, Any] = {
        "queries": unit(rng.standard_normal((30, dim)) + vectors[:30].astype(np.float64) * 15),
        "turn_segments": rng.integers(0, 3, 30),
        "episode_segments": rng.integers(-1, 3, 30),
        "visible": rng.choice([EVERYTHING, 77_777, 400], 30),
        "theta": rng.choice([-1.0, 0.05, 0.3, 0.9], 30),
        "k": rng.choice([0, 1, 10, 3000], 30),
    }
    gate = CudaGate(arena)
    prepared, readings = gate.prepare(**asked), []
    for _ in range(3):
        gate.launch(prepared)
        readings.append(gate.collect(prepared))
    on_device = asked | {"queries": torch.from_numpy(asked["queries"]).cuda()}
    same(Gate(arena).read(**asked), *readings, gate.read(**on_device))


def word_vectors(texts: list[str], dim: int) -> NDArray[np.float16]:
    """Texts as sums of a fixed random vector for each word: near where they share words."""
    vectors = np.zeros((len(texts), dim))
    for vector, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            vector += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(dim)
    return unit(vectors)


def test_every_turn_of_locomo_reads_as_the_reference_does(lacking: Callable[[str], NoReturn]) -> None:
    """Each message asks all earlier ones of its conversation, in one batch over all conversations."""
    if (locomo := next((path for path in LOCOMO if path.exists()), None)) is None:
        lacking("shared/data/locomo_dev.json, in the checkout or beside it")
    arena = CUDA.arena(384)
    owners, rows, queries = [], [], []
    for item in json.loads(locomo.read_text()):
        sessions = [v for k, v in item["conversation"].items() if isinstance(v, list)]
        texts = [message["text"] for session in sessions for message in session]
        vectors, segment = word_vectors(texts, 384), arena.new_segment()
        arena.extend(np.full(len(texts), segment), vectors, live=True)
        owners.append(np.full(len(texts), segment))
        rows.append(np.arange(len(texts)))
        queries.append(vectors)
    owner = np.concatenate(owners)
    asked: dict[str, Any] = {
        "queries": np.concatenate(queries),
        "turn_segments": owner,
        "episode_segments": (owner + 1) % len(owners),
        "visible": np.concatenate(rows),
        "theta": np.full(len(owner), 0.25),
        "k": np.full(len(owner), 10),
    }
    readings = CudaGate(arena).read(**asked)
    assert readings.count.sum() > 100
    same(Gate(arena).read(**asked), readings)


@pytest.mark.parametrize("dim", [64, 384, 1024])
def test_tensor_scores_of_this_card_are_within_the_slack(dim: int) -> None:
    """What the bound assumes of the hardware, put to it."""
    cupy = importlib.import_module("cupy")
    text = source() + SCORES.read_text()
    kernel = cupy.RawModule(code=text, options=(f"-DDIM={dim}",)).get_function("scores")
    rng, worst = np.random.default_rng(dim), 0.0
    for _ in range(200):
        rows, queries = adversarial(rng, 32, dim), adversarial(rng, 8, dim)
        queries[:4] = rows[:4]
        scores = cupy.empty((32, 8), cupy.float32)
        kernel((1,), (32,), (cupy.asarray(rows), cupy.asarray(queries), scores))
        exact = rows.astype(np.float64) @ queries.astype(np.float64).T
        worst = max(worst, float(np.abs(scores.get() - exact).max()))
    assert 0 < worst <= tensor_core_slack(dim)

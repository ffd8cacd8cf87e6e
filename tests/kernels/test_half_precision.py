"""fp16 rows on the CPU: exact conversion, also without the instruction for it, and any dimension."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.kernels.gate.gate import Gate

from ..support.kernels.gate_worlds import (
    NUMBA,
    NUMPY,
    close_world,
    host_arena,
    numba_gate,
    questions,
    same,
    unit,
)

pytest.importorskip("numba")
from ..support.kernels.half_cases import every_half, machine_code, readings, widened_halves

ROOT = Path(__file__).parents[2]


def test_every_value_is_converted_exactly() -> None:
    assert widened_halves().tobytes() == every_half().astype(np.float32).tobytes()


@pytest.mark.rarely
def test_a_cpu_without_the_instruction_finds_the_same_bits() -> None:
    """NUMBA_CPU_NAME=generic is the oldest 64-bit CPU: no F16C, no AVX, no fused multiply-add."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.half_cases"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    found, _, code = done.stdout.partition("\n")
    assert found.split(" ") == [one.hex() for one in readings()]
    for compiled in (code, machine_code()):
        # LLVM's helpers for fp16, which numba's runtime lacks
        assert "extendhf" not in compiled and "h2f" not in compiled
    assert "vcvtph2ps" not in code


def test_a_cpu_with_the_instruction_uses_it() -> None:
    if " f16c " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no F16C: the integer path is the one that the other tests run")
    assert "vcvtph2ps" in machine_code()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), dim=st.integers(1, 140))
def test_any_dimension_is_read_exactly(seed: int, dim: int) -> None:
    """Rows start at any multiple of two bytes, and end in the middle of a vector register."""
    rng = np.random.default_rng(seed)
    world, pool = close_world(rng, dim, NUMPY, NUMBA)
    world.read(questions(rng, pool, 9))


def test_many_queries_of_one_segment_see_what_each_alone_sees() -> None:
    rng = np.random.default_rng(8)
    arena = host_arena(40)
    turns, episodes = arena.new_segment(), arena.new_segment()
    vectors = unit(rng.standard_normal((500, 40)))
    arena.extend(np.full(500, turns), vectors, live=True)
    arena.extend(np.full(3, episodes), vectors[:3], live=True)
    asked = {
        "queries": vectors[:21],
        "turn_segments": np.full(21, turns),
        "episode_segments": np.full(21, episodes),
        "visible": np.arange(480, 501),
        "theta": np.full(21, 0.1),
        "k": np.full(21, 7),
    }
    together = numba_gate(arena).read(**asked)
    same(together, Gate(arena).read(**asked))

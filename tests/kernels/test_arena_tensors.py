"""Tensors in the arena's device memory: kept on the device, checked once, refused when bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.arena.tensors import CheckedRows, check_tensor
from undertow.kernels.gate.gate import NO_SEGMENT, Gate

from ..support.kernels.arena import DIM, arena_of, random_vectors
from ..support.kernels.gate_worlds import same


def test_tensors_stay_where_they_are_and_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, calls_of: Callable[..., list[int]]
) -> None:
    """A tensor goes in and comes out as a tensor; the rows are those that a NumPy array would give.

    Here the device is the host, so torch's ways off a device are refused by name; its verdict on the
    norms is the only value waited for. The gpu twin below has torch itself judge.
    """
    arena, rng = arena_of(500), np.random.default_rng(0)
    segment = arena.new_segment()
    vectors = random_vectors(rng, 100)
    to = torch.Tensor.to

    def indexes_only(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        assert self.dtype != torch.float16, "vectors were moved"
        return to(self, *args, **named)

    for name in ("cpu", "numpy", "item", "tolist", "__array__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, Mock(side_effect=AssertionError("copied to the host")))
    waits = calls_of(torch.Tensor, "__bool__", torch.Tensor.numel)
    monkeypatch.setattr(torch.Tensor, "to", indexes_only)
    handles = arena.extend(np.full(100, segment), torch.from_numpy(vectors), live=True)
    arena.write(handles[:2], torch.from_numpy(vectors[5:7]))
    assert len(waits) == 2
    taken = arena.take(handles)
    assert isinstance(taken, torch.Tensor)
    check_tensor(taken, DIM)
    arena.extend(np.full(100, segment), taken, live=True)
    arena.set_live(handles, False)
    assert len(waits) == 2
    monkeypatch.undo()
    assert taken.dtype == torch.float16 and taken.is_contiguous()
    vectors[:2] = vectors[5:7]
    np.testing.assert_array_equal(taken.numpy(), vectors)
    np.testing.assert_array_equal(arena.vector16(handles), vectors)


@pytest.mark.gpu
def test_on_a_card_only_the_check_of_a_tensor_waits() -> None:
    from undertow.kernels.gate.cuda_gate import CudaGate

    arena = make_arena(DIM, "cuda", 16 << 20)
    rng, segment, other = np.random.default_rng(0), arena.new_segment(), arena.new_segment()
    vectors = random_vectors(rng, 100)
    on_card = torch.from_numpy(vectors).cuda()
    gate = CudaGate(arena)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            arena.extend(np.full(100, segment), on_card, live=True)
        handles = arena.extend(np.full(100, segment), vectors, live=True)
        # a slab that moves, rows that are taken and appended again, flags, wiping, packing
        arena.extend(np.full(100, segment), arena.take(handles), live=True)
        arena.extend(np.full(100, other), vectors, live=False)
        arena.set_live(handles[:50], False)
        arena.redact(handles[90:])
        arena.release(other)
        arena.compact()
        asked: dict[str, Any] = {
            "queries": arena.take(handles),
            "turn_segments": np.full(100, segment),
            "episode_segments": np.full(100, NO_SEGMENT),
            "visible": np.arange(100, 200),
            "theta": np.full(100, 0.1),
            "k": np.full(100, 5),
        }
        prepared = gate.prepare(**asked)
        gate.launch(prepared)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    same(gate.collect(prepared), Gate(arena).read(**{**asked, "queries": arena.vector16(handles)}))
    vectors[90:] = 0
    np.testing.assert_array_equal(arena.vector16(handles), vectors)


def test_only_what_was_taken_goes_unchecked() -> None:
    """What is computed from taken rows is a plain tensor, and refused as one."""
    arena = arena_of(100)
    segment = arena.new_segment()
    handles = arena.extend([segment], np.full((1, DIM), 0.25, np.float16), live=True)
    taken = arena.take(handles)
    assert isinstance(taken, CheckedRows)
    for derived in (taken * 100, taken.clone().fill_(torch.inf), torch.cat((taken, taken)) / 0):
        assert type(derived) is torch.Tensor
        with pytest.raises(ValueError, match="vector 0"):
            check_tensor(derived, DIM)
    with pytest.raises(ValueError, match=r"\[n, 19\], not \[1, 20\]"):
        check_tensor(taken, 19)


def test_a_taken_row_is_a_copy() -> None:
    arena = arena_of(100)
    handles = arena.extend([arena.new_segment()], np.full((1, DIM), 0.25, np.float16), live=True)
    taken = arena.take(handles)
    arena.redact(handles)
    assert taken[0, 0] == 0.25


def test_a_tensor_of_another_device_is_refused() -> None:
    arena = arena_of(100)
    segment = arena.new_segment()
    with pytest.raises(ValueError, match="vectors are on meta"):
        arena.extend([segment], torch.zeros((1, DIM), dtype=torch.float16, device="meta"), live=True)
    assert arena.length(segment) == 0


def test_norms_are_judged_alike_on_host_and_device() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((2000, 64))
    near = (wide / np.linalg.norm(wide, axis=1, keepdims=True) * rng.uniform(3.9, 4.1, (2000, 1))).astype(
        np.float16
    )
    arena = Arena(64)
    segment, disagreed = arena.new_segment(), 0
    for row in near:
        verdicts = []
        for check in (
            lambda v: arena.extend([segment], v, live=False),
            lambda v: check_tensor(torch.from_numpy(v), 64),
        ):
            try:
                check(row.reshape(1, -1))
                verdicts.append(True)
            except ValueError:
                verdicts.append(False)
        if verdicts[0] != verdicts[1]:
            disagreed += 1
            assert abs(np.linalg.norm(row.astype(np.float64)) - 4) < 1e-5
    assert disagreed < 5


@pytest.mark.gpu
def test_the_pool_of_a_card_is_shared_with_cupy() -> None:
    import cupy

    arena = make_arena(384, "cuda", 64 << 20)
    assert arena.device == "cuda"
    before = torch.cuda.memory_allocated()
    block = cupy.zeros(1 << 20, cupy.uint8)
    assert torch.cuda.memory_allocated() - before >= 1 << 20
    del block
    assert torch.cuda.memory_allocated() == before
    segment = arena.new_segment()
    vectors = torch.full((100, 384), 0.05, dtype=torch.float16, device="cuda")
    handles = arena.extend(np.full(100, segment), vectors, live=True)
    np.testing.assert_array_equal(arena.vector16(handles), vectors.cpu().numpy())

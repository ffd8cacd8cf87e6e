"""A linear layer over packed tokens, with GELU if wanted, as one Triton kernel.

A row's bits depend on that row alone: each program adds up all of K in one order, whichever rows it has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from undertow.kernels.encoder.layout import ROW_TILE

Weights = tuple[torch.Tensor, torch.Tensor]
"""A linear layer's weight [N, K], and bias [N], of the type of its input."""


class Tile(NamedTuple):
    """What one program computes, and how: `rows` x `columns` of the result, in steps of `depth`."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# The fastest of ten on an H100, with and without GELU; wider ones spill registers.
TILE = Tile(ROW_TILE, 128, 64, warps=8, stages=3)


@triton.jit
def _erf(x: tl.tensor) -> tl.tensor:
    """erf within 1.5e-7 (Abramowitz and Stegun, 7.1.26), without the branches of tl.erf."""
    t = 1.0 / (1.0 + 0.3275911 * tl.abs(x))
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    size = 1.0 - sums * tl.exp(-x * x)
    return tl.where(x < 0, -size, size)


@triton.jit
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    used: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T + bias, of BLOCK_M x BLOCK_N elements a program."""
    # Programs that share rows of x run side by side, and the weights stay in the cache.
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first = tl.program_id(0) // tiles * BLOCK_M
    if first >= tl.load(used):
        return
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_at = x + rows[:, None] * K + depth[None, :]
    weight_at = weight + columns[None, :] * K + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            a, b = tl.load(x_at), tl.load(weight_at)
        else:
            inside = depth + k < K
            a = tl.load(x_at, mask=inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
        total = tl.dot(a, b, total)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        total = 0.5 * total * (1.0 + _erf(total * 0.7071067811865476))
    out_at = out + rows[:, None] * N + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(columns < N)[None, :])


def linear(x: torch.Tensor, weights: Weights, used: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """x @ weight.T + bias, then GELU with erf if `gelu`: [tokens, N], summed in float32.

    `x` float16 or bfloat16 [tokens, K], `used` int32 [1]. Rows of tiles beyond `used` are left as they are.
    """
    (weight, bias), (tokens, depth) = weights, x.shape
    columns = len(weight)
    out = x.new_empty((tokens, columns))
    _linear[(tokens // TILE.rows * triton.cdiv(columns, TILE.columns),)](
        *(x, weight, bias, out, used),
        N=columns,
        K=depth,
        GELU=gelu,
        BLOCK_M=TILE.rows,
        BLOCK_N=TILE.columns,
        BLOCK_K=TILE.depth,
        num_warps=TILE.warps,
        num_stages=TILE.stages,
    )
    return out

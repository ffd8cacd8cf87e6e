"""A linear layer, a residual sum and LayerNorm in one Triton kernel, where a program can hold whole rows.

That is for a hidden size of 384, in three parts, since Triton's tiles are powers of two. It spares writing
and reading the linear layer's result. For other sizes the two steps run one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from undertow.kernels.encoder.layer_norm import Norm, add_norm
from undertow.kernels.encoder.linear import Weights, linear

PART = 128
# the fastest of seven on an H100; with 128 rows the sums do not fit the registers
ROWS = 64
DEPTH = 64
WARPS = 8
STAGES = 3


@triton.jit
def _part(
    total: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    HIDDEN: tl.constexpr,
) -> tl.tensor:
    """One part of the sum: float32 [rows, columns]."""
    total += tl.load(bias + columns).to(tl.float32)[None, :]
    return total + tl.load(residual + rows[:, None] * HIDDEN + columns[None, :]).to(tl.float32)


@triton.jit
def _store_part(
    centred: tl.tensor,
    spread: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    HIDDEN: tl.constexpr,
) -> None:
    scale = tl.load(norm_weight + columns).to(tl.float32)
    shift = tl.load(norm_bias + columns).to(tl.float32)
    result = centred / spread[:, None] * scale[None, :] + shift[None, :]
    tl.store(out + rows[:, None] * HIDDEN + columns[None, :], result.to(out.dtype.element_ty))


@triton.jit
def _linear_add_norm(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    out: tl.tensor,
    used: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """BLOCK_M rows of the result, in three parts of PART columns. BLOCK_K divides K."""
    first = tl.program_id(0) * BLOCK_M
    if first >= tl.load(used):
        return
    HIDDEN: tl.constexpr = 3 * PART
    rows, depth, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, PART)
    # Offsets of 32 bits from pointers that move leave more registers than pointers of 64 bits would.
    x_at = rows[:, None] * K + depth[None, :]
    weight_at = columns[None, :] * K + depth[:, None]
    part0 = tl.zeros((BLOCK_M, PART), dtype=tl.float32)
    part1 = tl.zeros((BLOCK_M, PART), dtype=tl.float32)
    part2 = tl.zeros((BLOCK_M, PART), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x + k + x_at)
        part0 = tl.dot(a, tl.load(weight + k + weight_at), part0)
        part1 = tl.dot(a, tl.load(weight + (k + PART * K) + weight_at), part1)
        part2 = tl.dot(a, tl.load(weight + (k + 2 * PART * K) + weight_at), part2)
    part0 = _part(part0, bias, residual, rows, columns, HIDDEN)
    part1 = _part(part1, bias, residual, rows, columns + PART, HIDDEN)
    part2 = _part(part2, bias, residual, rows, columns + 2 * PART, HIDDEN)
    mean = ((tl.sum(part0, 1) + tl.sum(part1, 1) + tl.sum(part2, 1)) / HIDDEN)[:, None]
    part0, part1, part2 = part0 - mean, part1 - mean, part2 - mean
    squares = tl.sum(part0 * part0, 1) + tl.sum(part1 * part1, 1) + tl.sum(part2 * part2, 1)
    spread = tl.sqrt(squares / HIDDEN + eps)
    _store_part(part0, spread, norm_weight, norm_bias, out, rows, columns, HIDDEN)
    _store_part(part1, spread, norm_weight, norm_bias, out, rows, columns + PART, HIDDEN)
    _store_part(part2, spread, norm_weight, norm_bias, out, rows, columns + 2 * PART, HIDDEN)


def linear_add_norm(
    x: torch.Tensor, weights: Weights, residual: torch.Tensor, norm: Norm, used: torch.Tensor
) -> torch.Tensor:
    """LayerNorm of the linear layer over `x` plus `residual`: float16 [tokens, hidden].

    `x` float16 [tokens, K], `residual` float16 [tokens, hidden], `used` int32 [1]. Rows of tiles beyond
    `used` are left as they are.
    """
    (weight, bias), (tokens, depth) = weights, x.shape
    if residual.shape[1] != 3 * PART or depth % DEPTH:
        return add_norm(linear(x, weights, used), residual, norm, used)
    out = residual.new_empty(residual.shape)
    _linear_add_norm[(tokens // ROWS,)](
        *(x, weight, bias, residual, norm.weight, norm.bias, out, used, norm.eps),
        K=depth,
        BLOCK_M=ROWS,
        PART=PART,
        BLOCK_K=DEPTH,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out

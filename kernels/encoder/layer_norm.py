"""LayerNorm over packed tokens, after a residual sum or after the sum of the embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from undertow.kernels.encoder.layout import PackedTokens

ROWS = 4
"""Rows of one program; they do not mix."""
WARPS = 4


class Norm(NamedTuple):
    """A LayerNorm's parameters: `weight` and `bias` float16 [hidden]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


@triton.jit
def _store_normalised(
    x: tl.tensor,
    out_at: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    eps: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    HIDDEN: tl.constexpr,
) -> None:
    """`x` float32 [rows, columns], zero outside of `mask`."""
    mean = tl.sum(x, 1) / HIDDEN
    centred = tl.where(mask, x - mean[:, None], 0.0)
    spread = tl.sqrt(tl.sum(centred * centred, 1) / HIDDEN + eps)
    inside = columns < HIDDEN
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = centred / spread[:, None] * scale[None, :] + shift[None, :]
    tl.store(out_at, result.to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm(
    x: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    used: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    first = tl.program_id(0) * ROWS
    count = tl.load(used)
    if first >= count:
        return
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (columns < HIDDEN)[None, :]
    at = rows[:, None] * HIDDEN + columns[None, :]
    both = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    both += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    _store_normalised(both, out + at, weight, bias, eps, columns, mask, HIDDEN)


@triton.jit
def _embed(
    ids: tl.tensor,
    positions: tl.tensor,
    words: tl.tensor,
    places: tl.tensor,
    kind: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    used: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    first = tl.program_id(0) * ROWS
    count = tl.load(used)
    if first >= count:
        return
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    mask = (rows < count)[:, None] & inside[None, :]
    word = tl.load(ids + rows, mask=rows < count, other=0)
    place = tl.load(positions + rows, mask=rows < count, other=0)
    total = tl.load(words + word[:, None] * HIDDEN + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    total += tl.load(places + place[:, None] * HIDDEN + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    of_kind = tl.load(kind + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(mask, total + of_kind[None, :], 0.0)
    out_at = out + rows[:, None] * HIDDEN + columns[None, :]
    _store_normalised(total, out_at, weight, bias, eps, columns, mask, HIDDEN)


def add_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm, used: torch.Tensor) -> torch.Tensor:
    """LayerNorm of x + residual, both float16 [tokens, hidden]: the same, with statistics in float32.

    Rows from `used`, int32 [1], on are left as they are.
    """
    out = x.new_empty(x.shape)
    tokens, hidden = x.shape
    _add_norm[(triton.cdiv(tokens, ROWS),)](
        *(x, residual, out, norm.weight, norm.bias, used, norm.eps),
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return out


def embed(
    packed: PackedTokens, words: torch.Tensor, places: torch.Tensor, kind: torch.Tensor, norm: Norm
) -> torch.Tensor:
    """LayerNorm of each token's word, position and type: float16 [tokens, hidden], summed in float32.

    `words` float16 [vocabulary, hidden], `places` float16 [positions, hidden], `kind` float16 [hidden].
    """
    tokens, hidden = len(packed.ids), words.shape[1]
    out = words.new_empty((tokens, hidden))
    _embed[(triton.cdiv(tokens, ROWS),)](
        *(packed.ids, packed.positions, words, places, kind, out),
        *(norm.weight, norm.bias, packed.used, norm.eps),
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return out

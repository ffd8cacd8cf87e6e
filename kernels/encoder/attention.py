"""Self-attention over packed windows: a token sees its window, or what came before; nothing is padded.

A window's rows are cut into blocks from its own start, so its bits do not depend on where it is packed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from undertow.kernels.encoder.layout import QUERY_BLOCK, PackedTokens

KEY_BLOCK = 32
WARPS = 4
STAGES = 2


@triton.jit
def _attention(
    qkv: tl.tensor,
    out: tl.tensor,
    block_start: tl.tensor,
    block_first: tl.tensor,
    block_length: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One head of one query block. `scale` holds log2(e), since exponentials are powers of two here."""
    head, block = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(block_start + block), tl.load(block_length + block)
    first = tl.load(block_first + block)
    rows = first + tl.arange(0, BLOCK_M)
    if length == 0:
        return
    dims = tl.arange(0, BLOCK_D)
    wide: tl.constexpr = (HEADS + 2 * KEY_HEADS) * DIM
    base = qkv + start * wide + head * DIM
    keys_at = qkv + start * wide + (HEADS + head // (HEADS // KEY_HEADS)) * DIM
    valid = (rows < length)[:, None] & (dims < DIM)[None, :]
    q = tl.load(base + rows[:, None] * wide + dims[None, :], mask=valid, other=0.0)
    greatest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    end = tl.minimum(length, first + BLOCK_M) if CAUSAL else length
    for begin in range(0, end, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        at = keys_at + keys[:, None] * wide + dims[None, :]
        there = (keys < length)[:, None] & (dims < DIM)[None, :]
        k = tl.load(at, mask=there, other=0.0)
        v = tl.load(at + KEY_HEADS * DIM, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = (keys < length)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1))
        shrunk = tl.exp2(greatest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrunk[:, None])
        greatest = higher
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    out_at = out + (start + rows)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
    tl.store(out_at, result, mask=valid)


def attention(
    qkv: torch.Tensor, packed: PackedTokens, heads: int, *, key_heads: int = 0, causal: bool = False
) -> torch.Tensor:
    """softmax(q k^T / sqrt(dim)) v within each window: [tokens, heads * dim], softmax in float32.

    `qkv` float16 or bfloat16 [tokens, (heads + 2 * key heads) * dim]: all heads' queries, then keys, then
    values; heads of at most WIDEST_HEAD. `key_heads`: of keys; 0: one to each of queries.
    `causal`: a token sees itself and those before it. Rows beyond the last window are left as they are.
    """
    key_heads = key_heads or heads
    dim = qkv.shape[1] // (heads + 2 * key_heads)
    out = qkv.new_empty((len(qkv), heads * dim))
    _attention[(heads, len(packed.block_start))](
        *(qkv, out, packed.block_start, packed.block_first, packed.block_length),
        math.log2(math.e) / math.sqrt(dim),
        HEADS=heads,
        KEY_HEADS=key_heads,
        CAUSAL=causal,
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_M=QUERY_BLOCK,
        BLOCK_N=KEY_BLOCK,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out

"""The small steps of a decoder over packed tokens: RMSNorm after a sum, rotation, the gated product.

Tensors are float16 or bfloat16, all of one type, but where another is named.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from undertow.kernels.encoder.layout import PackedTokens

VALUES = 4_096
"""What one program holds of a row or of several, which do not mix: 32 registers a thread."""
WARPS, MOST_ROWS, COLUMNS = 4, 16, 256


def rows_of(width: int) -> int:
    """The rows of one program, a power of two, where a row takes `width` places, a power of two."""
    return max(1, min(MOST_ROWS, VALUES // width))


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
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
    tl.store(total + at, both.to(total.dtype.element_ty), mask=mask)
    size = tl.sqrt(tl.sum(both * both, 1) / HIDDEN + eps)
    scale = tl.load(weight + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + at, (both / size[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_and_rotate(
    qkv: tl.tensor,
    positions: tl.tensor,
    turns: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    used: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One head of ROWS tokens, in place: queries come first, then keys, ROTATED heads in all."""
    first = tl.program_id(0) // ROTATED * ROWS
    head = tl.program_id(0) % ROTATED
    count = tl.load(used)
    if first >= count:
        return
    rows, dims = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (dims < HALF)[None, :]
    at = qkv + rows[:, None] * WIDE + head * 2 * HALF + dims[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
    weight = q_weight if head < HEADS else k_weight
    inside = dims < HALF
    a = a / size * tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    b = b / size * tl.load(weight + HALF + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    place = tl.load(positions + rows, mask=rows < count, other=0)
    turn = turns + place[:, None] * 2 * HALF + dims[None, :]
    cos, sin = tl.load(turn, mask=mask, other=0.0), tl.load(turn + HALF, mask=mask, other=0.0)
    tl.store(at, (a * cos - b * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (b * cos + a * sin).to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def _gated(
    both: tl.tensor,
    out: tl.tensor,
    used: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """COLUMNS columns of ROWS rows: silu(gate) * up; `both` has the gate's columns, then the other's."""
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // tiles * ROWS
    count = tl.load(used)
    if first >= count:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    at = both + rows[:, None] * 2 * WIDTH + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + residual, its RMSNorm), all [tokens, hidden], with sums in float32.

    Rows from `used`, int32 [1], on are left as they are.
    """
    total, out = torch.empty_like(x), torch.empty_like(x)
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    rows = rows_of(block)
    _add_rms_norm[(triton.cdiv(tokens, rows),)](
        *(x, residual, total, out, weight, used, eps),
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=rows,
        num_warps=WARPS,
    )
    return total, out


def turns_of(positions: int, dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, by which a head's halves are turned at each position: float32 [positions, dim]."""
    speeds = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


def norm_and_rotate(
    qkv: torch.Tensor,
    packed: PackedTokens,
    turns: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    heads: tuple[int, int],
) -> None:
    """RMSNorm of each query's and key's head, then its rotation by the token's position; in place.

    `qkv` [tokens, (heads + 2 * key heads) * dim], `weights` of queries and keys [dim],
    `heads` of queries and of keys. Su et al. 2021, as Llama and Qwen lay the halves out.
    """
    tokens, wide = qkv.shape
    rotated, half = sum(heads), turns.shape[1] // 2
    _norm_and_rotate[(triton.cdiv(tokens, MOST_ROWS) * rotated,)](
        *(qkv, packed.positions, turns, *weights, packed.used, eps),
        HEADS=heads[0],
        ROTATED=rotated,
        WIDE=wide,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        ROWS=MOST_ROWS,
        num_warps=WARPS,
    )


def gated(both: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """silu(a) * b of `both` [tokens, 2 * width], which has all a, then all b: [tokens, width]."""
    tokens, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty((tokens, width))
    _gated[(triton.cdiv(tokens, MOST_ROWS) * triton.cdiv(width, COLUMNS),)](
        both, out, used, WIDTH=width, COLUMNS=COLUMNS, ROWS=MOST_ROWS, num_warps=WARPS
    )
    return out

"""One vector of each packed window: the mean over its tokens, or its first or last token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 16
COLUMNS = 128
WARPS = 4


@triton.jit
def _mean(
    x: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """COLUMNS columns of one window. Sums run from the window's first row to its last."""
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - start
    inside = columns < HIDDEN
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, length, ROWS):
        rows = begin + tl.arange(0, ROWS)
        mask = (rows < length)[:, None] & inside[None, :]
        at = x + (start + rows)[:, None] * HIDDEN + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(length, 1)
    tl.store(out + sequence * HIDDEN + columns, mean, mask=inside)


def mean_of_windows(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """float32 [sequences, hidden] of `x` float16 [tokens, hidden]; zeros for an empty window."""
    hidden, sequences = x.shape[1], len(starts) - 1
    out = x.new_empty((sequences, hidden), dtype=torch.float32)
    _mean[(sequences, triton.cdiv(hidden, COLUMNS))](
        x, starts, out, HIDDEN=hidden, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return out


def first_of_windows(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The first row of each window: float32 [sequences, hidden]; any row for an empty window."""
    return x.index_select(0, starts[:-1].clamp(max=len(x) - 1)).float()


def last_of_windows(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The last row of each window: float32 [sequences, hidden]; any row for an empty window."""
    return x.index_select(0, (starts[1:] - 1).clamp(min=0)).float()

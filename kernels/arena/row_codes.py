"""int8 codes of rows, for a first pass of the gate that reads half the bytes.

The code of a row x: integers c_i = x_i / s, rounded, with s = max |x_i| / 127, one byte each, and zeros up
to a multiple of 16 bytes; then three fp32, s and upper bounds of |x - s c| and of |x|, and four zero bytes.
`kernels/error_bounds.py` says what follows for scores.
"""

from __future__ import annotations

import torch

BOUNDS_BYTES = 16
_LEVELS = 127
_BLOCK_BYTES = 8 << 20  # of fp64, a few times
# More than fp64 and the rounding to fp32 can take from a norm.
_UP, _UP_LEAST = 1 + 1e-6, 1e-12


def code_bytes(dim: int) -> int:
    return -(-dim // 16) * 16 + BOUNDS_BYTES


def codes_of(rows: torch.Tensor) -> torch.Tensor:
    """int32 [n, code_bytes(dim) / 4] of float16 [n, dim], on their device."""
    count, dim = rows.shape
    codes = torch.zeros((count, code_bytes(dim)), dtype=torch.int8, device=rows.device)
    block = max(1, _BLOCK_BYTES // (8 * dim))
    for start in range(0, count, block):
        part = slice(start, start + block)
        exact = rows[part].double()
        scale = (exact.abs().amax(1) / _LEVELS).float()
        wide = scale.double()[:, None]
        steps = torch.where(wide > 0, exact / wide, 0.0).round_().clamp_(-_LEVELS, _LEVELS)
        norms = torch.stack(((exact - steps * wide).norm(dim=1), exact.norm(dim=1)), 1)
        bounds = torch.cat((scale[:, None], (norms * _UP + _UP_LEAST).float()), 1)
        codes[part, :dim] = steps.to(torch.int8)
        codes[part, -BOUNDS_BYTES:-4] = bounds.view(torch.int8)
    return codes.view(torch.int32)

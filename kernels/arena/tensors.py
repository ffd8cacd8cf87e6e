"""Tensors of arenas on a device: their checks, and how arrays become tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undertow.kernels.arena.vector_checks import Vectors, check_form, refusal
from undertow.kernels.array_types import Float16s
from undertow.kernels.error_bounds import MAX_NORM

_BLOCK_ROWS = 4096


class CheckedRows(torch.Tensor):
    """Rows of an arena, already checked, so that `check_tensor` needs no synchronisation.

    Results computed from one are plain tensors. It must not be changed in place.
    """

    # Otherwise results of torch functions would be CheckedRows too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def check_tensor(vectors: torch.Tensor, dim: int, first: int = 0) -> None:
    """Check a tensor as `widened` does, on its device. first: the number of the first vector, for messages.

    Synchronises with the device once for all rows, and not at all for `CheckedRows`.
    """
    if vectors.dtype != torch.float16:
        raise ValueError(
            f"vectors must be a tensor of float16, not {str(vectors.dtype).removeprefix('torch.')}"
        )
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must have shape [n, {dim}], not {list(vectors.shape)}")
    if isinstance(vectors, CheckedRows):
        return
    bad = ~(torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32) <= MAX_NORM)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(refusal(first + row, vectors[row].cpu().numpy()))


def check_array(vectors: Vectors, dim: int) -> Float16s:
    """The vectors, NumPy float16 [n, dim], checked as by `widened`: by torch, which widens them faster."""
    checked = check_form(vectors, dim)
    # By blocks: a bulk load must not exist in fp32 as a whole.
    for start in range(0, len(checked), _BLOCK_ROWS):
        check_tensor(to_tensor(checked[start : start + _BLOCK_ROWS]), dim, start)
    return checked


def to_tensor(vectors: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor, which shares memory if the array is contiguous and writable."""
    values = np.ascontiguousarray(vectors)
    # torch warns about read-only memory
    return torch.from_numpy(values if values.flags.writeable else values.copy())

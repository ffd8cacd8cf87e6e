"""Checks of vectors before kernels read them: float16, the arena's dimension, finite, norm at most 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undertow.kernels.error_bounds import MAX_NORM

Float16s = NDArray[np.float16]
Vectors = Float16s | torch.Tensor

BLOCK_ROWS = 4096


class CheckedRows(torch.Tensor):
    """Rows of an arena, already checked, so that `check_tensor` needs no synchronisation.

    Results computed from one are plain tensors. It must not be changed in place.
    """

    # Otherwise results of torch functions would be CheckedRows too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def check_form(
    vectors: NDArray[Any] | torch.Tensor, dim: int, *dtypes: type[np.floating[Any]]
) -> NDArray[Any]:
    """The vectors, if a NumPy array [n, dim] of one of the dtypes, by default float16. ValueError."""
    wanted = dtypes or (np.float16,)
    if not isinstance(vectors, np.ndarray) or vectors.dtype not in wanted:
        names = [np.dtype(dtype).name for dtype in wanted]
        found = getattr(vectors, "dtype", type(vectors).__name__)
        raise ValueError(f"vectors must be an array of {' or '.join(names)}, not {found}")
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must have shape [n, {dim}], not {list(vectors.shape)}")
    return vectors


def widened(
    vectors: NDArray[Any], dim: int, *dtypes: type[np.floating[Any]], first: int = 0
) -> NDArray[np.float32]:
    """The checked vectors as float32 [n, dim]. Values must be finite, norms at most 4. ValueError.

    dtypes: accepted dtypes, by default float16. first: the number of the first vector, for error messages.
    """
    check_form(vectors, dim, *dtypes)
    wide = to_float32(vectors)
    # Written so that NaN fails it.
    bad = np.flatnonzero(~(np.einsum("nd,nd->n", wide, wide) <= MAX_NORM * MAX_NORM))
    if len(bad):
        raise ValueError(refusal(first + int(bad[0]), wide[bad[0]]))
    return wide


def check_array(vectors: Vectors, dim: int) -> Float16s:
    """The vectors, NumPy float16 [n, dim], checked as by `widened`."""
    checked = check_form(vectors, dim)
    # Converted by blocks: a bulk load must not exist in fp32 as a whole.
    for start in range(0, len(checked), BLOCK_ROWS):
        widened(checked[start : start + BLOCK_ROWS], dim, first=start)
    return checked


def check_tensor(vectors: torch.Tensor, dim: int) -> None:
    """Check a tensor as `widened` does, on its device.

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
    norms = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32)
    bad = ~(norms <= MAX_NORM)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(refusal(row, vectors[row].cpu().numpy()))


def refusal(row: int, vector: NDArray[Any]) -> str:
    """The message for a bad vector, number `row` of its batch."""
    problem = "has a norm above 4" if np.isfinite(vector).all() else "is not finite"
    return f"vector {row} {problem}: L2-normalise it first"


def to_float32(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """The same values as contiguous float32; by torch, which converts fp16 20 times as fast as NumPy."""
    return to_tensor(vectors).float().numpy()


def to_tensor(vectors: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor, which shares memory if the array is contiguous and writable."""
    values = np.ascontiguousarray(vectors)
    # torch warns about read-only memory
    return torch.from_numpy(values if values.flags.writeable else values.copy())

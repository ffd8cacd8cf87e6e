"""Checks of vectors before kernels read them: float16, the arena's dimension, finite, norm at most 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.array_types import Float16s, Float32s
from undertow.kernels.error_bounds import MAX_NORM

if TYPE_CHECKING:  # host memory needs no torch, which takes a second to load
    import torch

Vectors: TypeAlias = "Float16s | torch.Tensor"


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


def widened(vectors: NDArray[Any], dim: int, *dtypes: type[np.floating[Any]]) -> Float32s:
    """The checked vectors as float32 [n, dim]. Values must be finite, norms at most 4. ValueError.

    dtypes: accepted dtypes, by default float16.
    """
    check_form(vectors, dim, *dtypes)
    wide = np.ascontiguousarray(vectors, np.float32)
    # Written so that NaN fails it.
    bad = np.flatnonzero(~(np.einsum("nd,nd->n", wide, wide) <= MAX_NORM * MAX_NORM))
    if len(bad):
        raise ValueError(refusal(int(bad[0]), wide[bad[0]]))
    return wide


def refusal(row: int, vector: NDArray[Any]) -> str:
    """The message for a bad vector, number `row` of its batch."""
    problem = "has a norm above 4" if np.isfinite(vector).all() else "is not finite"
    return f"vector {row} {problem}: L2-normalise it first"

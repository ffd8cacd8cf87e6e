"""The cosine that a share of the pairs among some vectors reaches, exactly.

An fp16 value is a multiple of 2^-24, so a product is one of 2^-48, and no sum of products of two unit vectors
needs more than fp64's 53 bits. So no sum is rounded, whatever its order, the device or the threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from undertow.kernels.arena.compiled_rows import sums
from undertow.kernels.arena.vector_checks import Vectors
from undertow.kernels.array_types import Float64s, Int32s, Int64s


def pair_quantiles(vectors: Vectors, shares: Sequence[float]) -> tuple[float, ...]:
    """For each share the greatest cosine that at least this share of the pairs has: 1 for more than 1.

    vectors: float16 [n, dim], n at least 2, normalised, NumPy or a tensor; shares: each above 0, below 1.
    """
    count = len(vectors)
    if isinstance(vectors, np.ndarray):
        of_pairs = np.empty(count * (count - 1) // 2)
        _fill(vectors.astype(np.float64), of_pairs)
    else:
        rows = vectors.double()
        of_pairs = (rows @ rows.T).cpu().numpy()[np.tri(count, k=-1, dtype=np.bool_)]
    places = [len(of_pairs) - max(1, int(np.ceil(share * len(of_pairs)))) for share in shares]
    ordered = np.partition(of_pairs, places)
    return tuple(float(np.clip(ordered[place], -1.0, 1.0)) for place in places)


@sums
def _fill(rows: Float64s, of_pairs: Float64s) -> None:
    """Write the lower triangle of rows @ rows.T, row by row.

    It takes two rows with two others at a time, and so reads each row half as often. NumPy is not used: its
    BLAS would start a second thread, which spins for many milliseconds after each product.
    """
    last = rows.shape[0] - 1
    for i in range(0, last + 1, 2):
        k = min(i + 1, last)
        for j in range(0, k, 2):
            m = j + 1
            ij = im = kj = km = 0.0
            for c in range(rows.shape[1]):
                ij += rows[i, c] * rows[j, c]
                im += rows[i, c] * rows[m, c]
                kj += rows[k, c] * rows[j, c]
                km += rows[k, c] * rows[m, c]
            if j < i:  # then m is, too: both are even
                of_pairs[i * (i - 1) // 2 + j] = ij
                of_pairs[i * (i - 1) // 2 + m] = im
            if k > i:
                of_pairs[k * (k - 1) // 2 + j] = kj
                if m < k:
                    of_pairs[k * (k - 1) // 2 + m] = km


def sample_order(seqs: Int32s) -> Int64s:
    """The places of `seqs`, int32 [n], in a random order that is the same everywhere: int64 [n].

    By splitmix64: the first few are a fair sample, and most of them stay so as more seqs follow.
    """
    mixed = seqs.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")

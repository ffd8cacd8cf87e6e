"""Which cosine a share of a tenant's pairs of turns reaches, before the tenant has told its own.

Measured rows only: all pairs within each of LoCoMo's five development conversations (1,414 turns, 210,728
pairs), turns without timestamps, to two digits, as single conversations differ by more (docs/cost.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

# By the encoder's name without its folders: (share of pairs, cosine), ascending.
MEASURED: Mapping[str, tuple[tuple[float, float], ...]] = {
    "all-MiniLM-L6-v2": (
        *((0.001, 0.83), (0.0025, 0.80), (0.005, 0.78), (0.01, 0.75), (0.02, 0.71), (0.025, 0.70)),
        *((0.05, 0.66), (0.1, 0.60), (0.2, 0.54)),
    ),
}
# Of an encoder that was not measured. It is no statement about that encoder: the first turns are decided by
# it, then the tenant's own pairs count.
GENERIC = "all-MiniLM-L6-v2"


def prior_theta(encoder: str, share: float) -> float:
    """The cosine that this share of pairs reaches, between measured shares by a straight line.

    `encoder`: its name or folder.
    """
    rows = MEASURED.get(encoder.rstrip("/").rpartition("/")[2], MEASURED[GENERIC])
    if share <= rows[0][0]:
        return rows[0][1]
    for (below, high), (above, low) in pairwise(rows):
        if share <= above:
            return round(high + (low - high) * (share - below) / (above - below), 4)
    return rows[-1][1]

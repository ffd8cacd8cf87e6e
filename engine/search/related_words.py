"""Related English words, which keyword search takes for one another at a discount: exercise and yoga.

The table is data: for each word the eight nearest of 14,700 common words by an encoder's cosine
(bench/quality/evidence/related_words.py makes it). It is the same for every tenant, encoder and machine.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from undertow.kernels.array_types import Float64s, Uint8s, Uint16s, Uint32s
from undertow.kernels.bm25 import find_related

TABLE = Path(__file__).with_name("related_words.npz")
# What a related word counts if it means the same; one at the least cosine of the table counts nothing.
RELATED_SHARE = 0.7
LEAST_COSINE = 0.4
# A closeness is stored as a byte.
STEPS = 255


class Table(NamedTuple):
    """Terms, uint32 [n], ascending. Of each its related terms, the closest first.

    `near`, uint16 [n, most]: their places in `terms`; `closeness`, uint8 [n, most].
    """

    terms: Uint32s
    near: Uint16s
    closeness: Uint8s


@cache
def table() -> Table:
    """The table, read once."""
    with np.load(TABLE, allow_pickle=False) as kept:
        return Table(kept["terms"], kept["near"], kept["closeness"])


def related(terms: Uint32s) -> tuple[Uint32s, Float64s]:
    """The related terms of each, uint32 [n, most], and what each counts, float64 [n, most] (bm25.Related)."""
    found = np.zeros((len(terms), table().near.shape[1]), np.uint32)
    closeness = np.zeros(found.shape)
    find_related(terms, *table(), RELATED_SHARE / STEPS, found, closeness)
    return found, closeness

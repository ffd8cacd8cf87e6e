"""The score of a text by its cosine and the words of the query together."""

from __future__ import annotations

import math

# A text with every word of the query has a BM25 share of about 0.45, which moves its cosine three quarters of
# the way to 1. Quality is the same from 2 to 5, see docs/decisions/0023.
WORDS_WEIGHT = 3.0
# Of what the nearer neighbour of a text is nearer to the query than the text itself, this part counts for it.
LENT_SHARE = 0.3
# The best candidates of each search method, which are then scored by both.
CANDIDATES = 100


def raised(cosine: float, share: float) -> float:
    """The cosine, moved towards 1 by the text's share of the query's keywords.

    Never below the cosine, never above 1, and 1 for the query itself. So scores keep the range that they have
    without keywords.
    """
    if share == 0.0:
        return cosine  # bit-identical
    return 1.0 - (1.0 - cosine) * math.exp(-WORDS_WEIGHT * share)


def lent(cosine: float, neighbour: float) -> float:
    """The cosine, moved towards that of a text's nearer neighbour if that is above it."""
    return cosine + LENT_SHARE * max(neighbour - cosine, 0.0)

"""Makes the table of related words (engine/search/related_words.py) with an encoder.

    python -m undertow.bench.quality.evidence.related_words vocab.txt

The words are those of a vocabulary file, one a line, the most frequent first, such as BERT's: of words with
one stem the first. The encoder is the settings' (`UNDERTOW_ENCODER`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from undertow.engine.base.config import Settings
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.search.analyzer import Analyzer
from undertow.engine.search.related_words import LEAST_COSINE, STEPS, TABLE, Table

NEIGHBOURS = 8


def words_by_term(lines: Iterable[str]) -> dict[int, str]:
    """The English words that search takes for terms, the first of each term."""
    terms = Analyzer()
    found: dict[int, str] = {}
    for word in lines:
        if word.isascii() and word.isalpha() and len(word) > 2 and (of := terms.of(word)):
            found.setdefault(of[0], word)
    return found


def table_of(terms: Iterable[int], vectors: Float16) -> Table:
    """The nearest of the terms by the cosine of their vectors, float16 [n, dim]; fewer than NEIGHBOURS: 0."""
    names = np.fromiter(terms, np.uint32)
    order = np.argsort(names)
    rows = vectors[order].astype(np.float64)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -1.0)
    near = np.argsort(-cosines, axis=1, kind="stable")[:, :NEIGHBOURS]
    above = (np.take_along_axis(cosines, near, 1) - LEAST_COSINE) / (1 - LEAST_COSINE)
    closeness = np.rint(above.clip(0, 1) * STEPS).astype(np.uint8)
    return Table(names[order], near.astype(np.uint16), closeness)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    words = words_by_term(given.vocabulary.read_text().splitlines())
    vectors = make_encoder(Settings()).encode(list(words.values()))
    np.savez_compressed(given.out, **table_of(words, vectors)._asdict())
    print(f"{len(words)} words in {given.out}")


if __name__ == "__main__":
    main()

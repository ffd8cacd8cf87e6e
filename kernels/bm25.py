"""BM25 (Robertson and Zaragoza, 2009) over the texts of one segment, which come, change and go one by one.

A text is a bag of terms, and a term a number: the index holds no words. Its statistics (how many texts have
a term, how long texts are) are counted over the texts that are there now, when a query asks. So a score
depends on these texts alone: not on the order in which they came, nor on what has gone.

The postings lie sorted by term, those of new texts behind them as they came, to be sorted in once they are
an eighth of all. About 10 bytes a posting.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Int32s = NDArray[np.int32]
Uint32s = NDArray[np.uint32]

# how soon repeats of a term stop to count, and how much longer texts are discounted: the usual values
K1, B = 1.2, 0.75

_GONE = -1
# new postings that stay unsorted: these at least, or this share of the sorted ones
_UNSORTED = 8_192
_UNSORTED_SHARE = 1 / 8


class Bm25:
    """The texts of one segment by arena row. One owner calls it."""

    def __init__(self) -> None:
        self._doc_of_row: dict[int, int] = {}
        # by doc: a text's number in the order of coming
        self._row_of_doc = array("i")
        self._length_of_doc = array("i")
        self._total_length = 0
        self._terms = np.empty(0, np.uint32)
        self._docs = np.empty(0, np.int32)
        self._counts = np.empty(0, np.int32)
        self._new_terms, self._new_docs, self._new_counts = array("I"), array("i"), array("i")

    def __len__(self) -> int:
        return len(self._doc_of_row)

    @property
    def nbytes(self) -> int:
        """Of the postings."""
        return 12 * (len(self._terms) + len(self._new_terms))

    def put(self, row: int, terms: Iterable[int]) -> None:
        """The text of a row, in the place of what it had."""
        self.drop(row)
        counts = Counter(terms)
        doc, length = len(self._row_of_doc), counts.total()
        self._doc_of_row[row] = doc
        self._row_of_doc.append(row)
        self._length_of_doc.append(length)
        self._total_length += length
        self._new_terms.extend(counts)
        self._new_docs.extend([doc] * len(counts))
        self._new_counts.extend(counts.values())

    def drop(self, row: int) -> None:
        """The row has no text any more."""
        doc = self._doc_of_row.pop(row, None)
        if doc is not None:
            self._row_of_doc[doc] = _GONE
            self._total_length -= self._length_of_doc[doc]

    def scores(self, terms: Sequence[int], rows: int) -> Float64s:
        """[rows]: how much of what the query asks each row's text has, from 0 to (never reached) 1.

        That is its BM25 score over the most that a text could get, so that queries of any length and
        segments of any size compare. Terms that no text has count there too: a query of such words is
        one that the segment cannot answer by words.
        """
        self.sort_in()
        out, most = np.zeros(rows), 0.0
        row_of_doc = np.frombuffer(self._row_of_doc, np.int32)
        length_of_doc = np.frombuffer(self._length_of_doc, np.int32)
        for term in dict.fromkeys(terms):
            docs, counts = self._postings(term)
            owners, lengths = row_of_doc[docs], length_of_doc[docs]
            if len(self) < len(row_of_doc):  # some have gone
                there = owners != _GONE
                owners, counts, lengths = owners[there], counts[there], lengths[there]
            weight = np.log1p((len(self) - len(owners) + 0.5) / (len(owners) + 0.5))
            most += weight
            if len(owners):
                norm = K1 * (1 - B + B * lengths * (len(self) / self._total_length))
                out[owners] += weight * (counts / (counts + norm))
        return out / most if most else out

    def _postings(self, term: int) -> tuple[Int32s, Int32s]:
        """The texts that had a term when they came, and how often."""
        key = np.uint32(term)  # of the array's own type: else all of it would be converted
        start, stop = self._terms.searchsorted(key, "left"), self._terms.searchsorted(key, "right")
        new = np.flatnonzero(np.frombuffer(self._new_terms, np.uint32) == term)
        docs = np.concatenate((self._docs[start:stop], np.frombuffer(self._new_docs, np.int32)[new]))
        counts = np.concatenate((self._counts[start:stop], np.frombuffer(self._new_counts, np.int32)[new]))
        return docs, counts

    def sort_in(self) -> None:
        """Once there are enough new postings: all sorted by term, without those of texts that have gone.

        `scores` does so first; a caller who puts many texts does better to spread it over them.
        """
        if len(self._new_terms) <= max(_UNSORTED, _UNSORTED_SHARE * len(self._terms)):
            return
        terms = np.concatenate((self._terms, np.frombuffer(self._new_terms, np.uint32)))
        docs = np.concatenate((self._docs, np.frombuffer(self._new_docs, np.int32)))
        counts = np.concatenate((self._counts, np.frombuffer(self._new_counts, np.int32)))
        there = np.flatnonzero(np.frombuffer(self._row_of_doc, np.int32)[docs] != _GONE)
        order = there[np.argsort(terms[there], kind="stable")]
        self._terms, self._docs, self._counts = terms[order], docs[order], counts[order]
        self._new_terms, self._new_docs, self._new_counts = array("I"), array("i"), array("i")

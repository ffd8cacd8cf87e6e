"""BM25 (Robertson and Zaragoza, 2009) over the texts of one segment, with insertion and deletion.

A text is a bag of terms, and a term is a number: the index holds no words. Document frequencies and lengths
are counted over the current texts at query time. So scores depend on these texts alone, neither on their
order of arrival nor on deleted texts.

Postings are sorted by term. Those of new texts are appended unsorted, and sorted in once they are an eighth
of all. About 10 bytes a posting.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Int32s = NDArray[np.int32]

# Saturation of term frequency, and length normalisation: the usual values.
K1, B = 1.2, 0.75

_GONE = -1
# New postings that may stay unsorted: this number, or this share of the sorted ones.
_UNSORTED = 8_192
_UNSORTED_SHARE = 1 / 8


class Bm25:
    """The texts of one segment by arena row. Not thread-safe."""

    def __init__(self) -> None:
        self._doc_of_row: dict[int, int] = {}
        # By doc, the number of a text in order of arrival.
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
        """Bytes of the postings."""
        return 12 * (len(self._terms) + len(self._new_terms))

    def put(self, row: int, terms: Iterable[int]) -> None:
        """Set the text of a row, replacing the former one."""
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
        """Remove the text of a row."""
        doc = self._doc_of_row.pop(row, None)
        if doc is not None:
            self._row_of_doc[doc] = _GONE
            self._total_length -= self._length_of_doc[doc]

    def scores(self, terms: Sequence[int], rows: int) -> Float64s:
        """float64 [rows]: each row's BM25 score as a share of the maximum for this query, in [0, 1).

        The maximum makes queries of any length and segments of any size comparable. It includes terms that
        no text has: a query of such words cannot be answered by keywords.
        """
        self.sort_in()
        out, most = np.zeros(rows), 0.0
        row_of_doc = np.frombuffer(self._row_of_doc, np.int32)
        length_of_doc = np.frombuffer(self._length_of_doc, np.int32)
        for term in dict.fromkeys(terms):
            docs, counts = self._postings(term)
            owners, lengths = row_of_doc[docs], length_of_doc[docs]
            if len(self) < len(row_of_doc):  # some were removed
                there = owners != _GONE
                owners, counts, lengths = owners[there], counts[there], lengths[there]
            weight = np.log1p((len(self) - len(owners) + 0.5) / (len(owners) + 0.5))
            most += weight
            if len(owners):
                norm = K1 * (1 - B + B * lengths * (len(self) / self._total_length))
                out[owners] += weight * (counts / (counts + norm))
        return out / most if most else out

    def _postings(self, term: int) -> tuple[Int32s, Int32s]:
        """The docs with a term, and its frequencies. Removed docs may be included."""
        key = np.uint32(term)  # the array's own dtype; otherwise the whole array would be converted
        start, stop = self._terms.searchsorted(key, "left"), self._terms.searchsorted(key, "right")
        new = np.flatnonzero(np.frombuffer(self._new_terms, np.uint32) == term)
        docs = np.concatenate((self._docs[start:stop], np.frombuffer(self._new_docs, np.int32)[new]))
        counts = np.concatenate((self._counts[start:stop], np.frombuffer(self._new_counts, np.int32)[new]))
        return docs, counts

    def sort_in(self) -> None:
        """Sort in new postings once there are enough, without those of removed texts.

        `scores` does this first. A caller that adds many texts should call it in between.
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

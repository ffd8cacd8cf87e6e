"""BM25 (Robertson and Zaragoza, 2009) over the texts of one segment, with insertion and deletion.

A text is a bag of terms, and a term is a number: the index holds no words. Document frequencies and lengths
are counted over the current texts at query time. So scores depend on these texts alone, neither on their
order of arrival nor on deleted texts.

Postings are sorted by term. Those of new texts are appended unsorted, and sorted in once they are an eighth
of all. 12 bytes a posting.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.compiled_rows import jit, lean
from undertow.kernels.array_types import Float64s, Int32s, Int64s, Uint8s, Uint16s, Uint32s

# Terms uint32 [n] -> their related terms, uint32 [n, most], the closest first, and how close each is, float64
# [n, most] in [0, 1]; 0 where there are no more.
Related = Callable[[Uint32s], tuple[Uint32s, Float64s]]

# Saturation of term frequency, and length normalisation: the usual values.
K1, B = 1.2, 0.75

_GONE = -1
# New postings that may stay unsorted: this number, or this share of the sorted ones.
_UNSORTED = 8_192
_UNSORTED_SHARE = 1 / 8
# Each of a query's terms is compared with each of them: in all, about a millisecond.
_COMPARED = 1 << 20


@lean
def _score(
    asked: Uint32s,
    related: Uint32s,
    closeness: Float64s,
    terms: Uint32s,
    docs: Int32s,
    counts: Int32s,
    new_terms: Uint32s,
    new_docs: Int32s,
    new_counts: Int32s,
    row_of_doc: Int32s,
    length_of_doc: Int32s,
    texts: int,
    total_length: int,
    owner: Int32s,
    best: Float64s,
    out: Float64s,
) -> None:
    """Add up the scores of the asked terms, each once, in `out` [rows], as shares of the maximum.

    For an asked term the best of it and of its `related` terms counts, [asked, n] with their `closeness`, 0
    for none. `owner` and `best`, [rows] of -1 and of anything: the last term found in a row, and its score.
    """
    most, per_length = 0.0, texts / total_length
    for n in range(asked.shape[0]):
        holders = _holders(asked[n], terms, docs, new_terms, new_docs, row_of_doc)
        weight = math.log1p((texts - holders + 0.5) / (holders + 0.5))
        most += weight
        for r in range(-1, related.shape[1]):
            term, worth = asked[n], weight
            if r >= 0:
                if closeness[n, r] == 0.0:
                    break
                term = related[n, r]
                holders = _holders(term, terms, docs, new_terms, new_docs, row_of_doc)
                worth = closeness[n, r] * min(weight, math.log1p((texts - holders + 0.5) / (holders + 0.5)))
            if not holders:
                continue
            for i in range(_first(terms, int(term)), _first(terms, int(term) + 1)):
                score = worth * _saturated(docs[i], counts[i], length_of_doc, per_length)
                _offer(out, owner, best, row_of_doc[docs[i]], n, score)
            for i in range(new_terms.shape[0]):
                if new_terms[i] == term:
                    score = worth * _saturated(new_docs[i], new_counts[i], length_of_doc, per_length)
                    _offer(out, owner, best, row_of_doc[new_docs[i]], n, score)
    if most:
        out /= most


@lean
def _holders(
    term: int, terms: Uint32s, docs: Int32s, new_terms: Uint32s, new_docs: Int32s, row_of_doc: Int32s
) -> int:
    """The number of texts that have the term."""
    holders = 0
    for i in range(_first(terms, int(term)), _first(terms, int(term) + 1)):
        holders += row_of_doc[docs[i]] != _GONE
    for i in range(new_terms.shape[0]):
        holders += new_terms[i] == term and row_of_doc[new_docs[i]] != _GONE
    return holders


@lean
def _count_holders(
    asked: Uint32s,
    terms: Uint32s,
    docs: Int32s,
    new_terms: Uint32s,
    new_docs: Int32s,
    row_of_doc: Int32s,
    holders: Int64s,
) -> int:
    """Fill `holders` [asked] with the number of texts that have each term. Returns the largest."""
    most = 0
    for n in range(asked.shape[0]):
        holders[n] = _holders(asked[n], terms, docs, new_terms, new_docs, row_of_doc)
        most = max(most, holders[n])
    return most


@lean
def _saturated(doc: int, count: int, length_of_doc: Int32s, per_length: float) -> float:
    """What a term's frequency in a text counts, below 1. `per_length`: 1 / the mean length."""
    saturated: float = count / (count + K1 * (1 - B + B * length_of_doc[doc] * per_length))
    return saturated


@lean
def _offer(out: Float64s, owner: Int32s, best: Float64s, row: int, n: int, score: float) -> None:
    """Raise a row's score for the asked term `n`, unless the text was removed or has scored higher for it."""
    if row == _GONE:
        return
    if owner[row] != n:
        owner[row] = n
        best[row] = 0.0
    if score > best[row]:
        out[row] += score - best[row]
        best[row] = score


@lean
def _first(terms: Uint32s, term: int) -> int:
    """The first place of `term` or a higher one among sorted terms."""
    low, high = 0, terms.shape[0]
    while low < high:
        middle = (low + high) // 2
        if np.int64(terms[middle]) < term:
            low = middle + 1
        else:
            high = middle
    return low


@lean
def find_related(
    asked: Uint32s,
    terms: Uint32s,
    near: Uint16s,
    steps: Uint8s,
    a_step: float,
    found: Uint32s,
    closeness: Float64s,
) -> None:
    """Fill `found` and `closeness`, zeros [asked, most], from a table (engine/search/related_words.py).

    terms [n], ascending; near [n, most]: the places of their related terms; steps [n, most]: their closeness.
    """
    for n in range(asked.shape[0]):
        place = _first(terms, int(asked[n]))
        if place < terms.shape[0] and terms[place] == asked[n]:
            for i in range(near.shape[1]):
                found[n, i] = terms[near[place, i]]
                closeness[n, i] = steps[place, i] * a_step


@jit
def place_rows(session: Int32s, longest: int, stretch: Int64s, beside: Int64s) -> None:
    """Fill `stretch` [rows] and `beside` [rows, 2], for `session` [rows], the number of each row's or -1.

    A session's number is below the number of rows, which is not checked. Up to `longest` consecutive rows of
    a session are a stretch. Rows of no session are in none, and beside none.
    """
    last = np.full(session.shape[0], -1)  # by session: its last row, how many it has, its last stretch
    sizes, newest = np.zeros_like(last), np.zeros_like(last)
    stretches = 0
    for row in range(session.shape[0]):
        stretch[row] = beside[row, 0] = beside[row, 1] = -1
        number = session[row]
        if number < 0:
            continue
        if last[number] >= 0:
            beside[row, 0], beside[last[number], 1] = last[number], row
        if sizes[number] % longest == 0:
            newest[number] = stretches
            stretches += 1
        stretch[row] = newest[number]
        last[number], sizes[number] = row, sizes[number] + 1


@jit
def add_context(
    own: Float64s,
    stretch: Int64s,
    beside: Int64s,
    neighbour_share: float,
    stretch_share: float,
    shares: Float64s,
) -> None:
    """Add parts of the scores of neighbours and of a stretch's best to `shares` [rows], a copy of `own`.

    `stretch`, `beside`: those of `place_rows`.
    """
    most = np.zeros(stretch.shape[0])  # there are no more stretches than rows
    for row in range(shares.shape[0]):
        for i in range(2):
            if beside[row, i] >= 0:
                shares[row] += neighbour_share * own[beside[row, i]]
        if shares[row]:
            most[stretch[row]] = max(most[stretch[row]], shares[row])
    for row in range(shares.shape[0]):
        if shares[row]:
            shares[row] += min(shares[row], stretch_share * most[stretch[row]])


def none_related(terms: Uint32s) -> tuple[Uint32s, Float64s]:
    return np.empty((len(terms), 0), np.uint32), np.empty((len(terms), 0))


def _merged(old: NDArray[Any], new: NDArray[Any], places: Int64s, is_old: NDArray[np.bool_]) -> NDArray[Any]:
    """Both in one array, the new ones at their places."""
    merged = np.empty(len(is_old), old.dtype)
    merged[places], merged[is_old] = new, old
    return merged


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
        # whether sorted postings may be of removed texts
        self._dropped = False

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
            self._dropped = True
            self._total_length -= self._length_of_doc[doc]

    def scores(self, terms: Sequence[int], rows: int, related: Related = none_related) -> Float64s:
        """float64 [rows]: each row's BM25 score as a share of the maximum for this query, in [0, 1).

        The maximum makes queries of any length and segments of any size comparable. It includes terms that
        no text has: a query of such words cannot be answered by keywords. A text that has a term's related
        one in its place gets its closeness of the score that the rarer of the two does not exceed.
        """
        asked = np.fromiter(dict.fromkeys(terms), np.uint32)
        near, closeness = related(asked)
        self._sort_in(most=min(_UNSORTED, _COMPARED // max(1, len(asked) * (1 + near.shape[1]))))
        out = np.zeros(rows)
        _score(
            asked,
            near,
            closeness,
            self._terms,
            self._docs,
            self._counts,
            np.frombuffer(self._new_terms, np.uint32),
            np.frombuffer(self._new_docs, np.int32),
            np.frombuffer(self._new_counts, np.int32),
            np.frombuffer(self._row_of_doc, np.int32),
            np.frombuffer(self._length_of_doc, np.int32),
            len(self),
            self._total_length,
            np.full(rows, -1, np.int32),
            np.empty(rows),
            out,
        )
        return out

    def common(self, terms: Sequence[int]) -> set[int]:
        """Those of the terms that more than half of the texts have."""
        asked = np.fromiter(dict.fromkeys(terms), np.uint32)
        holders = np.empty(len(asked), np.int64)
        most = _count_holders(
            asked,
            self._terms,
            self._docs,
            np.frombuffer(self._new_terms, np.uint32),
            np.frombuffer(self._new_docs, np.int32),
            np.frombuffer(self._row_of_doc, np.int32),
            holders,
        )
        return set(asked[2 * holders > len(self)].tolist()) if 2 * most > len(self) else set()

    def sort_in(self) -> None:
        """Sort in new postings once there are enough, without those of removed texts.

        `scores` does this first. A caller that adds many texts should call it in between.
        """
        self._sort_in(_UNSORTED)

    def _sort_in(self, most: int) -> None:
        if len(self._new_terms) <= max(most, _UNSORTED_SHARE * len(self._terms)):
            return
        terms, docs = np.frombuffer(self._new_terms, np.uint32), np.frombuffer(self._new_docs, np.int32)
        row_of_doc = np.frombuffer(self._row_of_doc, np.int32)
        there = np.flatnonzero(row_of_doc[docs] != _GONE)
        order = there[np.argsort(terms[there], kind="stable")]
        if self._dropped:
            kept = row_of_doc[self._docs] != _GONE
            self._terms, self._docs, self._counts = self._terms[kept], self._docs[kept], self._counts[kept]
        # behind those of the same term: to merge them takes much less time than to sort all
        places = np.searchsorted(self._terms, terms[order], side="right") + np.arange(len(order))
        is_old = np.ones(len(self._terms) + len(order), np.bool_)
        is_old[places] = False
        counts = np.frombuffer(self._new_counts, np.int32)
        self._terms, self._docs, self._counts = (
            _merged(old, new[order], places, is_old)
            for old, new in ((self._terms, terms), (self._docs, docs), (self._counts, counts))
        )
        self._dropped = False
        self._new_terms, self._new_docs, self._new_counts = array("I"), array("i"), array("i")

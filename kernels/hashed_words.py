"""Compiled word counts of the hashing encoder: the words of texts, their rows in a table, and their sums.

A table has one row a word: `words` uint8, the bytes of all words one after another, row r ending at
`word_ends[r]` (int64); `slots` int64, a power of two: open addressing by FNV-1a, -1 where free. Row 0 is the
empty word.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.compiled_rows import jit
from undertow.kernels.array_types import Bytes, Float64s, Int64s, Uint16s

# Of each byte: itself in lower case if it may stand in a word, else 0. Bytes of non-ASCII letters may.
_FOLDED = np.zeros(256, np.uint8)
for _byte in range(256):
    if _byte >= 128 or chr(_byte).isalnum() or chr(_byte) == "_":
        _FOLDED[_byte] = ord(chr(_byte).lower()) if _byte < 128 else _byte

_FNV_BASIS = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


@jit
def _slot_of(words: Bytes, start: int, end: int, slots: Int64s) -> int:
    value = _FNV_BASIS
    for i in range(start, end):
        value = (value ^ np.uint64(words[i])) * _FNV_PRIME
    slot: int = np.int64(value & np.uint64(len(slots) - 1))  # type: ignore[assignment]
    return slot


@jit
def add_words(
    text: Bytes,
    lengths: Int64s,
    hashes: Uint16s,
    dim: int,
    first: int,
    words: Bytes,
    word_ends: Int64s,
    bins: NDArray[np.int16],
    slots: Int64s,
    in_slots: int,
) -> None:
    """Add different words that are not in the table, from row `first` on. It has room for them.

    text: the words' bytes one after another, of these lengths. hashes: uint16 [words * hits], from which
    their features are made. in_slots: how many rows the slots have; all others are entered.
    """
    end = word_ends[first - 1] if first else 0
    words[end : end + len(text)] = text
    for i in range(len(lengths)):
        end += lengths[i]
        word_ends[first + i] = end
        for hit in range(bins.shape[1]):
            bins[first + i, hit] = hashes[i * bins.shape[1] + hit] % (2 * dim)
    for row in range(in_slots, first + len(lengths)):
        slot = _slot_of(words, word_ends[row - 1] if row else 0, word_ends[row], slots)
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = row


@jit
def find_words(
    data: Bytes,
    ends: Int64s,
    slots: Int64s,
    words: Bytes,
    word_ends: Int64s,
    found: Int64s,
    counts: Int64s,
) -> tuple[int, int]:
    """The row of each word of each text; a text without words has the empty one.

    data: the texts' bytes one after another, text t ending at ends[t]; put into lower case. found: int64
    [3, most words], filled with the row of each word (-1: not in the table), and with start and end of each
    that is not in the table. counts: int64 [texts], filled with the words of each. Returns the number of
    words, and of those not in the table.
    """
    count, unknown, i = 0, 0, 0
    for text in range(len(ends)):
        first = count
        while i < ends[text]:
            folded = _FOLDED[data[i]]
            if folded == 0:
                i += 1
                continue
            start = i
            while i < ends[text] and _FOLDED[data[i]] != 0:
                data[i] = _FOLDED[data[i]]
                i += 1
            slot = _slot_of(data, start, i, slots)
            row = slots[slot]
            while row >= 0 and not _is_word(data, start, i, words, word_ends, row):
                slot = (slot + 1) & (len(slots) - 1)
                row = slots[slot]
            found[0, count] = row
            count += 1
            if row < 0:
                found[1, unknown], found[2, unknown] = start, i
                unknown += 1
        if count == first:
            found[0, count] = 0
            count += 1
        counts[text] = count - first
    return count, unknown


@jit
def _is_word(data: Bytes, start: int, end: int, words: Bytes, word_ends: Int64s, row: int) -> bool:
    begin = word_ends[row - 1] if row else 0
    if word_ends[row] - begin != end - start:
        return False
    for i in range(end - start):  # noqa: SIM110 - compiled
        if words[begin + i] != data[start + i]:
            return False
    return True


@jit
def sum_features(rows: Int64s, counts: Int64s, bins: NDArray[np.int16], out: Float64s) -> None:
    """out[t] float64 [dim]: the normalised sum of the signed features of text t's words.

    rows: int64, the words' rows in `bins` [rows, hits], where a place below dim counts +1 and place + dim
    counts -1. The sums are integers, so their order does not matter.
    """
    dim = out.shape[1]
    sums = np.zeros(dim, np.int64)
    word = 0
    for text in range(len(counts)):
        sums[:] = 0
        for _ in range(counts[text]):
            row = rows[word]
            word += 1
            for hit in range(bins.shape[1]):
                place = bins[row, hit]
                if place < dim:
                    sums[place] += 1
                else:
                    sums[place - dim] -= 1
        squares = 0
        for c in range(dim):
            squares += sums[c] * sums[c]
        length = np.sqrt(np.float64(squares)) if squares > 0 else 1.0
        for c in range(dim):
            out[text, c] = sums[c] / length

"""Turns texts into windows of token ids, ragged in NumPy, with the fast tokenizer if it agrees.

`nanotoken` (optional) tokenises WordPiece at many times the speed of Hugging Face's `tokenizers`. It is used
only if it gives the same windows on `PROBES` for the tokenizer of the current model.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Entries of nanotoken's word cache, per level and thread. Its default of 2**20 takes up to 130 MiB a thread.
FAST_CACHE_ENTRIES = 1 << 17

PROBES = (
    *("", " ", "\t\n\r\x0b\x0c", "a\r\nb", "hello world", "Ana: hi\nBo: yes", "UPPER lower MiXeD"),
    *("don't it's 3.14 $5,000 a_b-c/d e@f.org", "unaffable supercalifragilistic", "1234567890123456789"),
    *("héllo Wörld ÀÉÎõç", "e\u0301 n\u0303 a\u0323\u0301", "İstanbul ß ẞ ΣΑΣ ς", "ﬁ ﬃ ① ℌ ½ ㎏ ﷺ"),
    *("Ǆ ŉ ǰ ΐ", "\u4f60\u597d 世界", "mixed中文text", "ひらがな カタカナ ｶﾅ", "\U00020000\U0002a6df"),
    *("한국어 각", "हिन्दी ไทย", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea"),
    *("🙂 🙃🙃", "👍🏽 🇩🇪 ❤️", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u202eabc\u202c"),
    *("a\x00b\x07c\x1fd\x7fe\x85f", "x\u200by\u200dz\ufeff\u2060\u00ad"),
    *("a\u00a0b\u2003c\u2028d\u2029e\u3000f", "“quoted” — dash… «x» ‹y›", "+ = < > ^ ` | ~ ¬ ± ×"),
    *("a \ufffd dog", "\ud7ff\ue000\uffff\U0010ffff", "q" * 99, "q" * 100, "q" * 101, "q" * 3_000),
    *("é" * 100, "é" * 101, "[SEP] in [CLS] text", "[PAD][UNK][MASK]", "[sep] [Sep] [ SEP ]", "x[SEP]y"),
    *("<s> </s> <pad> <mask>", "##ing ##s un ##"),
)


@dataclass(frozen=True)
class Windows:
    """The concatenated token ids of windows, including special tokens. No window is empty.

    `ids` int32 [tokens]; `offsets` int64 [windows + 1]: window i is `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: Int32
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TextWindows(Windows):
    """The windows of texts, in order, at least one per text. `first` int64 [texts]: each text's first."""

    first: Int64


Tokens = Callable[[Sequence[str]], TextWindows]
"""Splits texts, without lone surrogates, into windows."""


class HuggingFaceTokens:
    """Windows by a `tokenizers.Tokenizer`, whose truncation is the window."""

    def __init__(self, tokenizer: Any, filler: Sequence[int]) -> None:
        """`filler`: the ids for a text without tokens."""
        self._tokenizer = tokenizer
        self._filler = list(filler)

    def __call__(self, texts: Sequence[str]) -> TextWindows:
        rows: list[list[int]] = []
        first = np.empty(len(texts), np.int64)
        for i, tokens in enumerate(self._tokenizer.encode_batch_fast(list(texts))):
            first[i] = len(rows)
            rows.append(tokens.ids or self._filler)
            rows.extend(part.ids for part in tokens.overflowing)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return TextWindows(np.fromiter(chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets, first)


class WordPieceTokens:
    """The same windows from nanotoken, which does not truncate: long texts are split here."""

    def __init__(self, tokenizer: Any, window: int, filler: Sequence[int]) -> None:
        """`tokenizer`: a `nanotoken.Tokenizer`. ValueError if special tokens fill the window."""
        self._tokenizer = tokenizer
        self._filler = np.array(filler, np.int32)
        self._prefix = np.array(tokenizer.backend.prefix_ids, np.int32)
        self._suffix = np.array(tokenizer.backend.suffix_ids, np.int32)
        self._window = window
        self._room = window - len(self._prefix) - len(self._suffix)
        if self._room < 1:
            raise ValueError(f"a window of {window} tokens leaves no room beside the special ones")

    def __call__(self, texts: Sequence[str]) -> TextWindows:
        ragged = self._tokenizer.encode_batch(texts)
        ids, offsets = ragged.ids.view(np.int32), ragged.offsets
        lengths = np.diff(offsets)
        if len(lengths) == 0 or (lengths.max() <= self._window and lengths.min() > 0):
            return TextWindows(ids, offsets, np.arange(len(lengths)))
        return self._cut(ids, offsets, lengths)

    def _cut(self, ids: Int32, offsets: Int64, lengths: Int64) -> TextWindows:
        """Split each text into windows of at most `room` tokens between the special ones."""
        own = lengths - len(self._prefix) - len(self._suffix)
        counts = np.maximum(1, -(-own // self._room))
        first = np.cumsum(counts) - counts
        text = np.repeat(np.arange(len(lengths)), counts)
        skipped = (np.arange(len(text)) - first[text]) * self._room
        sizes = np.minimum(self._room, own[text] - skipped)
        begins = offsets[text] + len(self._prefix) + skipped
        empty = np.flatnonzero(lengths == 0)
        sizes[first[empty]] = 0
        full = sizes + len(self._prefix) + len(self._suffix)
        full[first[empty]] = len(self._filler)
        ends = np.cumsum(full)
        out = np.empty(int(ends[-1]), np.int32)
        for at, token in enumerate(self._prefix):
            out[ends - full + at] = token
        for at, token in enumerate(self._suffix[::-1], start=1):
            out[ends - at] = token
        for window in first[empty]:
            out[ends[window] - full[window] : ends[window]] = self._filler
        out[spread(ends - full + len(self._prefix), sizes)] = ids[spread(begins, sizes)]
        return TextWindows(out, np.concatenate([np.zeros(1, np.int64), ends]), first)


def spread(begins: Int64, sizes: Int64) -> Int64:
    """The concatenated indices of the ranges begins[i] .. begins[i] + sizes[i]: int64 [sum of sizes]."""
    return np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


def make_tokens(tokenizer: Any, window: int, filler: Sequence[int]) -> tuple[Tokens, str]:
    """The fastest implementation equal to `tokenizer`, a `tokenizers.Tokenizer` that truncates at `window`.

    Also returns a note on the choice and its reason.
    """
    plain = HuggingFaceTokens(tokenizer, filler)
    try:
        nanotoken = importlib.import_module("nanotoken")
    except ImportError:
        return plain, "Hugging Face tokenizers; nanotoken, which is faster, is not installed"
    nanotoken.set_cache_entries(FAST_CACHE_ENTRIES)
    try:
        fast = WordPieceTokens(nanotoken.Tokenizer.from_json(tokenizer.to_str()), window, filler)
    except ValueError as error:  # UnsupportedTokenizerError is one
        return plain, f"Hugging Face tokenizers; nanotoken cannot stand in ({error})"
    if (probe := first_difference(plain, fast, window)) is not None:
        note = f"Hugging Face tokenizers; nanotoken cuts {probe!r:.60} in another way"
        log.warning("tokenizer: %s", note)
        return plain, note
    return fast, "nanotoken, equal to Hugging Face tokenizers on every probe"


def first_difference(one: Tokens, other: Tokens, window: int) -> str | None:
    """The first probe with different windows; None if the two agree on all."""
    # Lengths around the window, where truncation begins, and far above it.
    long = [" ".join(["lake", "Unaffable", "é"] * n)[: 6 * window + n] for n in range(window - 4, window + 5)]
    exact = ["a " * n for n in (window - 3, window - 2, window - 1, 2 * window - 4, 2 * window - 3)]
    probes = [*PROBES, *exact, *long]
    for _ in range(2):  # the second time from the word cache
        if not same(one(probes), other(probes)):
            break
    else:
        return None
    return next((p for p in probes if not same(one([p]), other([p]))), probes[0])


def same(one: TextWindows, other: TextWindows) -> bool:
    return (
        np.array_equal(one.ids, other.ids)
        and np.array_equal(one.offsets, other.offsets)
        and np.array_equal(one.first, other.first)
    )

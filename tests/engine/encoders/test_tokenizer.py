"""Windows of token ids: cut alike by both tokenizers, and the fast one trusted only where it agrees."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE

from undertow.bench.machine import LOCOMO
from undertow.engine.encoders.base import speakable
from undertow.engine.encoders.model_files import DEFAULT_MODEL, model_folder
from undertow.engine.encoders.tokenizer import (
    HuggingFaceTokens,
    TextWindows,
    WordPieceTokens,
    first_difference,
    make_tokens,
    same,
    spread,
)
from undertow.engine.readers import read

WINDOW = 20
FILLER = (101, 102)


def _tokenizer(window: int | None = WINDOW) -> Any:
    tokenizer: Any = Tokenizer.from_file(str(model_folder(DEFAULT_MODEL) / "tokenizer.json"))
    tokenizer.no_padding()
    if window is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(window)
    return tokenizer


class _Whole:
    """Stands in for nanotoken: whole texts, ragged, from the Hugging Face tokenizer without a window."""

    def __init__(self, wrong: str | None = None) -> None:
        self.backend = SimpleNamespace(prefix_ids=[101], suffix_ids=[102])
        self._tokenizer = _tokenizer(None)
        self._wrong = wrong

    def encode_batch(self, texts: Sequence[str]) -> SimpleNamespace:
        rows = [self._tokenizer.encode(text).ids for text in texts]
        if self._wrong is not None and self._wrong in texts:
            rows[list(texts).index(self._wrong)][1] += 1
        ids = np.array([token for row in rows for token in row], np.uint32)
        return SimpleNamespace(ids=ids, offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64))


def _module(whole: _Whole) -> SimpleNamespace:
    return SimpleNamespace(
        Tokenizer=SimpleNamespace(from_json=lambda _: whole), set_cache_entries=lambda _: None
    )


@pytest.fixture(scope="module")
def plain() -> HuggingFaceTokens:
    return HuggingFaceTokens(_tokenizer(), FILLER)


@pytest.fixture(scope="module")
def fast() -> WordPieceTokens:
    nanotoken = pytest.importorskip("nanotoken", reason="nanotoken is not installed")
    return WordPieceTokens(nanotoken.Tokenizer.from_json(_tokenizer().to_str()), WINDOW, FILLER)


def _rows(windows: TextWindows) -> list[list[int]]:
    return [windows.ids[a:b].tolist() for a, b in zip(windows.offsets, windows.offsets[1:], strict=False)]


def test_windows_by_hand(plain: HuggingFaceTokens) -> None:
    """`lake` is one token, so n of them fill n places beside the two special ones."""
    lake = _tokenizer().encode("lake").ids[1]
    got = plain(["lake " * 40, "", "lake"])
    assert _rows(got) == [
        *[[101, *[lake] * 18, 102]] * 2,
        [101, *[lake] * 4, 102],
        [101, 102],
        [101, lake, 102],
    ]
    assert got.first.tolist() == [0, 3, 4]
    assert got.lengths.tolist() == [20, 20, 6, 2, 3]
    assert len(got) == 5
    assert got.ids.dtype == np.int32


@pytest.mark.parametrize("count", [17, 18, 19, 35, 36, 37, 54, 55])
def test_whole_texts_are_cut_where_the_tokenizer_cuts(plain: HuggingFaceTokens, count: int) -> None:
    texts = ["a", "lake " * count, "", "hike " * count, "dog"]
    assert same(WordPieceTokens(_Whole(), WINDOW, FILLER)(texts), plain(texts))


def test_no_texts_have_no_windows(plain: HuggingFaceTokens) -> None:
    for tokens in (plain, WordPieceTokens(_Whole(), WINDOW, FILLER)):
        assert (len(tokens([])), len(tokens([]).first)) == (0, 0)


def test_a_text_without_tokens_is_filler() -> None:
    """A tokenizer that adds no special tokens has nothing to say of an empty text."""

    class Bare:
        backend = SimpleNamespace(prefix_ids=[], suffix_ids=[])

        def encode_batch(self, texts: Sequence[str]) -> SimpleNamespace:
            offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
            return SimpleNamespace(
                ids=np.array([ord(c) for t in texts for c in t], np.uint32), offsets=offsets
            )

    got = WordPieceTokens(Bare(), 3, [7])(["", "abcd", "", "x"])
    assert _rows(got) == [[7], [97, 98, 99], [100], [7], [120]]
    assert got.first.tolist() == [0, 1, 3, 4]


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        WordPieceTokens(_Whole(), 2, FILLER)


def test_spread_by_hand() -> None:
    assert spread(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert spread(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_one_that_agrees_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanotoken", _module(_Whole()))
    tokens, note = make_tokens(_tokenizer(), WINDOW, FILLER)
    assert isinstance(tokens, WordPieceTokens)
    assert "equal" in note


@pytest.mark.parametrize("probe", ["[sep] [Sep] [ SEP ]", "a\x00b\x07c\x1fd\x7fe\x85f", "é" * 101])
def test_one_that_differs_on_a_probe_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, probe: str
) -> None:
    monkeypatch.setitem(sys.modules, "nanotoken", _module(_Whole(wrong=probe)))
    with caplog.at_level(logging.WARNING):
        tokens, note = make_tokens(_tokenizer(), WINDOW, FILLER)
    assert isinstance(tokens, HuggingFaceTokens)
    assert repr(probe)[:20] in note
    assert note in caplog.text


def test_without_the_package_the_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanotoken", None)
    tokens, note = make_tokens(_tokenizer(), WINDOW, FILLER)
    assert isinstance(tokens, HuggingFaceTokens)
    assert "not installed" in note


def test_other_models_keep_their_tokenizer() -> None:
    pytest.importorskip("nanotoken", reason="nanotoken is not installed")
    bpe = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.enable_truncation(WINDOW)
    tokens, note = make_tokens(bpe, WINDOW, [0])
    assert isinstance(tokens, HuggingFaceTokens)
    assert "cannot stand in" in note


def test_fast_agrees_on_the_probes(plain: HuggingFaceTokens, fast: WordPieceTokens) -> None:
    assert first_difference(plain, fast, WINDOW) is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(), max_size=8))
def test_fast_agrees_on_any_text(plain: HuggingFaceTokens, fast: WordPieceTokens, texts: list[str]) -> None:
    assert same(fast(texts), plain(texts))


PIECES = ["lake", "unaffable", "##s", "[SEP]", "[CLS]x", "é", "İ", "ß", "你", "🙂", "-", "12", "'"]
PIECES += ["\x00", "\x0b", "\u00a0", "\u200d", "\u0301", "\n", " "]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), max_size=4))
def test_fast_agrees_on_hard_joints(
    plain: HuggingFaceTokens, fast: WordPieceTokens, texts: list[str]
) -> None:
    assert same(fast(texts), plain(texts))


def test_fast_agrees_on_all_of_locomo(plain: HuggingFaceTokens, fast: WordPieceTokens) -> None:
    if not Path(LOCOMO).exists():
        pytest.skip(f"no LoCoMo data at {LOCOMO}")
    texts = [
        speakable(message.content)
        for record in read(LOCOMO, "locomo", max_message_bytes=1 << 20)
        for turn in record.turns
        for message in turn.messages
    ]
    assert len(texts) > 1_000
    assert same(fast(texts), plain(texts))


def test_windows_do_not_depend_on_company(fast: WordPieceTokens) -> None:
    rng = random.Random(7)
    texts = [" ".join(rng.choices(PIECES, k=rng.randint(0, 80))) for _ in range(200)]
    assert _rows(fast(texts)) == [row for text in texts for row in _rows(fast([text]))]

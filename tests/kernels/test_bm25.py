"""BM25 against its definition, and what it must not depend on: the order and the past of the texts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.engine.search.analyzer import Analyzer, root, stem, terms_of
from undertow.engine.search.irregular_forms import BASE_FORMS
from undertow.kernels import bm25
from undertow.kernels.bm25 import K1, B, Bm25, Related

TEXTS = {0: [1, 2, 2, 3], 1: [2, 4], 2: [5], 4: [1, 1, 1, 5, 6, 7, 8, 9]}


def defined(texts: Mapping[int, Sequence[int]], query: Sequence[int], row: int) -> float:
    """The score of one row, by the book."""
    mean = sum(map(len, texts.values())) / len(texts)
    score = most = 0.0
    for term in set(query):
        having = sum(term in text for text in texts.values())
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        times = texts[row].count(term)
        score += weight * times / (times + K1 * (1 - B + B * len(texts[row]) / mean))
        most += weight
    return score / most


def index_of(texts: Mapping[int, Sequence[int]]) -> Bm25:
    index = Bm25()
    for row, terms in texts.items():
        index.put(row, terms)
    return index


@pytest.mark.parametrize("query", [[1], [2, 3], [2, 2, 5], [1, 77], [77], []])
def test_scores_are_those_of_the_definition(query: list[int]) -> None:
    scores = index_of(TEXTS).scores(query, 5)
    expected = [defined(TEXTS, query, row) if row in TEXTS and query else 0.0 for row in range(5)]
    assert scores.tolist() == pytest.approx(expected)
    assert all(0 <= score < 1 for score in scores)


def test_scores_depend_on_the_texts_that_are_there_and_on_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts in another order, some after having been others, sorted in or not: the same bits."""
    rng = random.Random(5)
    texts = {row: [rng.randrange(40) for _ in range(rng.randrange(1, 12))] for row in range(60)}
    plain = index_of(texts)
    monkeypatch.setattr(bm25, "_UNSORTED", 16)
    moved = Bm25()
    for row in rng.sample(range(80), 80):
        moved.put(row, [rng.randrange(40) for _ in range(5)])
        moved.scores([1], 80)  # sorts in
    for row in rng.sample(range(80), 80):
        if row in texts:
            moved.put(row, texts[row])
            moved.scores([2], 80)
        else:
            moved.drop(row)
    assert len(moved) == len(texts)
    for query in ([3], [1, 2, 3, 4, 5], [39, 7, 41]):
        assert np.array_equal(moved.scores(query, 60), plain.scores(query, 60))
        assert not moved.scores(query, 80)[60:].any()


Known = Mapping[int, Sequence[tuple[int, float]]]


def table_of(known: Known) -> Related:
    """Of each term the related ones and their closeness, the closest first."""

    def related(terms: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        near, closeness = np.zeros((len(terms), 3), np.uint32), np.zeros((len(terms), 3))
        for n, term in enumerate(terms.tolist()):
            for place, (other, share) in enumerate(known.get(term, ())):
                near[n, place], closeness[n, place] = other, share
        return near, closeness

    return related


def by_columns(
    texts: Mapping[int, Sequence[int]], query: Sequence[int], rows: int, known: Known | None = None
) -> list[float]:
    """The same arithmetic in the same order in NumPy: the oracle of every bit."""
    out, most = np.zeros(rows), 0.0
    per_length = len(texts) / max(1, sum(map(len, texts.values())))
    for term in dict.fromkeys(query):
        best, weight = np.zeros(rows), 0.0
        for other, share in ((term, 1.0), *(known or {}).get(term, ())):
            owners = np.array([row for row, text in texts.items() if other in text], np.int64)
            counts = np.array([texts[row].count(other) for row in owners.tolist()], np.int32)
            lengths = np.array([len(texts[row]) for row in owners.tolist()], np.int32)
            # of the C library, as compiled: NumPy has one of its own where the CPU has AVX-512
            rarity = math.log1p((len(texts) - len(owners) + 0.5) / (len(owners) + 0.5))
            if other == term:
                weight = rarity
            score = np.zeros(rows)
            score[owners] = (
                share * min(weight, rarity) * (counts / (counts + K1 * (1 - B + B * lengths * per_length)))
            )
            out += np.maximum(score - best, 0.0)
            best = np.maximum(score, best)
        most += weight
    scores: list[float] = (out / most if most else out).tolist()
    return scores


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_compiled_scores_are_those_of_numpy_to_the_last_bit(seed: int) -> None:
    rng = random.Random(seed)
    terms = [rng.randrange(2**32) for _ in range(30)] + [0, 2**32 - 1]
    texts: dict[int, list[int]] = {}
    index = Bm25()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "_UNSORTED", rng.choice([8, 10_000]))
        for _ in range(rng.randrange(1, 80)):
            row = rng.randrange(50)
            if rng.random() < 0.2:
                texts.pop(row, None)
                index.drop(row)
            else:
                texts[row] = rng.choices(terms, k=rng.randrange(0, 15))
                index.put(row, texts[row])
            if rng.random() < 0.1:
                index.sort_in()
        for _ in range(5):
            query = rng.choices([*terms, 7], k=rng.randrange(0, 8))
            assert index.scores(query, 50).tolist() == by_columns(texts, query, 50)
            known = {t: [(rng.choice(terms), c) for c in (0.7, 0.3, 0.1)[: rng.randrange(4)]] for t in query}
            scores = index.scores(query, 50, table_of(known)).tolist()
            assert scores == by_columns(texts, query, 50, known)
            assert all(0 <= score < 1 for score in scores)


def test_a_related_term_counts_at_its_discount_and_only_where_the_term_is_missing() -> None:
    index = index_of({0: [1, 9], 1: [2, 9], 2: [1, 2], 3: [9]})
    alone, both = index.scores([1], 4), index.scores([1], 4, table_of({1: [(2, 0.5)]}))
    assert both[[0, 2, 3]].tolist() == alone[[0, 2, 3]].tolist() and alone[1] == 0
    assert both[1] == pytest.approx(both[0] / 2)


def test_a_term_is_common_if_more_than_half_of_the_texts_have_it() -> None:
    index = index_of({0: [1, 2], 1: [1, 3], 2: [1, 2], 3: [5]})
    assert index.common([1, 2, 77]) == {1}
    index.drop(3)
    assert index.common([1, 2, 77]) == {1, 2}
    assert Bm25().common([1]) == set()


def test_an_index_without_texts_gives_nothing() -> None:
    index = Bm25()
    assert index.scores([1, 2], 3).tolist() == [0, 0, 0]
    index.put(0, [1])
    index.drop(0)
    index.put(1, [])
    assert index.scores([1], 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("paint painted painting paints", True),
        ("study studies studied", True),
        ("running run runs", True),
        ("hike hiking hikes hiked", True),
        ("class classes", True),
        ("bus bu", False),
        ("sing s", False),
    ],
)
def test_words_with_one_stem(words: str, same: bool) -> None:
    stems = {stem(word) for word in words.split()}
    assert (len(stems) == 1) is same, stems


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("go goes going went gone", True),
        ("take taking took taken", True),
        ("buy buys bought", True),
        ("child children", True),
        ("wind wound", False),  # a wound is commoner
        ("live lives life", False),
    ],
)
def test_words_with_one_root(words: str, same: bool) -> None:
    roots = {root(word) for word in words.split()}
    assert (len(roots) == 1) is same, roots
    assert (len({*Analyzer().of(words)}) == 1) is same, "it is what texts are searched by"


def test_a_base_form_is_nobodys_irregular_form() -> None:
    assert not set(BASE_FORMS) & set(BASE_FORMS.values())
    assert len(BASE_FORMS) > 100 and all(form.isalpha() and form.islower() for form in BASE_FORMS)


def test_terms_are_words_of_any_script() -> None:
    assert Analyzer().of("Ann's boat, the BOATS!") == [
        *Analyzer().of("ann s boat the"),
        *Analyzer().of("boat"),
    ]
    assert set(Analyzer().of("我喜歡陶藝課")) & set(Analyzer().of("陶藝"))
    assert not Analyzer().of("... !?")
    for text in ("Ann's boat, the BOATS!", "我喜歡陶藝課", "... !?", "the", "x" * 99, ""):
        assert terms_of(text) == Analyzer().of(text)
    assert Analyzer().of("\ud800 x")  # half a surrogate pair is no letter; nothing breaks

"""F1 and BLEU-1: how many words an answer shares with the gold one.

F1 follows the evaluation code that was published with LoCoMo (Maharana et al., 2024): words in lower case
without punctuation and articles ("and" counts as one), stems by Porter. Multi-hop: the gold answer and the
answer are lists with commas between; each gold part is scored against the part of the answer that fits it
best, and the mean is taken. Open-domain: of the gold answer only what stands before a semicolon.

BLEU-1 follows the evaluations of Mem0 and A-Mem: NLTK's sentence BLEU of single words in lower case with
smoothing method 1. They cut sentences first, by a model that NLTK downloads; here a text is cut into words as
a whole, which differs at full stops inside an answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import cache
from typing import Any

MULTI_HOP, OPEN_DOMAIN = "multi-hop", "open-domain"

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the|and)\b")


def require_nltk() -> None:
    """ImportError if NLTK is missing: to be known before any work."""
    _stemmer()


def f1(answer: str, gold: str, category: str) -> float:
    """0 to 1; `category` is that of LoCoMo, any other is scored plainly."""
    if category == MULTI_HOP:
        given = [stems(part) for part in answer.split(",")]
        wanted = [stems(part) for part in gold.split(",")]
        return sum(max(token_f1(part, one) for part in given) for one in wanted) / len(wanted)
    return token_f1(stems(answer), stems(judged_part(gold, category)))


def bleu_1(answer: str, gold: str, category: str) -> float:
    """0 to 1; 0 for an answer without a word."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    given, wanted = _words(answer), _words(judged_part(gold, category))
    if not given or not wanted:
        return 0.0
    smoothing = SmoothingFunction().method1
    return float(sentence_bleu([wanted], given, weights=(1, 0, 0, 0), smoothing_function=smoothing))


def judged_part(gold: str, category: str) -> str:
    return gold.split(";")[0] if category == OPEN_DOMAIN else gold


def token_f1(given: list[str], wanted: list[str]) -> float:
    """The harmonic mean of precision and recall of words, each counted as often as it stands."""
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def stems(text: str) -> list[str]:
    plain = _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION))
    stemmer = _stemmer()
    return [stemmer.stem(word) for word in plain.split()]


def _words(text: str) -> list[str]:
    words: list[str] = _tokenizer().tokenize(text.lower())
    return words


@cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()


@cache
def _tokenizer() -> Any:
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()

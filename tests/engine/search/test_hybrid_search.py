"""Search by words beside meaning keeps the engine's promises: one ranking however the turns came and went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Memory, Turn
from undertow.engine.base.results import Hit
from undertow.engine.search.analyzer import Analyzer
from undertow.engine.search.keyword_index import (
    NEIGHBOUR_SHARE,
    STRETCH_SHARE,
    STRETCH_TURNS,
    MemoryWords,
    in_context,
    places,
)
from undertow.engine.search.ranking import TELLING_SHARE, blended
from undertow.engine.search.related_words import RELATED_SHARE, related, table
from undertow.kernels.topk.combined_score import raised

from ...support.engine import NEVER, open_engine, turn_of

WORDS = ("boat", "harbour", "plank", "varnish", "summer", "carpenter", "kiln", "clay", "glaze", "kettle")
QUERIES = ("the carpenter's planks", "the kettle in the harbour", "varnish", "zeppelin", "the user's clay 3")


def texts(count: int) -> list[str]:
    return [f"{WORDS[n % 10]} {WORDS[n * 5 % 7]} {WORDS[n * n % 9]} {n}" for n in range(count)]


def turns(tenant: str, count: int = 40) -> list[Turn]:
    return [turn_of(tenant, n, text) for n, text in enumerate(texts(count))]


def found(engine: Engine, tenant: str) -> list[list[tuple[str, float]]]:
    """What is found for every query: texts and scores, to the last bit."""
    return [[(hit.memory, hit.score) for hit in hits(engine, tenant, query)] for query in QUERIES]


def hits(engine: Engine, tenant: str, query: str, k: int = 20) -> tuple[Hit, ...]:
    return engine.search(tenant, query, k_sub=k, k_epi=0, k_sem=0).turns


def test_words_raise_a_cosine_and_never_beyond_one() -> None:
    assert raised(0.3, 0.0) == 0.3
    assert 0.3 < raised(0.3, 0.4) < raised(0.3, 0.9) < 1.0
    assert raised(1.0, 0.7) == 1.0
    assert -1.0 < raised(-0.9, 0.5) < 1.0


def test_a_rare_word_finds_its_turn_and_dense_search_is_a_setting(tmp_path: Path) -> None:
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch(turns("ann"))
        hybrid = hits(engine, "ann", "what about number 17 then")
    with open_engine(tmp_path / "store", search="dense", **NEVER) as engine:
        dense = hits(engine, "ann", "what about number 17 then", 40)
    assert hybrid[0].source_seqs == (17,)
    cosines = {hit.id: hit.score for hit in dense}
    assert dense == tuple(sorted(dense, key=lambda hit: (-hit.score, hit.source_seqs)))
    assert all(hit.score >= cosines[hit.id] for hit in hybrid)
    assert hybrid[0].score > cosines[hybrid[0].id]


def test_the_words_of_a_large_tenant_do_not_count(tmp_path: Path) -> None:
    with open_engine(tmp_path / "store", search="dense", **NEVER) as engine:
        engine.add_batch(turns("ann"))
        dense = found(engine, "ann")
    with open_engine(tmp_path / "store", words_rows=40, **NEVER) as engine:
        small = found(engine, "ann")
    with open_engine(tmp_path / "store", words_rows=39, **NEVER) as engine:
        assert found(engine, "ann") == dense != small


def test_batched_is_streamed_and_searches_between_change_nothing(tmp_path: Path) -> None:
    with open_engine(tmp_path / "batched", **NEVER) as engine:
        engine.add_batch(turns("ann"))
        expected = found(engine, "ann")
    with open_engine(tmp_path / "streamed", **NEVER) as engine:
        for turn in turns("ann"):
            engine.add_batch([turn])
            engine.search("ann", QUERIES[0])
        assert found(engine, "ann") == expected
    with open_engine(tmp_path / "streamed", **NEVER) as engine:
        assert found(engine, "ann") == expected, "after a restart, from the journal"
        assert engine.drain()
        engine.tenants.evict("ann")
        assert found(engine, "ann") == expected, "after an eviction"


def test_what_was_deleted_or_updated_weighs_nothing(tmp_path: Path) -> None:
    """The same scores, to the bit, as if the turns had never been other than they are."""
    kept = [turn for n, turn in enumerate(turns("ann")) if n % 3]
    with open_engine(tmp_path / "plain", **NEVER) as engine:
        engine.add_batch(kept)
        expected = found(engine, "ann")
    with open_engine(tmp_path / "changed", **NEVER) as engine:
        receipts = engine.add_batch(turns("ann"))
        assert found(engine, "ann") != expected
        for n, receipt in enumerate(receipts):
            if n % 3 == 0:
                assert receipt.id is not None
                engine.delete(receipt.id)
        assert found(engine, "ann") == expected
        engine.purge()
        engine.tenants.evict("ann")
        assert found(engine, "ann") == expected, "read from the journal, without the deleted"
        (fresh,) = engine.add_batch([turn_of("ann", 99, "zeppelin")])
        assert fresh.id is not None
        before = found(engine, "ann")
        updated = engine.update(fresh.id, "airship varnish")
        assert hits(engine, "ann", "airship")[0].id == updated.id
        engine.update(updated.id, "zeppelin")
        after = found(engine, "ann")
    assert [set(dict(of)) for of in after] == [
        {text.replace("zeppelin\nassistant: I see.", "zeppelin") for text, _ in of} for of in before
    ]


def test_an_import_is_found_as_what_was_exported(tmp_path: Path) -> None:
    with open_engine(tmp_path / "here", **NEVER) as engine:
        receipts = engine.add_batch(turns("ann"))
        assert receipts[4].id is not None
        engine.delete(receipts[4].id)
        assert engine.drain()
        records = engine.export_page("ann").items
        expected = found(engine, "ann")
    with open_engine(tmp_path / "there", **NEVER) as engine:
        engine.import_("ann", records)
        assert found(engine, "ann") == expected


def test_no_tenant_weighs_in_anothers_scores(tmp_path: Path) -> None:
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch(turns("ann"))
        alone = found(engine, "ann")
        engine.add_batch([turn_of("bob", n, f"varnish planks kettle {n}") for n in range(300)])
        found(engine, "bob")
        assert found(engine, "ann") == alone
        engine.erase("bob", now=True)
        assert found(engine, "ann") == alone


def test_a_memory_gains_nothing_by_repeating_itself() -> None:
    once, thrice = (
        Memory(text, "episode", "ann", text, 1, 0, 0, 0, (0,)) for text in ("boat", "boat boat boat")
    )
    other = Memory("m", "episode", "ann", "kiln", 1, 0, 0, 1, (0,))
    query = Analyzer().of("the boat")
    shares = [MemoryWords().shares([memory, None, other], query).tolist() for memory in (once, thrice)]
    assert shares[0] == shares[1]
    assert shares[0][0] > 0 == shares[0][1] == shares[0][2]


def test_neighbours_and_stretches_by_hand() -> None:
    # sessions 0 and 1, interleaved; the row in the middle of 1 was deleted
    where = places(np.array([0, 1, 0, -1, 1, 0], np.int32))
    assert where.beside.tolist() == [[-1, 2], [-1, 4], [0, 5], [-1, -1], [1, -1], [2, -1]]
    assert where.stretch.tolist() == [0, 1, 0, -1, 1, 0]
    shares = in_context(
        np.array([0.4, 0.0, 0.0, 0.0, 0.2, 0.0]), where, neighbour_share=0.5, stretch_share=0.1
    )
    assert shares == pytest.approx([0.44, 0.12, 0.24, 0.0, 0.22, 0.0])
    little = in_context(
        np.array([0.4, 0.0, 0.0, 0.0, 0.0, 0.01]), where, neighbour_share=0, stretch_share=0.1
    )
    assert little == pytest.approx([0.44, 0.0, 0.0, 0.0, 0.0, 0.02]), "at most as much as it has itself"


def plain_context(own: Sequence[float], sessions: Sequence[object]) -> tuple[list[float], list[list[int]]]:
    """In plain Python: shares in the context of their sessions; the row before and after each, or -1."""
    shares, beside = [*own], [[-1, -1] for _ in own]
    for session in {*sessions}:
        rows = [n for n, of in enumerate(sessions) if of == session]
        for before, after in pairwise(rows):
            beside[before][1], beside[after][0] = after, before
        for n in rows:
            for other in beside[n]:
                shares[n] += NEIGHBOUR_SHARE * own[other] if other >= 0 else 0.0
        for start in range(0, len(rows), STRETCH_TURNS):
            stretch = rows[start : start + STRETCH_TURNS]
            most = max(shares[n] for n in stretch)
            for n in stretch:
                shares[n] += min(shares[n], STRETCH_SHARE * most)
    return shares, beside


@pytest.mark.parametrize("seed", range(20))
def test_the_compiled_context_is_that_of_plain_python_to_the_last_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    session = rng.integers(-1, 4, 200).astype(np.int32)
    there = np.flatnonzero(session >= 0)
    own = np.zeros(200)
    own[there] = np.where(rng.random(len(there)) < 0.3, rng.random(len(there)), 0.0)
    shares, beside = plain_context(own[there].tolist(), session[there].tolist())
    where = places(session)
    found = in_context(own, where)
    assert found[there].tolist() == shares and not found[session < 0].any()
    numbers = [*there.tolist(), -1]
    assert where.beside[there].tolist() == [[numbers[row] for row in rows] for rows in beside]
    assert (where.beside[session < 0] == -1).all()
    for number in range(4):
        stretches = where.stretch[session == number].tolist()
        assert [stretches.index(n) for n in stretches] == [
            n - n % STRETCH_TURNS for n in range(len(stretches))
        ]
    assert len(set(where.stretch[there])) == sum(-(-np.sum(session == n) // STRETCH_TURNS) for n in range(4))


def test_a_session_without_end_has_stretches() -> None:
    count = 2 * STRETCH_TURNS + 3
    where = places(np.zeros(count, np.int32))
    assert np.bincount(where.stretch).tolist() == [STRETCH_TURNS, STRETCH_TURNS, 3]
    neighbours = [[row - 1, row + 1] for row in range(count - 1)] + [[count - 2, -1]]
    assert where.beside.tolist() == neighbours, "across their borders too"
    nothing = places(np.array([-1, -1], np.int32))
    assert in_context(np.zeros(2), nothing).tolist() == [0.0, 0.0]
    assert not len(in_context(np.zeros(0), places(np.zeros(0, np.int32))))


def test_a_turn_is_found_by_what_its_session_is_about(tmp_path: Path) -> None:
    """The same word in two sessions: first comes the one of the session that the question is about."""
    topics = ("the boats in the harbour", "the kilns of the pottery")
    said = [text for topic in topics for text in (topic, "a", "b", "it was blue")]
    log = [replace(turn_of("ann", n, text), session_id=topics[n // 4]) for n, text in enumerate(said)]
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch(log)
        for topic, seq in zip(topics, (3, 7), strict=True):
            found = hits(engine, "ann", f"{topic}: what was blue?")
            assert next(hit.source_seqs for hit in found if "blue" in hit.memory) == (seq,)


def test_a_word_is_found_by_a_related_one_behind_the_word_itself(tmp_path: Path) -> None:
    said = ("She started yoga", "The exercise was short", "He bought a kettle", "The boiler is old")
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch([replace(turn_of("ann", n, text), session_id=str(n)) for n, text in enumerate(said)])
        seqs = [hit.source_seqs[0] for hit in hits(engine, "ann", "any exercise?")]
    assert seqs[:2] == [1, 0]


def test_the_table_of_related_words_is_sound() -> None:
    known = table()
    terms, closeness = related(known.terms)
    assert (np.diff(known.terms.astype(np.int64)) > 0).all()
    assert terms.shape == closeness.shape == (len(known.terms), 8)
    assert ((closeness >= 0) & (closeness <= RELATED_SHARE)).all() and (np.diff(closeness, axis=1) <= 0).all()
    assert not (terms == known.terms[:, None]).any(), "no word is its own"
    assert known.near.max() < len(known.terms), "the compiled code does not check it"
    unknown = np.setdiff1d(np.array([*range(9), 2**32 - 1], np.uint32), known.terms)
    assert len(unknown) > 1
    assert not related(unknown)[1].any()


def test_words_that_most_turns_have_tell_none_apart(tmp_path: Path) -> None:
    """They leave the query's vector; what is common depends on the turns that exist."""
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch(turns("ann"))
        of, ranker = engine.tenants.existing("ann"), engine.ranker

        def telling(text: str) -> str | None:
            return ranker.telling_words(of, text, ranker.terms(of, text))

        assert telling("Which Boat has the user painted?") == "Boat painted", "each turn has a user"
        assert telling("Which boat?") is None and telling("the user") is None
        sent: list[str] = []
        encode = engine._texts.encode_queries

        def heard(tenant: str, texts: Sequence[str]) -> NDArray[np.float16]:
            sent.extend(texts)
            return encode(tenant, texts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._texts, "encode_queries", heard)
            hits(engine, "ann", "Which Boat has the user painted?")
        assert sent == ["Which Boat has the user painted?", "Boat painted"]


def test_the_blended_vector_has_the_length_of_a_vector() -> None:
    axes = np.eye(3, dtype=np.float16)
    mixed = blended(axes[0], axes[1]).astype(np.float64)
    assert mixed[1] / mixed[0] == pytest.approx(TELLING_SHARE / (1 - TELLING_SHARE), rel=1e-2)
    assert float(mixed @ mixed) == pytest.approx(1.0, abs=1e-2)
    opposite = blended(np.array([0.7], np.float16), np.array([-0.3], np.float16))
    assert np.isfinite(opposite).all()

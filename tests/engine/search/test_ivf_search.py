"""Which tenants are searched through an index, and what their searches say of themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undertow.engine.search.ranking import Ranked, Window
from undertow.engine.storage.row_codec import turn_id
from undertow.engine.tenants.tenant import Tenant

from ...support.cli import run, turn_line, write_log
from ...support.engine import ENCODER, NEVER, open_engine, turn_of


def test_a_tenant_is_indexed_above_the_set_size_and_the_others_are_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    words = [" ".join(f"w{w}" for w in rng.integers(0, 60, 6)) for _ in range(700)]
    large = [turn_of("large", n, text) for n, text in enumerate(words)]
    small = [turn_of("small", n, text) for n, text in enumerate(words[:100])]
    with open_engine(tmp_path / "store", ivf_rows=300, **NEVER) as engine:
        engine.add_batch([*large[:600], *small])

        def ask(tenant: Tenant, text: str, **window: str) -> Ranked:
            vector = ENCODER.encode([f"user: {text}\nassistant: I see."])[0]
            return engine.ranker.rank(tenant, vector, k_sub=10, k_epi=5, k_sem=5, window=Window(**window))

        of_large, of_small = engine.tenants.get_many(["large", "small"])
        exact = ask(of_small, words[7])
        assert engine.ranker.indexes() == {}
        assert exact.turn_recall == 1.0
        found = ask(of_large, words[7])
        report = engine.ranker.indexes()["large"]
        assert report.rows == 600
        assert found.turn_recall == report.probes[0].recall < 1.0
        assert found.turns[0][1] == 7
        assert ask(of_small, words[7]) == exact

        engine.delete(turn_id("large", of_large.generation, 7))
        assert all(seq != 7 for _, seq in ask(of_large, words[7]).turns)
        engine.add_batch(large[600:])
        assert ask(of_large, words[650]).turns[0][0] > 0.99
        windowed = ask(of_large, words[8], since="2026-03-01", until="2026-03-01")
        assert windowed.turn_recall == 1.0
        assert windowed.turns[0][1] == 8

        assert engine.drain()
        engine.tenants.evict("large")
        del of_large
        assert engine.ranker.indexes() == {}


def test_a_search_on_the_command_line_says_the_recall_of_its_turns(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    words = [" ".join(f"w{w}" for w in rng.integers(0, 60, 6)) for _ in range(600)]
    log = write_log(
        tmp_path / "log", [turn_line("ada", n, text, timestamp=None) for n, text in enumerate(words)]
    )
    store = tmp_path / "store"
    assert run("ingest", log, "--format", "messages", "--store", store, "--llm", "off").code == 0
    search = ("search", words[7], "--tenant", "ada", "--store", store)
    # a large tenant's turns are never searched by words
    exact, indexed = (
        run(*search, "--json", env={"UNDERTOW_SEARCH": "dense"}).lines,
        run(*search, "--json", env={"UNDERTOW_IVF_ROWS": "300"}).lines,
    )
    assert {hit["turn_recall"] for hit in exact} == {1.0}
    (recall,) = {hit["turn_recall"] for hit in indexed}
    assert 0.5 < recall < 1.0
    assert indexed[0] == exact[0] | {"turn_recall": recall}
    assert "recall" not in run(*search).err
    assert f"measured recall {recall:.3f}" in run(*search, env={"UNDERTOW_IVF_ROWS": "300"}).err

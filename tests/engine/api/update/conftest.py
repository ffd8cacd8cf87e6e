"""An engine with memories to update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine

from ....support.api.updates import GARDENS, PAIRS
from ....support.engine import open_engine, turns_of


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A tenant with memories, and one with none."""
    with open_engine(tmp_path / "store", MockLLM(MockReplies(2)), **PAIRS) as engine:
        engine.add_batch(GARDENS)
        engine.add_batch(turns_of("bob", 2))
        assert engine.drain()
        assert {m.kind for m in engine.get_all("ann")} == {"episode", "fact"}
        yield engine

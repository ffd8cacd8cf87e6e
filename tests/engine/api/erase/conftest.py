"""Stores of three tenants, one of them marked, to be erased."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.engine.base.model import PolicyName
from undertow.engine.storage import journal as journal_module

from ....support.api.erasure import OBLIGING, OTHERS, REPLIES, TURNS, Marked, opened, turns_of_topics
from ....support.faults.harness import KINDS, end_state


@pytest.fixture(scope="module")
def marked() -> Marked:
    # not in any other byte of the store but by its own doing; the accent has several spellings
    return Marked(f"é{secrets.token_hex(8)}")


@pytest.fixture(scope="module")
def built(marked: Marked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[PolicyName], Path]]:
    """Three tenants, one of them marked, with several versions and compactions behind them."""

    @cache
    def of(policy: PolicyName) -> Path:
        store = tmp_path_factory.mktemp("built") / "store"
        count = TURNS[policy]
        # that RecMem alone has parked jobs in it: of a window's many calls one is unusable too often
        llm = MockLLM(REPLIES if policy == "recmem" else OBLIGING)
        with opened(store, llm, policy) as engine:
            for n in range(0, count, count // 3):
                for name in (*OTHERS, marked.name):
                    word = marked.word if name == marked.name else ""
                    engine.add_batch(turns_of_topics(name, count, word)[n : n + count // 3])
                    engine.step()
                    engine.journal.settle()
            assert engine.drain()
        assert KINDS[policy] <= end_state(store).kinds()
        return store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "COMMITS_PER_COMPACTION", 9)
        yield of


@pytest.fixture
def policy() -> PolicyName:
    """Of most tests' store; some are parametrised with it."""
    return "recmem"


@pytest.fixture
def store(policy: PolicyName, built: Callable[[PolicyName], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built(policy), tmp_path / "store"))

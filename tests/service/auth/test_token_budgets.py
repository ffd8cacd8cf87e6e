"""Tokens per day of a key, against plain sums, and what a restart finds of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.serving.auth.principal import KeyLimits, Principal, TenantScope
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.state_db import StateDb, StateError

from ...support.service.clock import Clock


def holder(n: int, tokens_per_day: int | None) -> Principal:
    limits = KeyLimits(tokens_per_day=tokens_per_day)
    return Principal(f"{n:012x}", "", TenantScope(all_tenants=True), frozenset(), limits)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 80)),
        st.tuples(st.just("wait"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(actions)
@settings(max_examples=60, deadline=None)
def test_budgets_are_the_sums_of_a_day(steps: list[tuple[str, int, int]]) -> None:
    """Key 0 has 100 tokens a day, key 1 none, key 2 no limit. What was reserved before a restart is spent."""
    with TemporaryDirectory() as folder:
        asyncio.run(carried_out(steps, Path(folder)))


async def carried_out(steps: list[tuple[str, int, int]], folder: Path) -> None:
    """Each step leaves what the sums say."""
    holders = [holder(n, budget) for n, budget in enumerate([100, 0, None])]
    clock, state = Clock(), StateDb(folder)
    budgets = TokenBudgets(state, now=clock)
    spent, under_way = [0, 0, 0], []
    for act, which, tokens in steps:
        match act:
            case "reserve":
                budget = holders[which].limits.tokens_per_day
                day = await budgets.reserve(holders[which], tokens)
                assert (day is None) == (budget is not None and spent[which] + tokens > budget)
                if day is not None:
                    spent[which] += tokens
                    under_way.append((which, day, tokens))
            case "settle" if which < len(under_way):
                owner, day, reserved = under_way.pop(which)
                budgets.settle(holders[owner], day, reserved=reserved, took=tokens)
                if day == clock.now.date().isoformat():
                    spent[owner] += tokens - reserved
            case "wait":
                today = clock.now.date()
                clock.pass_s(which * 3_600)
                spent = spent if clock.now.date() == today else [0, 0, 0]
            case "restart":
                state.close()
                state = StateDb(folder)
                budgets = TokenBudgets(state, now=clock)
                under_way.clear()
        assert await budgets.left(holders[0]) == max(0, 100 - spent[0])
        assert await budgets.left(holders[1]) == 0 and await budgets.left(holders[2]) is None
    state.close()


@pytest.mark.anyio
async def test_a_budget_is_whole_again_at_midnight_in_utc(state: StateDb, clock: Clock) -> None:
    key, budgets = holder(0, 50), TokenBudgets(state, now=clock)
    clock.now = datetime(2026, 5, 8, 23, 59, 50, tzinfo=UTC)
    day = await budgets.reserve(key, 50)
    assert day == "2026-05-08" and await budgets.reserve(key, 1) is None
    assert budgets.renewal_s == 10
    clock.pass_s(budgets.renewal_s)
    assert await budgets.left(key) == 50
    assert await budgets.reserve(key, 20) == "2026-05-09"
    budgets.settle(key, day, reserved=50, took=5)
    assert await budgets.left(key) == 30, "yesterday's call gives nothing back today"


KILLED = """
import asyncio, os, signal, sys
from datetime import UTC, datetime
from pathlib import Path
from undertow.serving.auth.principal import KeyLimits, Principal, TenantScope
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.state_db import StateDb

async def spend():
    key = Principal("0" * 12, "", TenantScope(all_tenants=True), frozenset(), KeyLimits(tokens_per_day=1_000))
    budgets = TokenBudgets(StateDb(Path(sys.argv[1])), now=lambda: datetime(2026, 5, 8, 12, tzinfo=UTC))
    for _ in range(10):
        budgets.settle(key, await budgets.reserve(key, 50), reserved=50, took=40)
    await budgets.reserve(key, 50)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(spend())
"""


@pytest.mark.anyio
async def test_a_kill_forgets_nothing_and_a_call_that_it_cut_off_counts_in_full(
    tmp_path: Path, clock: Clock
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    with closing(StateDb(tmp_path)) as state:
        assert await TokenBudgets(state, now=clock).left(holder(0, 1_000)) == 1_000 - 10 * 40 - 50


@pytest.mark.anyio
async def test_what_a_disk_refuses_to_store_is_not_reserved_or_stays_reserved(
    state: StateDb, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    budgets, key = TokenBudgets(state, now=clock), holder(1, 100)
    day = await budgets.reserve(key, 60)
    assert day is not None
    state._thread.submit(state._db.execute, "pragma query_only = on").result()
    with pytest.raises(StateError, match="cannot write"):
        await budgets.reserve(key, 5)
    budgets.settle(key, day, reserved=60, took=10)
    state._thread.submit(state._db.execute, "pragma query_only = off").result()
    assert await budgets.left(key) == 40
    assert "stays charged all that it reserved" in caplog.text

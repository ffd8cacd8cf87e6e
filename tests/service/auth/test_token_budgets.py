"""Tokens per day of a key, against plain sums, and what a restart finds of them."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.serving.auth.principal import KeyLimits, Principal, TenantScope
from undertow.serving.http.middleware.token_budget import FORMER_NAME, TokenBudgets
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
    holders = [holder(n, budget) for n, budget in enumerate([100, 0, None])]
    clock = Clock()
    with TemporaryDirectory() as folder:
        state = StateDb(Path(folder))
        budgets = TokenBudgets(state, now=clock)
        spent, under_way = [0, 0, 0], []
        for act, which, tokens in steps:
            match act:
                case "reserve":
                    budget = holders[which].limits.tokens_per_day
                    reservation = budgets.reserve(holders[which], tokens)
                    assert (reservation is None) == (budget is not None and spent[which] + tokens > budget)
                    if reservation is not None:
                        spent[which] += tokens
                        under_way.append((which, clock.now.date(), reservation))
                case "settle" if which < len(under_way):
                    owner, day, reservation = under_way.pop(which)
                    for _ in range(2):  # the second time changes nothing
                        budgets.settle(reservation, tokens)
                    if day == clock.now.date():
                        spent[owner] += tokens - reservation.tokens
                case "wait":
                    day = clock.now.date()
                    clock.pass_s(which * 3_600)
                    spent = spent if clock.now.date() == day else [0, 0, 0]
                case "restart":
                    state.close()
                    state = StateDb(Path(folder))
                    budgets = TokenBudgets(state, now=clock)
                    under_way.clear()
            assert budgets.left(holders[0]) == max(0, 100 - spent[0])
            assert budgets.left(holders[1]) == 0 and budgets.left(holders[2]) is None
        state.close()


def test_a_budget_is_whole_again_at_midnight_in_utc(state: StateDb, clock: Clock) -> None:
    key, budgets = holder(0, 50), TokenBudgets(state, now=clock)
    clock.now = datetime(2026, 5, 8, 23, 59, 50, tzinfo=UTC)
    reservation = budgets.reserve(key, 50)
    assert reservation is not None and budgets.reserve(key, 1) is None
    assert budgets.renewal_s == 10
    clock.pass_s(budgets.renewal_s)
    assert budgets.left(key) == 50
    budgets.settle(reservation, 5)
    assert budgets.left(key) == 50, "yesterday's call gives nothing back today"


KILLED = """
import os, signal, sys
from datetime import UTC, datetime
from pathlib import Path
from undertow.serving.auth.principal import KeyLimits, Principal, TenantScope
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.state_db import StateDb

key = Principal("0" * 12, "", TenantScope(all_tenants=True), frozenset(), KeyLimits(tokens_per_day=1_000))
state = StateDb(Path(sys.argv[1]))
budgets = TokenBudgets(state, now=lambda: datetime(2026, 5, 8, 12, tzinfo=UTC))
for _ in range(10):
    budgets.settle(budgets.reserve(key, 50), 40)
budgets.reserve(key, 50)
state.submit(lambda db: None).result()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_forgets_nothing_and_a_call_that_it_cut_off_counts_in_full(
    tmp_path: Path, clock: Clock
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    state = StateDb(tmp_path)
    assert TokenBudgets(state, now=clock).left(holder(0, 1_000)) == 1_000 - 10 * 40 - 50
    state.close()


def test_a_disk_that_refuses_stops_no_call_is_logged_and_written_to_later(
    state: StateDb, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budgets, one, other = TokenBudgets(state, now=clock), holder(1, 100), holder(2, 100)
    state._thread.submit(state._db.execute, "pragma query_only = on").result()
    assert budgets.reserve(one, 60) is not None and budgets.left(one) == 40
    state._thread.submit(state._db.execute, "pragma query_only = off").result()
    assert "cannot write" in caplog.text and "a restart gives keys again" in caplog.text
    budgets.reserve(other, 5)
    again = TokenBudgets(state, now=clock)
    assert (again.left(one), again.left(other)) == (40, 95)


@pytest.mark.parametrize(("day", "left"), [("2026-05-08", 70), ("2026-05-07", 100)])
def test_the_file_of_an_earlier_version_is_imported_once(
    day: str, left: int, state: StateDb, tmp_path: Path, clock: Clock
) -> None:
    key = holder(0, 100)
    file = tmp_path / FORMER_NAME
    file.write_bytes(orjson.dumps({"day": day, "tokens": {key.key_id: 30}}))
    for _ in range(2):
        assert TokenBudgets(state, now=clock).left(key) == left
        assert not file.exists()


@pytest.mark.parametrize("contents", ["", "[]", '{"day": "2026-05-08"}', '{"day": "", "tokens": {"a": "x"}}'])
def test_a_damaged_file_of_an_earlier_version_is_reported_and_kept(
    contents: str, state: StateDb, tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / FORMER_NAME).write_text(contents)
    with pytest.raises(StateError, match=r"is damaged. Remove it"):
        TokenBudgets(state, now=clock)
    (tmp_path / FORMER_NAME).unlink()
    TokenBudgets(state, now=clock)

"""Limits of keys: requests a second against an exact token bucket, tokens a day against plain sums."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.serving.auth.limits import NS_PER_S, RequestRates, SpendingError, TokenBudgets
from undertow.serving.auth.principal import NO_LIMITS, KeyLimits, Principal, TenantScope

from ...support.clock import Clock


def holder(n: int = 0, limits: KeyLimits = NO_LIMITS) -> Principal:
    return Principal(f"{n:012x}", "", TenantScope(all_tenants=True), frozenset(), limits)


class NsClock:
    def __init__(self) -> None:
        self.now_ns = 10**15

    def __call__(self) -> int:
        return self.now_ns


# ---- requests a second


@given(
    rate=st.sampled_from([0.001, 0.5, 1.0, 2.0, 8.0, 1_000.0, 1_000_000.0]),
    burst=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 22)), max_size=40),
)
def test_a_bucket_grants_what_the_textbook_s_does(
    rate: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    """Time in units of 1 / rate. The book's bucket is filled little by little, in fractions."""
    clock = NsClock()
    rates, key = RequestRates(clock_ns=clock), holder(limits=KeyLimits(rate, burst))
    per_ns = Fraction(1, round(NS_PER_S / rate))
    level = Fraction(burst)
    for pause, n in steps:
        waited_ns = int(pause / per_ns)
        clock.now_ns += waited_ns
        level = min(Fraction(burst), level + waited_ns * per_ns)
        wait_s = rates.take(key, n)
        if n > burst:
            assert math.isinf(wait_s)
        elif level >= n:
            assert wait_s == 0
            level -= n
        else:
            assert wait_s == pytest.approx(float((n - level) / per_ns / NS_PER_S), rel=1e-9)


@given(
    rate=st.floats(1e-3, 1e6),
    burst=st.integers(1, 50),
    asked=st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_who_waits_as_long_as_told_is_let_through_and_nobody_gets_more(
    rate: float, burst: int, asked: list[int]
) -> None:
    clock = NsClock()
    began_ns = clock.now_ns
    rates, key = RequestRates(clock_ns=clock), holder(limits=KeyLimits(rate, burst))
    granted = 0
    for n in asked:
        n = min(n, burst)
        if wait_s := rates.take(key, n):
            clock.now_ns += math.ceil(wait_s * NS_PER_S)
            assert rates.take(key, n) == 0
        granted += n
        interval_ns = round(NS_PER_S / rate)
        assert granted <= burst + (clock.now_ns - began_ns) / interval_ns + 1e-6


def test_keys_have_buckets_of_their_own_and_new_limits_hold_at_once() -> None:
    rates = RequestRates(clock_ns=NsClock())
    slow, other = holder(1, KeyLimits(1, 2)), holder(2, KeyLimits(1, 2))
    assert [rates.take(slow) for _ in range(3)] == [0, 0, 1]
    assert rates.take(other) == 0
    assert rates.take(holder(1, KeyLimits(10, 25))) == 0
    assert rates.take(holder(3)) == 0 and len(rates) == 2, "without a limit nothing is kept"


def test_memory_is_bounded_and_those_who_lack_most_are_kept() -> None:
    clock = NsClock()
    rates = RequestRates(clock_ns=clock, most_buckets=64)
    greedy = holder(10**6, KeyLimits(0.01, 5))
    assert rates.take(greedy, 5) == 0
    for n in range(1_000):
        assert rates.take(holder(n, KeyLimits(1, 10))) == 0
        assert len(rates) <= 64
    assert rates.take(greedy) == 100, "still empty"
    clock.now_ns += 2 * NS_PER_S
    for n in range(1_000, 1_070):
        rates.take(holder(n, KeyLimits(1_000, 10)))
        clock.now_ns += NS_PER_S // 100
    assert len(rates) <= 64
    assert rates.take(greedy) == pytest.approx(97.3, abs=0.01)


def test_threads_together_get_no_more_than_the_burst() -> None:
    rates, key = RequestRates(clock_ns=NsClock()), holder(limits=KeyLimits(1, 100))
    start = threading.Barrier(8)

    def take(_: int) -> int:
        start.wait()
        return sum(rates.take(key) == 0 for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 100


# ---- tokens a day


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spending.json"


@pytest.fixture
def budgets(path: Path, clock: Clock) -> Iterator[TokenBudgets]:
    opened = TokenBudgets(path, now=clock)
    yield opened
    opened.close()


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
    holders = [holder(n, KeyLimits(tokens_per_day=budget)) for n, budget in enumerate([100, 0, None])]
    clock = Clock()
    with TemporaryDirectory() as folder:
        budgets = TokenBudgets(Path(folder) / "spending.json", now=clock)
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
                    budgets.close()
                    budgets = TokenBudgets(Path(folder) / "spending.json", now=clock)
                    under_way.clear()
            assert budgets.left(holders[0]) == max(0, 100 - spent[0])
            assert budgets.left(holders[1]) == 0 and budgets.left(holders[2]) is None
        budgets.close()


def test_calls_side_by_side_do_not_exceed_a_budget_together(budgets: TokenBudgets) -> None:
    key = holder(limits=KeyLimits(tokens_per_day=1_000))
    with ThreadPoolExecutor(8) as pool:
        reservations = list(pool.map(lambda _: budgets.reserve(key, 30), range(80)))
    granted = [r for r in reservations if r is not None]
    assert len(granted) == 33
    for reservation in granted:
        budgets.settle(reservation, 10)
    assert budgets.left(key) == 670


def test_a_budget_is_whole_again_at_midnight_in_utc(budgets: TokenBudgets, clock: Clock) -> None:
    key = holder(limits=KeyLimits(tokens_per_day=50))
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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from undertow.serving.auth.limits import TokenBudgets
from undertow.serving.auth.principal import KeyLimits, Principal, TenantScope

key = Principal("0" * 12, "", TenantScope(all_tenants=True), frozenset(), KeyLimits(tokens_per_day=1_000))
moments = [datetime(2026, 5, 8, 12, tzinfo=UTC)]
budgets = TokenBudgets(Path(sys.argv[1]), now=lambda: moments[-1])
for _ in range(10):  # a call of 40 tokens each 0.4 s
    budgets.settle(budgets.reserve(key, 50), 40)
    moments.append(moments[-1] + timedelta(seconds=0.4))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_forgets_no_more_than_the_last_second(path: Path, clock: Clock) -> None:
    """And what was reserved when the file was last written counts in full: 10 tokens more than were taken."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    budgets = TokenBudgets(path, now=clock)
    left = budgets.left(holder(limits=KeyLimits(tokens_per_day=1_000)))
    assert left is not None and 600 - 10 <= left <= 600 + 3 * 40
    budgets.close()


def test_the_file_belongs_to_one_process(path: Path, budgets: TokenBudgets, clock: Clock) -> None:
    with pytest.raises(SpendingError, match="belongs to a service that is running"):
        TokenBudgets(path, now=clock)
    budgets.close()
    TokenBudgets(path, now=clock).close()


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"[]",
        b'{"day": "2026-05-08"}',
        b'{"day": "2026-05-08", "tokens": {"ada": 1}}',
        b'{"day": "2026-05-08", "tokens": {"000000000000": -1}}',
        b'{"day": "2026-05-08", "tokens": {"000000000000": true}}',
    ],
)
def test_a_damaged_file_is_told_and_leaves_no_lock(contents: bytes, path: Path, clock: Clock) -> None:
    path.write_bytes(contents)
    for _ in range(2):
        with pytest.raises(SpendingError, match="is damaged"):
            TokenBudgets(path, now=clock)
    path.unlink()
    TokenBudgets(path, now=clock).close()


def test_a_disk_that_refuses_stops_no_call_and_is_told(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = TokenBudgets(path, now=clock)
    key = holder(limits=KeyLimits(tokens_per_day=100))
    path.mkdir()  # a folder in the file's place refuses even root
    clock.pass_s(2)
    reservation = budgets.reserve(key, 60)
    assert reservation is not None and budgets.left(key) == 40
    assert "What keys spend is not kept" in caplog.text
    path.rmdir()
    clock.pass_s(2)
    budgets.settle(reservation, 30)
    assert orjson.loads(path.read_bytes()) == {"day": "2026-05-08", "tokens": {key.key_id: 30}}
    budgets.settle(reservation, 30)
    assert budgets.reserve(key, 1) is not None
    path.unlink()
    path.mkdir()
    with pytest.raises(SpendingError, match="a restart gives keys again"):
        budgets.close()
    path.rmdir()
    TokenBudgets(path, now=clock).close()

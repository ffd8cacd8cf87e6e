"""Requests per second of a key, against an exact token bucket."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.serving.auth.limits import NS_PER_S, RequestRates
from undertow.serving.auth.principal import NO_LIMITS, KeyLimits, Principal, TenantScope


def holder(n: int = 0, limits: KeyLimits = NO_LIMITS) -> Principal:
    return Principal(f"{n:012x}", "", TenantScope(all_tenants=True), frozenset(), limits)


class NsClock:
    def __init__(self) -> None:
        self.now_ns = 10**15

    def __call__(self) -> int:
        return self.now_ns


@given(
    rate=st.sampled_from([0.001, 0.5, 1.0, 2.0, 8.0, 1_000.0, 1_000_000.0]),
    burst=st.integers(1, 20),
    pauses=st.lists(st.just(0.0) | st.floats(0, 3), max_size=80),
)
def test_a_bucket_grants_what_the_textbook_s_does(rate: float, burst: int, pauses: list[float]) -> None:
    """Time in units of 1 / rate. The book's bucket is filled little by little, in fractions."""
    clock = NsClock()
    rates, key = RequestRates(clock_ns=clock), holder(limits=KeyLimits(rate, burst))
    per_ns = Fraction(1, round(NS_PER_S / rate))
    level = Fraction(burst)
    for pause in pauses:
        waited_ns = int(pause / per_ns)
        clock.now_ns += waited_ns
        level = min(Fraction(burst), level + waited_ns * per_ns)
        wait_s = rates.take(key)
        if level >= 1:
            assert wait_s == 0
            level -= 1
        else:
            assert wait_s == pytest.approx(float((1 - level) / per_ns / NS_PER_S), rel=1e-9)


@given(rate=st.floats(1e-3, 1e6), burst=st.integers(1, 50), requests=st.integers(1, 120))
def test_a_request_after_the_wait_is_let_through_and_nobody_gets_more(
    rate: float, burst: int, requests: int
) -> None:
    clock = NsClock()
    began_ns = clock.now_ns
    rates, key = RequestRates(clock_ns=clock), holder(limits=KeyLimits(rate, burst))
    for granted in range(1, requests + 1):
        if wait_s := rates.take(key):
            clock.now_ns += math.ceil(wait_s * NS_PER_S)
            assert rates.take(key) == 0
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
    assert [rates.take(greedy) for _ in range(5)] == [0] * 5
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

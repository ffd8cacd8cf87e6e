"""Pacing: the share of the time that a tenant's heavy work takes, and when it takes all of it."""

from __future__ import annotations

import pytest

from undertow.engine.base import pacing
from undertow.engine.base.pacing import BURST_S, MOST_REST_S, SERVED_S, SHARE, Pacing, Served


class World:
    """A clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.served = Served(self.clock_s)
        self.pacing = Pacing(self.served, self.clock_s)

    def clock_s(self) -> float:
        return self.now_s

    def worked_s(self, seconds: float, piece_s: float, *others: str) -> float:
        """How much of so many seconds ann's work takes, in pieces, while others send requests."""
        end_s, worked_s = self.now_s + seconds, 0.0
        while self.now_s < end_s:
            for other in others:
                self.served.note(other)
            if rest_s := self.pacing.rest_s("ann"):
                self.now_s += min(rest_s, SERVED_S / 2)
                continue
            self.now_s += piece_s
            worked_s += piece_s
            self.pacing.worked("ann", piece_s)
        return worked_s


@pytest.mark.parametrize("piece_s", [0.001, 0.03, 0.5])
def test_while_others_are_served_heavy_work_takes_its_share_of_the_time_after_a_burst(piece_s: float) -> None:
    worked_s = World().worked_s(60.0, piece_s, "bob", "ann")
    assert worked_s == pytest.approx(BURST_S + SHARE * 60.0, abs=piece_s + 0.1)


def test_alone_it_takes_all_of_the_time() -> None:
    assert World().worked_s(60.0, 0.03, "ann") == pytest.approx(60.0, abs=0.1)
    assert World().worked_s(60.0, 0.03) == pytest.approx(60.0, abs=0.1)


def test_others_count_for_a_second_after_each_request_whoever_asked_last() -> None:
    world = World()
    world.pacing.worked("ann", 10.0)
    assert not world.pacing.rest_s("ann")
    world.served.note("bob")
    assert world.pacing.rest_s("ann") and not world.pacing.rest_s("bob")
    for _ in range(3):
        world.served.note("ann")
    assert world.pacing.rest_s("ann"), "bob is being served still"
    world.now_s += SERVED_S
    assert world.served.any is False and not world.pacing.rest_s("ann")
    world.served.note("ann")
    assert world.served.any and not world.pacing.rest_s("ann")
    world.served.note("")
    assert world.pacing.rest_s("ann"), "of several tenants"


def test_a_piece_of_any_length_is_followed_by_a_rest_that_ends() -> None:
    world = World()
    world.pacing.worked("ann", 3_600.0)
    world.served.note("bob")
    assert world.pacing.rest_s("ann") == pytest.approx(MOST_REST_S)


def test_work_is_timed_even_if_it_fails_and_one_kind_does_not_count_for_another() -> None:
    world = World()

    def fail() -> None:
        world.now_s += 0.3
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.pacing.measured("ann")(fail)()
    world.served.note("bob")
    assert world.pacing.rest_s("ann") == pytest.approx((0.3 - BURST_S) / SHARE - 0.3)
    assert not Pacing(world.served, world.clock_s).rest_s("ann")
    assert world.pacing.measured("bob")(lambda: "done")() == "done"


def test_tenants_that_worked_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MOST_TENANTS", 2)
    world = World()
    for tenant in ("ann", "bob", "ann", "cy"):
        world.pacing.worked(tenant, 1.0)
    world.served.note("dee")
    assert [bool(world.pacing.rest_s(tenant)) for tenant in ("ann", "bob", "cy")] == [True, False, True]

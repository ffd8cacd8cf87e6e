"""How many turns a step takes, and how long it may decide. Clocks are made up, the engine is real."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.pacing import Pacing
from undertow.engine.step import scheduler
from undertow.engine.step.batch_size import ADMISSION_S, DECIDING_SHARE, LEAST_TURNS, MOST_TURNS, BatchSizer
from undertow.engine.step.scheduler import StepReport
from undertow.engine.tenants.registry import ArenaFull

from ...support.cli import turn_line, write_log
from ...support.engine import NEVER, open_engine, put, turns_of
from ...support.faults.harness import end_state
from ...support.service.clock import Seconds


def admit(batch_sizer: BatchSizer, turn_s: float, *, turns: int | None = None) -> None:
    """One step whose turns cost so much each; as many as the pace has, unless given."""
    batch_sizer.note(fresh := batch_sizer.turns if turns is None else turns, fresh * turn_s)


@pytest.mark.parametrize(
    ("turn_s", "settles_at"),
    [(2e-5, MOST_TURNS), (1e-3, 500), (2e-3, 250), (1e-2, LEAST_TURNS), (0.0, MOST_TURNS)],
)
def test_it_settles_at_what_fits(turn_s: float, settles_at: int) -> None:
    batch_sizer = BatchSizer()
    for _ in range(20):
        admit(batch_sizer, turn_s)
    assert batch_sizer.turns == pytest.approx(settles_at, abs=1)  # half a second is cut to whole turns


def test_it_at_most_doubles_and_shrinks_at_once() -> None:
    batch_sizer = BatchSizer()
    seen = [batch_sizer.turns]
    while batch_sizer.turns < MOST_TURNS:
        admit(batch_sizer, 1e-6)
        seen.append(batch_sizer.turns)
    assert seen == [64, 128, 256, 512, 1024, 2048]
    admit(batch_sizer, ADMISSION_S / 100)
    assert batch_sizer.turns == 100


def test_what_says_little_changes_nothing() -> None:
    """A few new turns among many that are there already; none at all; a fixed number stays."""
    batch_sizer = BatchSizer()
    admit(batch_sizer, 1e-9)
    before, fixed = batch_sizer.turns, BatchSizer(7)
    admit(batch_sizer, 10.0, turns=before // 2 - 1)
    admit(batch_sizer, 10.0, turns=0)
    admit(fixed, 10.0)
    assert (batch_sizer.turns, fixed.turns) == (before, 7)


def test_a_step_is_told_how_long_its_admission_took_unless_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[int, float]] = []
    monkeypatch.setattr(BatchSizer, "note", lambda _, *told: noted.append(told))
    with open_engine(tmp_path / "store", **NEVER) as engine:
        engine.add_batch(turns_of("ann", 3))
        engine.add_batch(turns_of("ann", 5))
        assert [(fresh, took_s > 0) for fresh, took_s in noted] == [(3, True), (2, True)]
        monkeypatch.setattr(engine.tenants, "reserve", Mock(side_effect=ArenaFull("full")))
        with pytest.raises(ArenaFull):
            engine.add_batch(turns_of("bob", 1))
        assert len(noted) == 2


def test_steps_of_an_engine_grow_while_they_are_quick(tmp_path: Path) -> None:
    """Each step takes in what the one before has taught; the end state is that of steps of one turn."""
    turns = turns_of("ann", 300)
    with open_engine(tmp_path / "paced", **NEVER) as engine:
        put(engine, turns)
        steps = []
        while len(engine.scheduler.inbox):
            steps.append(engine.step().admitted)
        assert steps[0] == LEAST_TURNS
        assert all(LEAST_TURNS <= n <= MOST_TURNS for n in steps[:-1])
        assert sum(steps) == len(turns)
        assert engine.drain()
    with open_engine(tmp_path / "one_by_one", **NEVER, batch_turns=1) as engine:
        for turn in turns:
            engine.add_batch([turn])
        assert engine.drain()
    paced, alone = (end_state(tmp_path / name) for name in ("paced", "one_by_one"))
    assert paced == alone


def test_deciding_takes_a_tenth_of_the_time() -> None:
    clock = Seconds()
    share = Pacing(None, clock, burst_s=0.0, share=DECIDING_SHARE)
    decided_s = 0.0
    for _ in range(1_000):
        clock.now_s += 0.1
        if not share.rest_s(""):
            clock.now_s += 0.5
            decided_s += 0.5
            share.worked("", 0.5)
    assert decided_s == pytest.approx(clock.now_s / 10, rel=0.05)


def test_a_log_is_stored_before_it_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once deciding has had its share, turns are stored and searchable, and nothing else."""
    monkeypatch.setattr(scheduler, "DECIDING_SHARE", 1e-9)
    log = write_log(tmp_path / "log", [turn_line("ann", n, f"word{n}") for n in range(300)])
    steps: list[StepReport] = []
    with open_engine(tmp_path / "store", **NEVER, batch_turns=50) as engine:
        ingest = Ingest(engine, format="messages", on_step=steps.append)
        ingest.feed([log])
        assert [step.admitted for step in steps] == [50] * 6
        assert [step.decided for step in steps] == [50, 0, 0, 0, 0, 0]
        assert engine.lag.undecided_turns == 250
        assert "word299" in engine.search("ann", "word299", k_sub=1).turns[0].memory
        assert ingest.settle()
        assert engine.lag.undecided_turns == 0

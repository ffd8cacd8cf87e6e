"""A progress line on standard error while an engine works; nothing where that is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import progress as bars

from undertow.serving.cli.output import console

if TYPE_CHECKING:
    from undertow.engine.engine import Engine
    from undertow.engine.scheduler import StepReport

REFRESH_S = 0.25


class Progress:
    """Shows turns stored and decided, LLM calls in flight and the consolidation lag."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._admitted = 0
        self._decided = 0
        self._shown_s = 0.0
        self._bar = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=20),
            bars.TimeElapsedColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("opening", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._bar.stop()

    def step(self, report: StepReport) -> None:
        """Count a step; redraw a few times a second."""
        self._admitted += report.admitted
        self._decided += report.decided
        now_s = time.monotonic()
        if self._bar.disable or now_s - self._shown_s < REFRESH_S:
            return
        self._shown_s = now_s
        lag = self._engine.lag
        self._bar.update(
            self._task,
            description=f"{self._admitted:,} stored, {self._decided:,} decided, "
            f"{self._engine.llm_in_flight} LLM calls, lag {lag.undecided_turns:,}",
            completed=self._decided,
            total=self._decided + lag.undecided_turns,
        )

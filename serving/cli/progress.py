"""A progress line on standard error while an engine works; nothing where that is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import progress as bars

from undertow.serving.cli.output import console

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.step.scheduler import StepReport

REFRESH_S = 0.25


class Bar:
    """One line of text and a bar; redrawn a few times a second."""

    def __init__(self) -> None:
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

    @property
    def is_due(self) -> bool:
        """Whether it is shown at all, and was not redrawn just now."""
        return not self._bar.disable and time.monotonic() - self._shown_s >= REFRESH_S

    def show(self, text: str, completed: int, total: int | None) -> None:
        self._shown_s = time.monotonic()
        self._bar.update(self._task, description=text, completed=completed, total=total)


class Progress(Bar):
    """Shows turns stored and decided, LLM calls in flight and the consolidation lag of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._admitted = 0
        self._decided = 0

    def step(self, report: StepReport) -> None:
        """Count a step."""
        self._admitted += report.admitted
        self._decided += report.decided
        if self.is_due:
            lag = self._engine.lag
            text = (
                f"{self._admitted:,} stored, {self._decided:,} decided, "
                f"{self._engine.llm_in_flight} LLM calls, lag {lag.undecided_turns:,}"
            )
            self.show(text, self._decided, self._decided + lag.undecided_turns)

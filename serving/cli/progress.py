"""Progress and problems of a run, on standard error while it works."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

from rich import progress as bars

from undertow.serving.cli.output import console, say

if TYPE_CHECKING:
    from undertow.engine.base.model import BadInput
    from undertow.engine.base.results import IngestReport

REFRESH_S = 0.25
LONG_S = 4.0
# errors, and warnings, that are reported one by one
SHOWN_PROBLEMS = 50


@contextmanager
def said_if_long(words: str) -> Iterator[None]:
    """Say what is waited for, if the block takes more than some seconds."""
    timer = Timer(LONG_S, say, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Bar(bars.Progress):
    """One line of text and a bar, redrawn a few times a second; nothing where there is no terminal."""

    def __init__(self) -> None:
        columns = (
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=20),
            bars.TimeElapsedColumn(),
        )
        off = not sys.stderr.isatty()
        super().__init__(*columns, console=console(stderr=True), transient=True, disable=off)
        self._shown_s = 0.0
        self._only = self.add_task("opening", total=None)

    @property
    def is_due(self) -> bool:
        """Whether to redraw: there is a terminal, and the last redraw was some time ago."""
        return not self.disable and time.monotonic() - self._shown_s >= REFRESH_S

    def show(self, text: str, completed: int, total: int | None) -> None:
        if self.is_due:
            self._shown_s = time.monotonic()
            self.update(self._only, description=text, completed=completed, total=total)


class Problems:
    """Writes the first errors and warnings about input to standard error as they occur."""

    def __init__(self) -> None:
        self._errors = 0
        self._warnings = 0

    def error(self, problem: BadInput) -> None:
        self._errors += 1
        if self._errors <= SHOWN_PROBLEMS:
            say(str(problem))

    def warning(self, text: str) -> None:
        self._warnings += 1
        if self._warnings <= SHOWN_PROBLEMS:
            say(f"warning: {text}")

    def tell_rest(self, report: IngestReport) -> None:
        """Say how many problems of the run were not shown."""
        counts = (("errors", report.errors, self._errors), ("warnings", report.warnings, self._warnings))
        for name, count, shown in counts:
            if more := count - min(shown, SHOWN_PROBLEMS):
                say(f"... and {more:,} more {name}")

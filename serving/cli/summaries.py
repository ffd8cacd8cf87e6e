"""Reports refused input while a run reads logs, and its figures afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from undertow.engine.base.model import BadInput
from undertow.serving.cli.output import say

if TYPE_CHECKING:
    from undertow.engine.api.ingest_files import IngestReport
    from undertow.engine.cluster.bulk.ingest import BulkReport

# problems of each kind that are reported one by one
SHOWN_PROBLEMS = 50
# problems of each file that the summary quotes
FIRST_PROBLEMS = 5


class Problems:
    """Writes the first errors and warnings to standard error as they occur."""

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
        """Report how many problems of the run were not shown."""
        told = (("errors", report.errors, self._errors), ("warnings", report.warnings, self._warnings))
        for name, count, shown in told:
            if more := count - min(shown, SHOWN_PROBLEMS):
                say(f"... and {more:,} more {name}")


def summary_of(counts: Mapping[str, int], report: IngestReport, elapsed_s: float) -> dict[str, Any]:
    """The store's counts, and the figures of this run."""
    return {
        **counts,
        "elapsed_s": round(elapsed_s, 3),
        "turns_per_s": round(report.turns_per_s, 1),
        "errors": report.errors,
        "warnings": report.warnings,
    }


def cluster_summary_of(counts: Mapping[str, int], report: BulkReport, elapsed_s: float) -> dict[str, Any]:
    """As `summary_of`, with the parked turns and the problems of each file."""
    for reason in report.parked_reasons:
        say(f"parked: {reason}")
    files = [
        {
            "file": log.shown,
            "turns": found.turns,
            "errors": found.errors,
            "warnings": found.warnings,
            "first": [str(p) for p in (*found.first_errors, *found.first_warnings)][:FIRST_PROBLEMS],
        }
        for log, found in report.files
    ]
    totals = summary_of(counts, report, elapsed_s)
    return {**totals, "parked_turns": report.parked_turns, "files": files}

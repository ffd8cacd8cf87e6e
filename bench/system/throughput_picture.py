"""The picture of a run of `undertow bench ingest`: what was done by when, and what was under way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG. ImportError: matplotlib is missing."""
    from matplotlib.figure import Figure  # no pyplot: no window, no state of its own

    over_time = result["over_time"]
    at_s = over_time["at_s"]
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    done, queues, calls = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])

    done.plot(at_s, over_time["searchable_turns"], label="searchable", color="tab:blue")
    done.plot(at_s, over_time["consolidated_turns"], label="consolidated", color="tab:orange")
    done.set_ylabel("turns")
    waits = result["wait_s"]
    done.set_title(
        f"{result['turns']:,} turns of {result['tenants']:,} tenants, {result['texts']}, "
        f"encoder {result['encoder']}, LLM {result['llm']}\n"
        f"{result['searchable_turns_per_s']:,.0f} turns/s to searchable, "
        f"{result['consolidated_turns_per_s']:,.0f} to consolidated; a turn waits "
        f"{waits['searchable']['p50']:.2f} s and {waits['consolidated']['p50']:.2f} s (medians)",
        fontsize=10,
        loc="left",
    )

    queues.plot(at_s, over_time["undecided_turns"], label="searchable, not decided", color="tab:orange")
    queues.plot(at_s, over_time["queued_turns"], label="waiting to be stored", color="tab:blue")
    queues.set_ylabel("turns in a queue")

    calls.plot(at_s, over_time["jobs_running"], label="tenants with a job", color="tab:green")
    calls.plot(at_s, over_time["llm_in_flight"], label="LLM requests in flight", color="tab:red")
    calls.set_ylabel("under way")
    calls.set_xlabel("seconds from the first turn")

    for part in (done, queues, calls):
        part.set_ylim(bottom=0)
        part.grid(alpha=0.3)
        part.legend(loc="best", fontsize=9)
    figure.savefig(path, dpi=120)

"""`undertow ingest`: logs in, memories out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypedDict

import typer

from undertow.engine.base.model import BadInput
from undertow.serving.cli import options as opt
from undertow.serving.cli.drain import ctrl_c, drain_cluster, report_pending
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.output import put_json, put_pairs, put_table, say
from undertow.serving.cli.progress import Bar, Problems
from undertow.serving.cli.stores import is_engine, open_memory, refuse_root

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.ingest_files import Ingest
    from undertow.engine.base.config import Settings
    from undertow.engine.base.results import IngestReport
    from undertow.engine.cluster.bulk.ingest import BulkIngest, BulkProgress, BulkReport
    from undertow.engine.readers import Format, Log
    from undertow.engine.step.scheduler import StepReport
    from undertow.engine.storage.location import Location
    from undertow.serving.cli.stores import OpenMemory

# problems of each file that the summary of a cluster quotes
FIRST_PROBLEMS = 5
STOPPED = "undertow: stopped at the first refused input (--strict); its batch was not stored."
INTERRUPTED = "Interrupted; every acknowledged turn is stored. Continue with the same command and --resume."


class RunOptions(TypedDict):
    """Arguments that `Ingest` and `BulkIngest` share."""

    format: Format
    resume: bool
    strict: bool
    on_error: Callable[[BadInput], None]
    on_warning: Callable[[str], None]
    stop: Callable[[], bool]


def ingest(
    paths: opt.Paths,
    store: opt.Store,
    format: opt.LogFormat = "auto",
    tenant: opt.Owner = None,
    thresholds: opt.Thresholds = opt.NO_THRESHOLDS,
    models: opt.Models = opt.NO_MODELS,
    batch_turns: opt.BatchTurns = None,
    strict: opt.Strict = False,
    resume: opt.Resume = False,
    trace: opt.TraceFile = None,
    ray: opt.Ray = None,
    shards: opt.Shards = None,
    as_json: opt.AsJson = False,
) -> None:
    """Store conversation logs and consolidate what recurs.

    Turns are durable and searchable at once; memories follow as the LLM answers. Ingesting a log again
    changes nothing. The summary tells what this run did, then counts the whole store. With --ray the logs
    are read on a Ray cluster, and --store is the root of its shards, on storage that all its nodes share;
    turns sent again after a shard died do not count as new.
    """
    began_s = time.perf_counter()
    logs = opt.logs_at(paths, tenant)
    settings = models.settings(batch_turns=batch_turns, **asdict(thresholds))
    _check_options(store, ray, shards, trace)
    opening = open_memory(store, settings, ray, shards=shards, create=True, resume=True, trace=trace)
    with opening as memory, ctrl_c() as interrupted:
        problems = Problems()
        options = RunOptions(
            format=format,
            resume=resume,
            strict=strict,
            on_error=problems.error,
            on_warning=problems.warning,
            stop=interrupted.is_set,
        )
        code, report, more = _run(memory, store, logs, settings, options, interrupted)
        problems.tell_rest(report)
        summary = _summary(memory.stats(), report, time.perf_counter() - began_s) | more
        summary["run"] = _of_run(memory, report)
    _put_summary(summary, store, as_json=as_json)
    raise typer.Exit(code)


def _check_options(store: Location, ray: str | None, shards: int | None, trace: Path | None) -> None:
    """WrongUsage: the options exclude each other, or the trace, written at the end, cannot be written."""
    if ray is None and shards is not None:
        raise WrongUsage("--shards goes with --ray: give --ray local, or the address of a Ray cluster.")
    if trace is None:
        return
    if ray is not None:
        raise WrongUsage("--trace is for one process; leave it out with --ray.")
    refuse_root(store)
    try:
        trace.open("ab").close()
    except OSError as error:
        raise WrongUsage(
            f"--trace {trace} cannot be written: {error.strerror}. Name a file in a writable folder."
        ) from None


def _run(
    memory: OpenMemory,
    store: Location,
    logs: list[Log],
    settings: Settings,
    options: RunOptions,
    interrupted: Event,
) -> tuple[Exit, IngestReport, dict[str, Any]]:
    """Store the logs and wait until everything is decided. For a cluster, with more for the summary."""
    run: Ingest | BulkIngest
    with Bar() as bar:
        if is_engine(memory):
            from undertow.engine.api.ingest_files import Ingest

            run = Ingest(memory, **options, on_step=_step_progress(bar, memory))
            settle: Callable[[], bool | None] = run.settle
            more: Callable[[], dict[str, Any]] = dict
        else:
            from undertow.engine.cluster.bulk.ingest import BulkIngest

            run = BulkIngest(
                store,
                memory,
                **options,
                max_message_bytes=settings.max_message_bytes,
                on_progress=partial(_show_bulk, bar),
            )
            settle = partial(drain_cluster, memory, bar, interrupted)
            more = partial(_bulk_summary, run.report)
        run.feed(logs)
        settled = None if run.report.ended else settle()
    return _exit_code(memory, run.report, settled), run.report, more()


def _exit_code(memory: OpenMemory, report: IngestReport, settled: bool | None) -> Exit:
    """Say how the run ended. `settled`: whether everything is decided; None: cut off before."""
    if report.stopped_by is not None:
        say(STOPPED)
        return Exit.INPUT
    if settled is None or report.interrupted:
        say(INTERRUPTED)
        return Exit.INTERRUPTED
    if not settled and report_pending(memory):
        return Exit.LLM
    return Exit.INPUT if report.errors else Exit.DONE


def _step_progress(bar: Bar, engine: Engine) -> Callable[[StepReport], None]:
    """Shows turns stored and decided, LLM calls in flight and the consolidation lag."""
    admitted = decided = 0

    def show(report: StepReport) -> None:
        nonlocal admitted, decided
        admitted += report.admitted
        decided += report.decided
        if bar.is_due:
            calls, lag = engine.llm_in_flight, engine.lag.undecided_turns
            text = f"{admitted:,} stored, {decided:,} decided, {calls} LLM calls, lag {lag:,}"
            bar.show(text, decided, decided + lag)

    return show


def _show_bulk(bar: Bar, reached: BulkProgress) -> None:
    text = f"{reached.stored_turns:,} stored, {reached.logs_done:,} of {reached.logs:,} logs"
    bar.show(text, reached.logs_done, reached.logs)


def _summary(counts: dict[str, int], report: IngestReport, elapsed_s: float) -> dict[str, Any]:
    """The store's counts and the figures of this run."""
    return {
        **counts,
        "elapsed_s": round(elapsed_s, 3),
        "turns_per_s": round(report.turns_per_s, 1),
        "errors": report.errors,
        "warnings": report.warnings,
    }


def _of_run(memory: OpenMemory, report: IngestReport) -> dict[str, int]:
    """What became of the input of this run, and its LLM calls, which in a cluster the shards make."""
    turns = {
        "read_turns": report.read_turns,
        "new_turns": report.new_turns,
        "known_turns": report.read_turns - report.new_turns,
        "resumed_turns": report.resumed_turns,
        "resumed_errors": report.resumed_errors,
    }
    return {**turns, **asdict(memory.trace.spent)} if is_engine(memory) else turns


def _bulk_summary(report: BulkReport) -> dict[str, Any]:
    """Parked turns, and the problems of each file."""
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
    return {"parked_turns": report.parked_turns, "files": files}


def _put_summary(summary: dict[str, Any], store: Location, *, as_json: bool) -> None:
    if as_json:
        put_json(summary)
        return
    run, files = summary.pop("run"), summary.pop("files", [])
    done = {
        "new turns": run.pop("new_turns"),
        "turns that were there": run.pop("known_turns"),
        "lines refused": summary.pop("errors"),
        "warnings": summary.pop("warnings"),
        "turns skipped by --resume": run.pop("resumed_turns"),
        "lines refused before, by a run resumed": run.pop("resumed_errors"),
    }
    del run["read_turns"]
    done |= {f"LLM {name}" if name == "calls" else name: count for name, count in run.items()}
    rates = {"new turns a second, until searchable": summary.pop("turns_per_s")}
    rates |= {"seconds in all": summary.pop("elapsed_s")}
    done |= {name: rate and f"{rate:,.1f}" for name, rate in rates.items()}
    put_pairs({name: count for name, count in done.items() if count}, title="This run")
    put_pairs(summary, title=f"All of {store}")
    if files:
        put_table(files, ("file", "turns", "errors", "warnings"), title="Files with problems")

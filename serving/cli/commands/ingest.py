"""`undertow ingest`: logs in, memories out."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import typer

from undertow.engine.base.model import InputError
from undertow.serving.cli.cluster_root import refuse_root
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.open_store import ADD_RAY, open_memory
from undertow.serving.cli.options import (
    AsJson,
    BatchTurns,
    EncoderName,
    Llm,
    LogFormat,
    LogFormatName,
    Model,
    Paths,
    Profile,
    Ray,
    Resume,
    Shards,
    Store,
    Strict,
    ThetaCount,
    ThetaMerge,
    ThetaSim,
    TraceFile,
)
from undertow.serving.cli.output import put_json, put_pairs, put_table, say
from undertow.serving.cli.progress import Bar, Progress
from undertow.serving.cli.settings import settings_of
from undertow.serving.cli.settling import ctrl_c, drained, tell_pending
from undertow.serving.cli.summaries import Problems, cluster_summary_of, summary_of

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.ingest_files import Ingest
    from undertow.engine.base.config import Settings
    from undertow.engine.cluster.bulk.ingest import BulkIngest, BulkProgress
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.engine.readers import Format, Log
    from undertow.engine.storage.location import Location
    from undertow.serving.cli.open_store import OpenMemory

STOPPED = "undertow: stopped at the first refused input (--strict); its batch was not stored."
INTERRUPTED = "Interrupted; all that was acknowledged is stored. Go on with the same command and --resume."


class ReadOptions(TypedDict):
    """How to read logs; both ways to ingest use these names."""

    format: Format
    resume: bool
    strict: bool


def ingest(
    paths: Paths,
    store: Store,
    format: LogFormat = LogFormatName.AUTO,
    profile: Profile = None,
    theta_sim: ThetaSim = None,
    theta_merge: ThetaMerge = None,
    theta_count: ThetaCount = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    batch_turns: BatchTurns = None,
    strict: Strict = False,
    resume: Resume = False,
    trace: TraceFile = None,
    ray: Ray = None,
    shards: Shards = None,
    as_json: AsJson = False,
) -> None:
    """Store conversation logs and consolidate what recurs.

    Turns are durable and searchable at once; memories follow as the LLM answers. The same log twice
    changes nothing. The summary counts the whole store; elapsed_s, turns_per_s (new turns until
    searchable), errors and warnings are those of this run. With --ray the logs are read on a Ray cluster,
    and --store is the root of its shards, on storage that all its nodes share; turns that are sent again
    because a shard died do not count as new.
    """
    began_s = time.perf_counter()
    logs = _logs(paths)
    settings = settings_of(
        llm=llm,
        model=model,
        encoder=encoder,
        profile=profile and profile.value,
        theta_sim=theta_sim,
        theta_merge=theta_merge,
        theta_count=theta_count,
        batch_turns=batch_turns,
    )
    reading: ReadOptions = {"format": format.value, "resume": resume, "strict": strict}
    _check_options(ray, shards, trace)
    code, summary = _ingest(logs, store, settings, ray, shards, trace, reading, began_s)
    _put_summary(summary, store, as_json=as_json)
    raise typer.Exit(code)


def _check_options(ray: str | None, shards: int | None, trace: Path | None) -> None:
    """WrongUsage: the options exclude each other, or the trace cannot be written."""
    if ray is None and shards is not None:
        raise WrongUsage("--shards goes with --ray: give --ray local, or the address of a Ray cluster.")
    if ray is not None and trace is not None:
        raise WrongUsage("--trace is for one process; leave it out with --ray.")


def _ingest(
    logs: list[Log],
    store: Location,
    settings: Settings,
    ray: str | None,
    shards: int | None,
    trace_file: Path | None,
    reading: ReadOptions,
    began_s: float,
) -> tuple[Exit, dict[str, Any]]:
    """Read the logs into a store or a cluster; the exit code and the summary."""
    from undertow.engine.api.engine import Engine
    from undertow.engine.base.trace import Trace

    opening = partial(open_memory, store, settings, ray, shards=shards, create=True, resume=True)
    with ExitStack() as stack:
        if trace_file is not None:
            refuse_root(store, ADD_RAY)
            _check_trace(trace_file)
        memory = stack.enter_context(opening(trace=Trace(trace_file)))
        problems = Problems()
        interrupted = stack.enter_context(ctrl_c())
        if isinstance(memory, Engine):
            progress = stack.enter_context(Progress(memory))
            run = _engine_run(memory, reading, problems, progress, interrupted)
            code = _feed(memory, run, logs, progress, interrupted)
            problems.tell_rest(run.report)
            return code, summary_of(memory.stats(), run.report, time.perf_counter() - began_s)
        bar = stack.enter_context(Bar())
        bulk = _cluster_run(memory, store, settings, reading, problems, bar, interrupted)
        code = _feed(memory, bulk, logs, bar, interrupted)
        problems.tell_rest(bulk.report)
        return code, cluster_summary_of(memory.stats(), bulk.report, time.perf_counter() - began_s)


def _engine_run(
    engine: Engine, reading: ReadOptions, problems: Problems, progress: Progress, interrupted: list[int]
) -> Ingest:
    from undertow.engine.api.ingest_files import Ingest

    return Ingest(
        engine,
        **reading,
        on_error=problems.error,
        on_warning=problems.warning,
        on_step=progress.step,
        stop=lambda: bool(interrupted),
    )


def _cluster_run(
    cluster: Cluster,
    root: Location,
    settings: Settings,
    reading: ReadOptions,
    problems: Problems,
    bar: Bar,
    interrupted: list[int],
) -> BulkIngest:
    from undertow.engine.cluster.bulk.feeding import router_to
    from undertow.engine.cluster.bulk.ingest import BulkIngest

    return BulkIngest(
        root,
        partial(router_to, root, settings, cluster.settings),
        **reading,
        max_message_bytes=settings.max_message_bytes,
        on_error=problems.error,
        on_warning=problems.warning,
        on_progress=partial(_show_stored, bar),
        stop=lambda: bool(interrupted),
    )


def _show_stored(bar: Bar, reached: BulkProgress) -> None:
    if bar.is_due:
        text = (
            f"{reached.stored_turns:,} stored, part {reached.wave} of {reached.waves}, "
            f"{reached.groups_left:,} groups left in it"
        )
        bar.show(text, reached.wave - 1, reached.waves)


def _feed(
    memory: OpenMemory, run: Ingest | BulkIngest, logs: list[Log], bar: Bar, interrupted: list[int]
) -> Exit:
    """Store the logs, then wait until everything is decided; the exit code of it all."""
    run.feed(logs)
    report = run.report
    if report.stopped_by is not None:
        say(STOPPED)
        return Exit.INPUT
    settled = None if report.interrupted else _settled(memory, run, bar, interrupted)
    bar.close()
    if settled is None or report.interrupted:
        report.interrupted = True
        say(INTERRUPTED)
        return Exit.INTERRUPTED
    if not settled and tell_pending(memory):
        return Exit.LLM
    return Exit.INPUT if report.errors else Exit.DONE


def _settled(memory: OpenMemory, run: Ingest | BulkIngest, bar: Bar, interrupted: list[int]) -> bool | None:
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.ingest_files import Ingest

    if isinstance(run, Ingest):
        return run.settle()
    assert not isinstance(memory, Engine)
    return drained(memory, bar, interrupted)


def _put_summary(summary: dict[str, Any], store: Location, *, as_json: bool) -> None:
    if as_json:
        put_json(summary)
        return
    files = summary.pop("files", [])
    put_pairs(summary, title=str(store))
    if files:
        put_table(files, ("file", "turns", "errors", "warnings"), title="Files with problems")


def _logs(paths: list[str]) -> list[Log]:
    """The logs that the paths name. WrongUsage: a path names none."""
    from undertow.engine.readers import find_logs

    try:
        return list(find_logs(paths))
    except InputError as error:
        raise WrongUsage(str(error)) from None


def _check_trace(path: Path) -> None:
    """WrongUsage: the trace file cannot be written. It is written at the end, so check it before the work."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise WrongUsage(
            f"--trace {path} cannot be written: {error.strerror}. Name a file in a folder that you may write."
        ) from None

"""`undertow ingest`: logs in, memories out."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from undertow.engine.base.model import BadInput, InputError
from undertow.serving.cli.cluster_root import refuse_root
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.open_store import AsJson, EncoderName, Llm, Model, Store, open_engine, settings_of
from undertow.serving.cli.output import put_json, put_pairs, put_table, say

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.ingest_files import IngestReport
    from undertow.engine.base.config import Settings
    from undertow.engine.readers import Format, Log
    from undertow.engine.storage.location import Location
    from undertow.serving.cli.progress import Progress

# of each kind, how many problems are told one by one
SHOWN_PROBLEMS = 50


class LogFormatName(StrEnum):
    AUTO = "auto"
    MESSAGES = "messages"
    PARQUET = "parquet"
    LOCOMO = "locomo"
    LONGMEMEVAL = "longmemeval"


class ProfileName(StrEnum):
    COMPANION = "companion"
    ASSISTANT = "assistant"


Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="Logs, or folders of logs; also s3://BUCKET/PREFIX."),
]
LogFormat = Annotated[LogFormatName, typer.Option("--format")]
Profile = Annotated[ProfileName | None, typer.Option("--profile", help="Set of thresholds.")]
ThetaSim = Annotated[float | None, typer.Option("--theta-sim", help="Cosine that links turns.")]
ThetaMerge = Annotated[
    float | None, typer.Option("--theta-merge", help="Cosine to an episode that asks for a merge.")
]
ThetaCount = Annotated[
    int | None, typer.Option("--theta-count", help="Linked turns that make a topic recur.")
]
BatchTurns = Annotated[
    int | None, typer.Option("--batch-turns", help="Turns a commit; default: by the encoder's pace.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first refused input.")]
Resume = Annotated[bool, typer.Option("--resume", help="Start each file where the last run left it.")]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace here.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS|local",
        help="Work on a cluster's shards: Ray's address (auto: the running one), or this machine.",
    ),
]
Shards = Annotated[
    int | None, typer.Option("--shards", min=1, help="With --ray: how many a new cluster begins with.")
]


class ReadOptions(TypedDict):
    """How logs are to be read; the names are those of both ways to ingest."""

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
    changes nothing. Counts of the summary are those of the store; elapsed_s, turns_per_s (new turns
    until searchable), errors and warnings are those of this run. With --ray the logs are read on a Ray
    cluster, and --store is the root of its shards, on storage that all its nodes share; turns that are sent
    again as a shard died do not count as new then.
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
    if ray is None:
        if shards is not None:
            raise WrongUsage("--shards goes with --ray: give --ray local, or the address of a Ray cluster.")
        code, summary = _ingest_here(logs, store, settings, trace, began_s, reading)
    else:
        if trace is not None:
            raise WrongUsage("--trace is for one process; leave it out with --ray.")
        from undertow.serving.cli.on_ray import ingest_on_ray

        code, summary = ingest_on_ray(logs, store, settings, ray, shards, began_s, reading)
    _put_summary(summary, store, as_json=as_json)
    raise typer.Exit(code)


def _ingest_here(
    logs: list[Log],
    store: Location,
    settings: Settings,
    trace: Path | None,
    began_s: float,
    reading: ReadOptions,
) -> tuple[Exit, dict[str, Any]]:
    """Into a store of this process; the exit code, and the summary."""
    refuse_root(store, "add --ray local, or --ray ADDRESS")
    from undertow.engine.api.ingest_files import Ingest
    from undertow.engine.base.trace import Trace
    from undertow.serving.cli.progress import Progress

    if trace is not None:
        _check_trace(trace)
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine(store, settings, create=True, trace=Trace(trace)))
        progress = stack.enter_context(Progress(engine))
        problems = Problems()
        interrupted = stack.enter_context(ctrl_c())
        run = Ingest(
            engine,
            **reading,
            on_error=problems.error,
            on_warning=problems.warning,
            on_step=progress.step,
            stop=lambda: bool(interrupted),
        )
        code = _run(engine, run, logs, progress)
        problems.tell_rest(run.report)
        return code, summary_of(engine.stats(), run.report, time.perf_counter() - began_s)


def _put_summary(summary: dict[str, Any], store: Location, *, as_json: bool) -> None:
    if as_json:
        put_json(summary)
        return
    files = summary.pop("files", [])
    put_pairs(summary, title=str(store))
    if files:
        put_table(files, ("file", "turns", "errors", "warnings"), title="Files with problems")


def _logs(paths: list[str]) -> list[Log]:
    """The logs of the command line; a path that names none is an error of usage."""
    from undertow.engine.readers import find_logs

    try:
        return list(find_logs(paths))
    except InputError as error:
        raise WrongUsage(str(error)) from None


def _check_trace(path: Path) -> None:
    """The trace is written at the end; that its file cannot be must be known before the work."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise WrongUsage(
            f"--trace {path} cannot be written: {error.strerror}. Name a file in a folder that you may write."
        ) from None


STOPPED = "undertow: stopped at the first refused input (--strict); its batch was not stored."
INTERRUPTED = "Interrupted; all that was acknowledged is stored. Go on with the same command and --resume."
REPLAYED = "{} parked jobs run again."
PENDING = "Everything stored is searchable. Run ingest again with a working --llm to consolidate the rest."


def _run(engine: Engine, run: Any, logs: list[Log], progress: Progress) -> Exit:
    engine.resume()
    run.feed(logs)
    report: IngestReport = run.report
    if report.stopped_by is not None:
        say(STOPPED)
        return Exit.INPUT
    decided = not report.interrupted and run.settle()
    progress.close()
    if report.interrupted:
        say(INTERRUPTED)
        return Exit.INTERRUPTED
    if not decided:
        unusable = tell_pending(engine)
        if unusable:
            return Exit.LLM
    return Exit.INPUT if report.errors else Exit.DONE


def tell_pending(engine: Engine) -> bool:
    """Say why work is pending, and how to go on. True: because the LLM server cannot be used."""
    from undertow.engine.api.ingest_files import obstacles

    for line in obstacles(engine):
        say(f"pending: {line}")
    say(PENDING)
    return engine.server_lost or engine.scheduler.llm_calls.refused is not None


def summary_of(counts: Mapping[str, int], report: IngestReport, elapsed_s: float) -> dict[str, Any]:
    return {
        **counts,
        "elapsed_s": round(elapsed_s, 3),
        "turns_per_s": round(report.turns_per_s, 1),
        "errors": report.errors,
        "warnings": report.warnings,
    }


class Problems:
    """Tells refused input and warnings on standard error as they come, the first of each kind."""

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
        """How many of a run's were not told one by one."""
        told = (("errors", report.errors, self._errors), ("warnings", report.warnings, self._warnings))
        for name, count, shown in told:
            if more := count - min(shown, SHOWN_PROBLEMS):
                say(f"... and {more:,} more {name}")


@contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """The first interrupt is put into the list, for the loop to end after its commit; the second raises."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: signals go elsewhere
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)

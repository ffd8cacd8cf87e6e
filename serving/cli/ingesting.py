"""`undertow ingest`: logs in, memories out."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.engine.model import BadInput, InputError
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.opening import AsJson, EncoderName, Llm, Model, Store, open_engine, settings_of
from undertow.serving.cli.output import put_json, put_pairs, say

if TYPE_CHECKING:
    from undertow.engine.engine import Engine
    from undertow.engine.ingest import IngestReport
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


def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Logs, or folders of logs.")],
    store: Store,
    format: Annotated[LogFormatName, typer.Option("--format")] = LogFormatName.AUTO,
    profile: Annotated[ProfileName | None, typer.Option("--profile", help="Set of thresholds.")] = None,
    theta_sim: Annotated[float | None, typer.Option("--theta-sim", help="Cosine that links turns.")] = None,
    theta_merge: Annotated[
        float | None, typer.Option("--theta-merge", help="Cosine to an episode that asks for a merge.")
    ] = None,
    theta_count: Annotated[
        int | None, typer.Option("--theta-count", help="Linked turns that make a topic recur.")
    ] = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    batch_turns: Annotated[int | None, typer.Option("--batch-turns", help="Turns a commit.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first refused input.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Start each file where the last run left it.")
    ] = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Store conversation logs and consolidate what recurs.

    Turns are durable and searchable at once; memories follow as the LLM answers. The same log twice
    changes nothing. Counts of the summary are those of the store; elapsed_s, turns_per_s (new turns
    until searchable), errors and warnings are those of this run.
    """
    began_s = time.perf_counter()
    files = _files(paths)
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
    from undertow.engine.ingest import Ingest
    from undertow.engine.trace import Trace
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
            format=format.value,
            resume=resume,
            strict=strict,
            on_error=problems.error,
            on_warning=problems.warning,
            on_step=progress.step,
            stop=lambda: bool(interrupted),
        )
        code = _run(engine, run, files, progress)
        problems.tell_rest()
        summary = _summary(engine, run.report, time.perf_counter() - began_s)
    if as_json:
        put_json(summary)
    else:
        put_pairs(summary, title=f"{store}")
    raise typer.Exit(code)


def _files(paths: list[Path]) -> list[Path]:
    """The log files of the command line; a path that names none is an error of usage."""
    from undertow.engine.readers import iter_paths

    try:
        return list(iter_paths(paths))
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


def _run(engine: Engine, run: Any, files: list[Path], progress: Progress) -> Exit:
    engine.resume()
    run.feed(files)
    report: IngestReport = run.report
    if report.stopped_by is not None:
        say("undertow: stopped at the first refused input (--strict); its batch was not stored.")
        return Exit.INPUT
    decided = not report.interrupted and run.settle()
    progress.close()
    if report.interrupted:
        say("Interrupted; all that was acknowledged is stored. Go on with the same command and --resume.")
        return Exit.INTERRUPTED
    if not decided:
        unusable = tell_pending(engine)
        if unusable:
            return Exit.LLM
    return Exit.INPUT if report.errors else Exit.DONE


def tell_pending(engine: Engine) -> bool:
    """Say why work is pending, and how to go on. True: because the LLM server cannot be used."""
    from undertow.engine.ingest import obstacles

    for line in obstacles(engine):
        say(f"pending: {line}")
    say("Everything stored is searchable. Run ingest again with a working --llm to consolidate the rest.")
    return engine.server_lost or engine.scheduler.refused is not None


def _summary(engine: Engine, report: IngestReport, elapsed_s: float) -> dict[str, int | float]:
    return {
        **engine.stats(),
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

    def tell_rest(self) -> None:
        """How many were not told one by one."""
        for count, name in ((self._errors, "errors"), (self._warnings, "warnings")):
            if count > SHOWN_PROBLEMS:
                say(f"... and {count - SHOWN_PROBLEMS:,} more {name}")


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

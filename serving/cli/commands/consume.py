"""`undertow consume`: messages of Kafka or Redis, or batches of Arrow Flight, in; memories out."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.serving.cli import options as opt
from undertow.serving.cli.drain import ctrl_c, drain
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.output import put_figures, say
from undertow.serving.cli.progress import Bar, Problems
from undertow.serving.cli.stores import is_engine, open_memory

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.serving.cli.stores import OpenMemory
    from undertow.serving.streams.consumer import ConsumeReport
    from undertow.serving.streams.source import Source

# between two looks for something to decide
IDLE_S = 0.1
STOPPED = "undertow: stopped at a message that cannot be stored; those before it are stored and acknowledged."

consume = typer.Typer(help="Store the messages of Kafka, Redis or Arrow Flight.", no_args_is_help=True)

Group = Annotated[str, typer.Option("--group", help="The consumer group.", show_default=False)]
DeadLetter = Annotated[
    str | None,
    typer.Option(
        "--dead-letter", metavar="NAME", help="Where bad messages go; left out: the first one ends it."
    ),
]
UntilEnd = Annotated[bool, typer.Option("--until-end", help="Stop when all is read, stored and decided.")]
Patience = Annotated[
    float,
    typer.Option(
        "--patience", min=0, metavar="SECONDS", help="How long a full store or a lost server is tried."
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """The options of both commands."""

    dead_letter: DeadLetter = None
    until_end: UntilEnd = False
    patience: Patience = 300.0
    ray: opt.Ray = None
    shards: opt.Shards = None
    as_json: opt.AsJson = False


NO_OPTIONS = RunOptions()


@consume.command()
@opt.with_groups
def kafka(
    brokers: Annotated[
        str,
        typer.Option(
            "--brokers", metavar="HOST:PORT,...", help="Kafka's bootstrap servers.", show_default=False
        ),
    ],
    topic: Annotated[
        list[str], typer.Option("--topic", help="May be given more than once.", show_default=False)
    ],
    group: Group,
    store: opt.Store,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Properties of librdkafka, NAME=VALUE a line."),
    ] = None,
    options: RunOptions = NO_OPTIONS,
    thresholds: opt.Thresholds = opt.NO_THRESHOLDS,
    models: opt.Models = opt.NO_MODELS,
) -> None:
    """Store the messages of Kafka topics as a member of a consumer group.

    A value is a JSON object as in a line of the messages format; the key names its tenant. An offset is
    committed once its turns are durable. SIGTERM ends the command after a batch.
    """
    from undertow.serving.streams.kafka import KafkaSource

    properties = _properties(config)
    _run(
        lambda: KafkaSource(brokers, topic, group, dead_letters=options.dead_letter, properties=properties),
        store,
        models.settings(**asdict(thresholds)),
        options,
    )


@consume.command()
@opt.with_groups
def redis(
    url: Annotated[
        str, typer.Option("--url", envvar="UNDERTOW_REDIS_URL", help="Redis' address.", show_default=False)
    ],
    stream: Annotated[str, typer.Option("--stream", help="The stream's key.", show_default=False)],
    group: Group,
    store: opt.Store,
    consumer: Annotated[
        str,
        typer.Option(
            "--consumer", help="Its name in the group, the same at each start; left out: the host's."
        ),
    ] = "",
    claim_idle: Annotated[
        float, typer.Option("--claim-idle", min=1, metavar="SECONDS", help="When a consumer counts as dead.")
    ] = 60.0,
    options: RunOptions = NO_OPTIONS,
    thresholds: opt.Thresholds = opt.NO_THRESHOLDS,
    models: opt.Models = opt.NO_MODELS,
) -> None:
    """Store the entries of a Redis stream as a consumer of a group.

    The field `message` is a JSON object as in a line of the messages format; `tenant` names its tenant. An
    entry is acknowledged once its turns are durable. SIGTERM ends the command after a batch.
    """
    from undertow.serving.streams.redis_streams import RedisSource

    name = consumer or platform.node()
    _run(
        lambda: RedisSource(
            url, stream, group, name, dead_letters=options.dead_letter, claim_idle_s=claim_idle
        ),
        store,
        models.settings(**asdict(thresholds)),
        options,
    )


@consume.command()
@opt.with_groups
def flight(
    store: opt.Store,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="0: a free one.")] = 8815,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="The key file; without it a loopback address only."),
    ] = None,
    certificate: Annotated[
        tuple[Path, Path] | None, typer.Option("--tls", metavar="CHAIN KEY", help="PEM files, for TLS.")
    ] = None,
    ray: opt.Ray = None,
    shards: opt.Shards = None,
    thresholds: opt.Thresholds = opt.NO_THRESHOLDS,
    models: opt.Models = opt.NO_MODELS,
) -> None:
    """Take record batches of turns over Arrow Flight, until SIGTERM or Ctrl-C.

    A batch with the columns of the messages format is answered when its turns are durable (docs/arrow.md).
    """
    from undertow.serving.auth.authenticator import Authenticator, is_loopback

    if keys is None and not is_loopback(host):
        raise WrongUsage(f"without --keys FILE it listens on a loopback address only, and {host} is none")
    settings = models.settings(**asdict(thresholds))
    pem = None if certificate is None else (certificate[0].read_bytes(), certificate[1].read_bytes())
    opening = open_memory(store, settings, ray, shards=shards, create=True, resume=True)
    with ExitStack() as stack:
        checked = None if keys is None else stack.enter_context(closing(Authenticator(keys)))
        memory = stack.enter_context(opening)
        stopped = stack.enter_context(ctrl_c(signal.SIGTERM))
        from undertow.serving.streams.flight import FlightServer

        scheme = "grpc" if pem is None else "grpc+tls"
        server = FlightServer(
            f"{scheme}://{host}:{port}",
            memory,
            checked,
            max_message_bytes=settings.max_message_bytes,
            threads=1 if is_engine(memory) else 32,
            certificate=pem,
        )
        ended: list[bool] = []
        stack.callback(lambda: ended.append(server.stop()))
        say(f"Ready on {scheme}://{host}:{server.port}, storing in {store}.")
        work = _work(memory)
        while not stopped.is_set():
            if not server.storing.submit(work).result():
                stopped.wait(IDLE_S)
    if not all(ended):
        os._exit(Exit.DONE)  # everything is closed, and gRPC would wait for a silent client


def _properties(config: Path | None) -> dict[str, str]:
    """The properties in a file; a line that is empty or begins with # says nothing. WrongUsage; OSError."""
    lines = [line.strip() for line in config.read_text().splitlines()] if config else []
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise WrongUsage(f"--config {config}: a line is NAME=VALUE, not {wrong[0]!r:.80}.")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _run(connect: Callable[[], Source], store: opt.Store, settings: Settings, options: RunOptions) -> None:
    if options.ray is None and options.shards is not None:
        raise WrongUsage("--shards goes with --ray: give --ray local, or the address of a Ray cluster.")
    opening = open_memory(store, settings, options.ray, shards=options.shards, create=True, resume=True)
    group = ExitStack()
    source = group.enter_context(closing(connect()))
    with group, opening as memory, ctrl_c(signal.SIGTERM) as stopped:
        from undertow.serving.streams.consumer import Consumer, summary

        problems = Problems()
        with Bar() as bar:
            run = Consumer(
                source,
                memory,
                max_message_bytes=settings.max_message_bytes,
                sets_aside=options.dead_letter is not None,
                until_end=options.until_end,
                patience_s=options.patience,
                work=_work(memory),
                stop=stopped.is_set,
                on_error=problems.error,
                on_warning=problems.warning,
                on_batch=lambda report: bar.show(_progress(report), report.read, None),
            )
            run.run()
        code = Exit.DONE
        if run.report.stopped_by is not None:
            say(STOPPED)
            say(str(run.report.stopped_by))
            code = Exit.INPUT
        elif options.until_end and not stopped.is_set():
            group.close()  # what waits for the LLM holds up no other member
            _, code = drain(memory)
    put_figures(summary(run.report), title=str(store), as_json=options.as_json)
    raise typer.Exit(code)


def _work(memory: OpenMemory) -> Callable[[], bool]:
    """A step of an engine that has something to decide; returns whether it has more. Shards work alone."""
    if not is_engine(memory):
        return lambda: False

    def step() -> bool:
        if memory.idle:
            return False
        memory.step(0.0)
        return not memory.idle

    return step


def _progress(report: ConsumeReport) -> str:
    return (
        f"{report.read:,} read, {report.stored:,} stored, {report.already_there:,} already there, "
        f"{report.dead_lettered:,} set aside"
    )

"""`undertow serve`: the HTTP service over a store or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undertow.serving.cli.cluster_root import is_root
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.options import EncoderName, Llm, Model, Ray, Shards, Store
from undertow.serving.cli.output import say
from undertow.serving.cli.settings import check_settings, settings_of


def serve(
    store: Store,
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="0: one that is free, which is told.")
    ] = 8080,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FILE", help="The key file; left out: keys.json in the store."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FOLDER",
            help="For jobs, kept answers and spent tokens; left out: service/ in the store's folder.",
        ),
    ] = None,
    insecure_no_auth: Annotated[
        bool,
        typer.Option("--insecure-no-auth", help="Who reaches this machine's loopback address may do all."),
    ] = False,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    shards: Shards = None,
) -> None:
    """Serve a store over HTTP until SIGTERM or Ctrl-C; requests under way are finished then.

    Without --ray the store is served by this process, which makes it if it is missing. With --ray a
    cluster's root is served by its shards.
    """
    from undertow.serving.http.service_settings import ServiceSettings

    engine = settings_of(llm=llm, model=model, encoder=encoder)
    if ray is None and is_root(store):
        raise WrongUsage(f"{store} is a cluster's root: add --ray local, or --ray ADDRESS")
    if shards is not None and ray is None:
        raise WrongUsage("--shards goes with --ray: without, one process serves the store")
    if insecure_no_auth and keys is not None:
        raise WrongUsage("--keys and --insecure-no-auth exclude each other: leave one out")
    with wrong_usage("UNDERTOW_SERVICE_...:"):
        settings = ServiceSettings()
    say(f"Starting: loading what serves {store}, then opening it. This takes a while.")
    check_settings(engine)

    # not before the line above: torch alone takes seconds to load
    from undertow.engine.base.process_tuning import settle_in
    from undertow.engine.cluster.shard.supervisor import EngineParts
    from undertow.serving.async_memories import AsyncMemories, open_memories
    from undertow.serving.cli.ray_session import open_cluster
    from undertow.serving.http.hosting import Files, run
    from undertow.serving.telemetry.logs import set_up
    from undertow.serving.telemetry.tracing import observers, tracing

    set_up()
    # shards on other machines need OpenTelemetry only where something is traced
    parts = None if tracing() is None else EngineParts(observers=observers)
    settle_in()

    def opened() -> AsyncMemories:
        if ray is None:
            return open_memories(store, engine, parts=parts)
        return AsyncMemories.enter(open_cluster(store, engine, ray, shards=shards, parts=parts))

    def tell(at: int) -> None:
        url = f"http://{f'[{host}]' if ':' in host else host}:{at}"
        say(f"Ready on {url}, serving {store}. The API is described at {url}/docs and {url}/openapi.json.")

    run(
        opened,
        Files.beside(store, keys, state, open_to_all=insecure_no_auth),
        host,
        port,
        settings=settings,
        engine=engine,
        on_start=tell,
    )

"""`undertow serve`: the HTTP service over a store or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.serving.cli import options as opt
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.output import say
from undertow.serving.cli.stores import ADD_RAY, is_root, refuse_root

if TYPE_CHECKING:
    import asyncio

    from undertow.engine.base.config import Settings
    from undertow.engine.storage.location import Location
    from undertow.serving.async_memories import AsyncMemories
    from undertow.serving.http.service_settings import ServiceSettings

Host = Annotated[str, typer.Option("--host", help="The address to listen on.")]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65_535, help="The port; 0: a free one, which is printed.")
]
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="The key file; left out: keys.json in the store."),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="FOLDER",
        help="For jobs, kept answers and token use; left out: service/ in the store's folder.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="So many processes of this machine serve a cluster's root; if above 1, made if it is missing.",
    ),
]
NoAuth = Annotated[
    bool, typer.Option("--insecure-no-auth", help="Every client on this machine may do everything.")
]

Inspect = Annotated[
    bool, typer.Option("--inspect", help="With the Inspector: read-only pages for browsers at /inspect.")
]


def serve(
    store: opt.Store,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    keys: KeysFile = None,
    state: StateFolder = None,
    insecure_no_auth: NoAuth = False,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    shards: opt.Shards = None,
    workers: Workers = None,
    inspect: Inspect = False,
) -> None:
    """Serve a store over HTTP until SIGTERM or Ctrl-C, then finish the requests under way.

    Without --ray this process serves the store, and makes it if it is missing. With --workers the shards of a
    cluster's root serve it in processes of their own, with --ray those that run on Ray.
    """
    engine = models.settings()
    if insecure_no_auth and keys is not None:
        raise WrongUsage("--keys and --insecure-no-auth exclude each other: leave one out")
    processes = _check_shards(store, ray, shards, workers)
    service = _service_settings()
    say(f"Starting: loading libraries, then opening {store}. This takes a while.")
    opt.check_settings(engine)

    # after the line above: torch alone takes seconds to load
    from undertow.engine.base.process_tuning import settle_in
    from undertow.serving.http.hosting import Files, run
    from undertow.serving.inspector.pages import inspector
    from undertow.serving.telemetry.logs import set_up

    def ready(at: int) -> None:
        url = f"http://{f'[{host}]' if ':' in host else host}:{at}"
        say(f"Ready on {url}, serving {store}. The API is described at {url}/docs and {url}/openapi.json.")
        if inspect:
            say(f"The Inspector: {url}/inspect")

    set_up()
    settle_in()
    run(
        lambda loop: _open(store, engine, ray, shards, processes, loop),
        Files.beside(store, keys, state, open_to_all=insecure_no_auth),
        host,
        port,
        settings=service,
        engine=engine,
        on_start=ready,
        extend=inspector if inspect else None,
    )


def _check_shards(store: Location, ray: str | None, shards: int | None, workers: int | None) -> int:
    """How many workers serve; 0: none. WrongUsage: the store cannot be served as the options ask for."""
    if ray is not None:
        if workers is not None and workers > 1:
            raise WrongUsage("--workers and --ray exclude each other: shards on Ray are processes already")
        return 0
    if shards is not None:
        raise WrongUsage("--shards goes with --ray: without it, --workers says how many shards serve")
    if workers is None:
        refuse_root(store, f"{ADD_RAY}, or --workers N")
    if workers is None or (workers == 1 and not is_root(store)):
        return 0
    opt.refuse_store(store)
    if is_root(store):
        from undertow.engine.cluster.shard_map import load

        if (found := len(load(store).all_shards)) < workers:
            say(
                f"{store} has {found} shards, so {found} workers serve them. For more, end this service and "
                f"add shards: undertow cluster move --store {store} --ray local --shards {workers}"
            )
    from undertow.engine.cluster.settings import ClusterSettings

    with wrong_usage("UNDERTOW_CLUSTER_...:"):
        ClusterSettings()
    return workers


def _service_settings() -> ServiceSettings:
    from undertow.serving.http.service_settings import ServiceSettings

    with wrong_usage("UNDERTOW_SERVICE_...:"):
        return ServiceSettings()


def _open(
    store: Location,
    engine: Settings,
    ray: str | None,
    shards: int | None,
    workers: int,
    loop: asyncio.AbstractEventLoop,
) -> AsyncMemories:
    """The store in this process; with `ray` or `workers`, the shards of a cluster's root."""
    from undertow.engine.cluster.shard.supervisor import EngineParts
    from undertow.serving.async_memories import AsyncMemories, open_memories
    from undertow.serving.cli.ray_session import open_cluster
    from undertow.serving.telemetry.tracing import observers, tracing

    # shards on other machines need OpenTelemetry only where something is traced
    parts = None if tracing() is None else EngineParts(observers=observers)
    if workers:
        from undertow.engine.cluster.processes.cluster import ProcessCluster
        from undertow.serving.telemetry.logs import set_up

        return AsyncMemories(ProcessCluster(store, engine, workers, parts=parts, begin=set_up, loop=loop))
    if ray is None:
        return open_memories(store, engine, parts=parts, loop=loop)
    return AsyncMemories.enter(open_cluster(store, engine, ray, shards=shards, parts=parts))

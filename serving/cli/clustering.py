"""`undertow cluster`: how the shards of a root are, and how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from undertow.engine.place import Place
from undertow.serving.cli.errors import Exit, in_words
from undertow.serving.cli.ingesting import Ray, ctrl_c
from undertow.serving.cli.on_ray import actors, drained, on_ray, open_cluster, tell_pending
from undertow.serving.cli.opening import AsJson, EncoderName, Llm, Model, Store, open_reports, settings_of
from undertow.serving.cli.output import put_json, put_pairs, put_table, say
from undertow.serving.cli.progress import Bar

RayAddress = Annotated[
    str,
    typer.Option(
        "--ray", metavar="ADDRESS|local", help="Ray's address (auto: the running one), or this machine."
    ),
]
STATUS_TIMEOUT_S = 5.0

cluster = typer.Typer(help="Look at the shards of a cluster, and change them.", no_args_is_help=True)


@cluster.callback()
def group() -> None:
    """Look at the shards of a cluster, and change them."""


@cluster.command()
def status(store: Store, ray: Ray = None, as_json: AsJson = False) -> None:
    """What each shard holds; with --ray also what it is doing. Starts no shard and changes nothing."""
    from undertow.engine.cluster.shard_map import load

    shard_map = load(store)
    shards: dict[str, dict[str, Any]] = {shard: {} for shard in shard_map.everyone}
    if ray is None:
        _add_stored(store, shards)
    else:
        with on_ray(ray, len(shards), 0):
            _add_running(store, shards)
    parked = Counter(name.split("/")[1] for name in store.list("parked"))
    for shard, state in shards.items():
        state.setdefault("parked", parked[shard])
    document = {
        "root": str(store),
        "map_version": shard_map.version,
        "moving_from": shard_map.before and list(shard_map.before),
        "shards": shards,
    }
    if as_json:
        put_json(document)
        return
    rows = [{"shard": shard, **_short(state)} for shard, state in shards.items()]
    put_table(
        rows,
        list(dict.fromkeys(name for row in rows for name in row)),
        title=f"{store}, map {shard_map.version}",
    )
    if shard_map.before is not None:
        say("A change of the shards has not ended: run `undertow cluster move` to end it.")


def _add_stored(root: Place, shards: dict[str, dict[str, Any]]) -> None:
    """What the journals say."""
    from undertow.engine.figures import store_stats
    from undertow.engine.store import is_store

    for shard, state in shards.items():
        place = root / f"shards/{shard}"
        if not is_store(place):
            state["tenants"] = state["turns"] = 0
            continue
        with open_reports(place) as reports:
            state.update(store_stats(reports.tenants))


def _add_running(root: Place, shards: dict[str, dict[str, Any]]) -> None:
    """What the actors say, of those that run."""
    import ray
    from ray.exceptions import RayError

    asked = {shard: actor.call.remote("status") for shard, actor in actors(root).items()}
    for shard, state in shards.items():
        if shard not in asked:
            state["state"] = "not running"
            continue
        try:
            state.update(ray.get(asked[shard], timeout=STATUS_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            state.update({"state": "unreachable", "failure": in_words(error).strip().splitlines()[0]})


def _short(state: dict[str, Any]) -> dict[str, Any]:
    """Lists and dictionaries as their lengths: --json has them whole."""
    return {name: len(value) if isinstance(value, list | dict) else value for name, value in state.items()}


@cluster.command()
def drain(
    store: Store,
    ray: RayAddress,
    stop: Annotated[
        bool, typer.Option("--stop", help="Then end the shards' processes, as before an upgrade.")
    ] = False,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Wait until everything that is stored is decided.

    Shards that do not run are started, with these options and the settings of the environment.
    """
    settings = settings_of(llm=llm, model=model, encoder=encoder)
    with open_cluster(store, settings, ray) as opened, Bar() as bar, ctrl_c() as interrupted:
        settled = drained(opened, bar, interrupted)
        bar.close()
        if settled is None:
            say("Interrupted; the shards go on by themselves.")
            raise typer.Exit(Exit.INTERRUPTED)
        unusable = not settled and tell_pending(opened)
        counts = opened.stats()
        if stop and ray != "local":  # there they end anyhow
            opened.stop()
    if as_json:
        put_json({"settled": settled, "stopped": stop or ray == "local", **counts})
    else:
        put_pairs(counts, title=f"{store}: {'all is decided' if settled else 'some work is pending'}")
    raise typer.Exit(Exit.LLM if unusable else Exit.DONE)


@cluster.command()
def move(
    store: Store,
    ray: RayAddress,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards", min=1, help="How many shards there are to be; left out: end a change begun."
        ),
    ] = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Add shards, or remove the last ones, and move the tenants that must; the others stay where they are.

    Cut off at any point, the same command ends it. The cluster goes on working meanwhile. New shards are
    started with these options and the settings of the environment.
    """
    from undertow.engine.cluster.shard_map import load

    settings = settings_of(llm=llm, model=model, encoder=encoder)
    with open_cluster(store, settings, ray, grow_to=shards or 0) as opened, Bar() as bar:

        def show(reached: Any) -> None:
            if bar.is_due:
                bar.show(f"moving tenants from {reached.shard}", reached.moved, reached.total)

        done = opened.resume_resharding(on_progress=show)
        wanted = done.shard_map.shards if shards is None else _resized(load(store).shards, shards)
        if wanted != done.shard_map.shards:
            after = opened.reshard(wanted, on_progress=show)
            after.tenants += done.tenants
            after.rows += done.rows
            after.certificates.update(done.certificates)
            done = after
    certificates = {key: asdict(c) for key, c in done.certificates.items()}
    document = {
        "map_version": done.shard_map.version,
        "shards": list(done.shard_map.shards),
        "moved_tenants": done.tenants,
        "moved_rows": done.rows,
        "certificates": certificates,
    }
    if as_json:
        put_json(document)
        return
    put_pairs({**document, "certificates": len(certificates)}, title=str(store))
    for certificate in certificates.values():
        put_pairs(certificate, title="Certificate of erasure")


def _resized(shards: Sequence[str], count: int) -> tuple[str, ...]:
    """So many shards: the first of them, or all and some with new names."""
    names = sorted(shards)[:count]
    number = 1
    while len(names) < count:
        if (name := f"s{number:04d}") not in shards:
            names.append(name)
        number += 1
    return tuple(sorted(names))

"""`undertow cluster`: the state and the number of a cluster's shards."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import Location
from undertow.serving.cli import options as opt
from undertow.serving.cli.drain import drain as drain_memory
from undertow.serving.cli.drain import shard_problems
from undertow.serving.cli.errors import Exit, in_words
from undertow.serving.cli.output import put_json, put_pairs, put_table, put_text, say
from undertow.serving.cli.progress import Bar
from undertow.serving.cli.ray_session import actors, on_ray, open_cluster
from undertow.serving.cli.stores import open_reports, shard_store

STATUS_TIMEOUT_S = 5.0
# the columns of `cluster status`, as many as fit 80 characters: what is stored, and what runs
STORED = ("shard", "tenants", "turns", "undecided_turns", "pending_jobs", "dead_letters", "parked")
RUNNING = ("shard", "state", "uptime_s", "waiting_turns", "undecided_turns", "llm_in_flight", "parked")

cluster = typer.Typer(help="Show the shards of a cluster, and change them.", no_args_is_help=True)


@cluster.command()
@opt.with_groups
def status(store: opt.Store, ray: opt.Ray = None, as_json: opt.AsJson = False) -> None:
    """Show what each shard holds; with --ray also what it is doing. Starts no shard and changes nothing."""
    from undertow.engine.cluster.shard_map import load

    shard_map = load(store)
    shards: dict[str, dict[str, Any]] = {shard: {} for shard in shard_map.all_shards}
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
    _put_status(f"{store}, map {shard_map.version}", shards, STORED if ray is None else RUNNING)
    if shard_map.before is not None:
        say("A change of the shards has not ended: run `undertow cluster move` to end it.")


def _add_stored(root: Location, shards: dict[str, dict[str, Any]]) -> None:
    """The counts in the shards' stores."""
    from undertow.engine.api.views.stats import store_stats
    from undertow.engine.storage.store_info import is_store

    for shard, state in shards.items():
        location = shard_store(root, shard)
        if not is_store(location):
            state["tenants"] = state["turns"] = 0
            continue
        with open_reports(location) as reports:
            state.update(store_stats(reports.tenants))


def _add_running(root: Location, shards: dict[str, dict[str, Any]]) -> None:
    """The reports of the shards that run, which have STATUS_TIMEOUT_S together."""
    import ray

    asked = {shard: actor.call.remote("status") for shard, actor in actors(root).items()}
    ready = ray.wait([*asked.values()], num_returns=len(asked), timeout=STATUS_TIMEOUT_S)[0] if asked else []
    for shard, state in shards.items():
        if shard not in asked:
            state["state"] = "not running"
        elif asked[shard] in ready:
            state.update(_reported(asked[shard]))
        else:
            state.update(_unreachable(f"it has not answered within {STATUS_TIMEOUT_S:g} s"))


def _reported(answer: Any) -> dict[str, Any]:
    import ray
    from ray.exceptions import RayError

    try:
        return dict(ray.get(answer))
    except RayError as error:
        return _unreachable(in_words(error).strip().splitlines()[0])


def _unreachable(why: str) -> dict[str, Any]:
    return {"state": "unreachable", "failure": why}


def _put_status(title: str, shards: Mapping[str, dict[str, Any]], columns: Sequence[str]) -> None:
    """The most telling figures as a table, then the problems. --json has everything."""
    rows = []
    for shard, state in shards.items():
        parked, uptime_s = state["parked"], state.get("uptime_s")
        rows.append(
            {
                **state,
                "shard": shard,
                "parked": len(parked) if isinstance(parked, list) else parked,
                "uptime_s": None if uptime_s is None else round(uptime_s),
            }
        )
    put_table(rows, columns, title=title)
    for shard, state in shards.items():
        for problem in shard_problems([state]):
            put_text(f"{shard}: {problem}")


@cluster.command()
@opt.with_groups
def drain(
    store: opt.Store,
    ray: opt.RayAddress,
    stop: Annotated[
        bool, typer.Option("--stop", help="Then end the shards' processes, as before an upgrade.")
    ] = False,
    models: opt.Models = opt.NO_MODELS,
    as_json: opt.AsJson = False,
) -> None:
    """Wait until everything stored is decided.

    Shards that do not run are started, with these options and the environment's settings.
    """
    with open_cluster(store, models.settings(), ray) as opened:
        try:
            settled, code = drain_memory(opened)
        except UndertowError:  # shards that cannot decide anything end too
            if stop and ray != "local":
                opened.stop()
            raise
        if code is Exit.INTERRUPTED:
            say("Interrupted; the shards continue by themselves.")
            raise typer.Exit(code)
        counts = opened.stats()
        if stop and ray != "local":  # local shards end with this command
            opened.stop()
    if as_json:
        put_json({"settled": settled, "stopped": stop or ray == "local", **counts})
    else:
        put_pairs(counts, title=f"{store}: {'all is decided' if settled else 'some work is pending'}")
    raise typer.Exit(code)


@cluster.command()
@opt.with_groups
def move(
    store: opt.Store,
    ray: opt.RayAddress,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards", min=1, help="The new number of shards; left out: end a change that was cut off."
        ),
    ] = None,
    models: opt.Models = opt.NO_MODELS,
    as_json: opt.AsJson = False,
) -> None:
    """Add shards, or remove the last ones, and move only the tenants that must move.

    If the command is cut off at any point, run it again to complete it. The cluster keeps working meanwhile.
    New shards are started with these options and the environment's settings.
    """
    from undertow.engine.cluster.shard_map import load

    with open_cluster(store, models.settings(), ray, grow_to=shards or 0) as opened, Bar() as bar:

        def show(reached: Any) -> None:
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
        "emptied_folders": [str(store / "shards" / name) for name in done.left_over],
        "certificates": certificates,
    }
    if as_json:
        put_json(document)
        return
    put_pairs({**document, "certificates": len(certificates)}, title=str(store))
    if done.left_over:
        say("The emptied folders belong to shards that are gone; remove them by hand.")
    for certificate in certificates.values():
        put_pairs(certificate, title="Certificate of erasure")


def _resized(shards: Sequence[str], count: int) -> tuple[str, ...]:
    """The names of `count` shards: the first of these, or all of these and new ones."""
    names = sorted(shards)[:count]
    unused = (name for number in itertools.count(1) if (name := f"s{number:04d}") not in shards)
    return tuple(sorted([*names, *itertools.islice(unused, count - len(names))]))

"""`undertow cluster`: how the shards of a root are, and how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import Location
from undertow.serving.cli.cluster_root import open_reports
from undertow.serving.cli.errors import Exit, in_words
from undertow.serving.cli.options import AsJson, EncoderName, Llm, Model, Ray, Store
from undertow.serving.cli.output import put_json, put_pairs, put_table, put_text, say
from undertow.serving.cli.progress import Bar
from undertow.serving.cli.ray_session import actors, on_ray, open_cluster
from undertow.serving.cli.settings import settings_of
from undertow.serving.cli.settling import settle

RayAddress = Annotated[
    str,
    typer.Option(
        "--ray", metavar="ADDRESS|local", help="Ray's address (auto: the running one), or this machine."
    ),
]
STATUS_TIMEOUT_S = 5.0
# the columns of `cluster status`, as many as fit 80 characters: of what is stored, and of what runs
STORED = ("shard", "tenants", "turns", "undecided_turns", "pending_jobs", "dead_letters", "parked")
RUNNING = (
    "shard",
    "state",
    "uptime_s",
    "waiting_turns",
    "undecided_turns",
    "llm_in_flight",
    "parked",
)

cluster = typer.Typer(help="Look at the shards of a cluster, and change them.", no_args_is_help=True)


@cluster.callback()
def group() -> None:
    """Look at the shards of a cluster, and change them."""


@cluster.command()
def status(store: Store, ray: Ray = None, as_json: AsJson = False) -> None:
    """What each shard holds; with --ray also what it is doing. Starts no shard and changes nothing."""
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
    _put_status(store, shard_map.version, shards, STORED if ray is None else RUNNING)
    if shard_map.before is not None:
        say("A change of the shards has not ended: run `undertow cluster move` to end it.")


def _add_stored(root: Location, shards: dict[str, dict[str, Any]]) -> None:
    """What the journals say."""
    from undertow.engine.api.views.stats import store_stats
    from undertow.engine.storage.store_info import is_store

    for shard, state in shards.items():
        location = root / f"shards/{shard}"
        if not is_store(location):
            state["tenants"] = state["turns"] = 0
            continue
        with open_reports(location) as reports:
            state.update(store_stats(reports.tenants))


def _add_running(root: Location, shards: dict[str, dict[str, Any]]) -> None:
    """What the actors say, of those that run; all have the same time for it."""
    import ray

    asked = {shard: actor.call.remote("status") for shard, actor in actors(root).items()}
    answered = set()
    if asked:
        answered.update(ray.wait([*asked.values()], num_returns=len(asked), timeout=STATUS_TIMEOUT_S)[0])
    for shard, state in shards.items():
        if shard not in asked:
            state["state"] = "not running"
        elif asked[shard] in answered:
            state.update(_heard(asked[shard]))
        else:
            state.update(_unreachable(f"it has not answered within {STATUS_TIMEOUT_S:g} s"))


def _heard(answer: Any) -> dict[str, Any]:
    import ray
    from ray.exceptions import RayError

    try:
        return dict(ray.get(answer))
    except RayError as error:
        return _unreachable(in_words(error).strip().splitlines()[0])


def _unreachable(why: str) -> dict[str, Any]:
    return {"state": "unreachable", "failure": why}


def _put_status(
    root: Location, version: int, shards: Mapping[str, dict[str, Any]], columns: Sequence[str]
) -> None:
    """The figures that tell most, as a table; then what is wrong, in words. --json has all."""
    put_table(
        [{"shard": shard, **_rounded(state)} for shard, state in shards.items()],
        columns,
        title=f"{root}, map {version}",
    )
    for shard, state in shards.items():
        for trouble in _troubles(state):
            put_text(f"{shard}: {trouble}")


def _rounded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Whole seconds; and a number of parked turns, which a running shard names one by one."""
    parked, uptime_s = state["parked"], state.get("uptime_s")
    return {
        **state,
        "parked": len(parked) if isinstance(parked, list) else parked,
        "uptime_s": None if uptime_s is None else round(uptime_s),
    }


def _troubles(state: Mapping[str, Any]) -> Iterator[str]:
    if state.get("failure"):
        yield f"failure: {state['failure']}"
    if state.get("llm_error"):
        yield f"the LLM server cannot be used: {state['llm_error']}"
    for why, count in state.get("blocked", {}).items():
        yield f"blocked: {count} tenant{'s' * (count > 1)}: {why}"
    for tenant, why in state.get("faulty_tenants", {}).items():
        yield f"faulty: tenant {tenant!r}: {why}"


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
    with open_cluster(store, settings, ray) as opened:
        try:
            settled, code = settle(opened)
        except UndertowError:  # shards that cannot decide anything are ended all the same
            if stop and ray != "local":
                opened.stop()
            raise
        if code is Exit.INTERRUPTED:
            say("Interrupted; the shards go on by themselves.")
            raise typer.Exit(code)
        counts = opened.stats()
        if stop and ray != "local":  # there they end anyhow
            opened.stop()
    if as_json:
        put_json({"settled": settled, "stopped": stop or ray == "local", **counts})
    else:
        put_pairs(counts, title=f"{store}: {'all is decided' if settled else 'some work is pending'}")
    raise typer.Exit(code)


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
    """So many shards: the first of them, or all and some with new names."""
    names = sorted(shards)[:count]
    number = 1
    while len(names) < count:
        if (name := f"s{number:04d}") not in shards:
            names.append(name)
        number += 1
    return tuple(sorted(names))

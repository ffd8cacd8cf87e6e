"""Commands that work on a cluster's shards, over Ray: ingest, import, update, delete, erase, replay."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from undertow.engine.storage.location import Location
from undertow.serving.cli.cluster_root import is_root
from undertow.serving.cli.commands.ingest import (
    INTERRUPTED,
    PENDING,
    REPLAYED,
    STOPPED,
    Problems,
    ReadOptions,
    ctrl_c,
    summary_of,
)
from undertow.serving.cli.commands.keys import audited
from undertow.serving.cli.errors import Exit, WrongUsage, wrong_usage
from undertow.serving.cli.open_store import check_settings, settings_of
from undertow.serving.cli.output import say
from undertow.serving.cli.progress import Bar

if TYPE_CHECKING:
    from undertow.engine.api.erasure import Certificate
    from undertow.engine.api.memory_updates import Updated
    from undertow.engine.api.transfer.import_ import ImportReport
    from undertow.engine.api.views.reports import Report
    from undertow.engine.base.config import Settings
    from undertow.engine.cluster.bulk.ingest import BulkProgress as Reached
    from undertow.engine.cluster.bulk.ingest import BulkReport
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.engine.cluster.shard.supervisor import EngineParts
    from undertow.engine.readers import Log

# of a machine's free memory, what Ray's object store may take there with --ray local
STORE_SHARE = 8
MAX_STORE_BYTES = 4 << 30
MIN_STORE_BYTES = 100 << 20
# of each file that had problems, how many stand in the summary
FIRST_PROBLEMS = 5
POLL_S = 0.5
# tenants of a cluster that are flushed at a time
FLUSHES = 64
# Of what Ray says, this is none of the user's business: shards and workers that die are started again, and
# what they were asked is repeated. Of a lack of memory, or a node that is lost, Ray tells in other lines.
RESTARTED = "^A worker died or was killed while executing a task"


@contextmanager
def open_cluster(
    root: Location,
    settings: Settings,
    address: str,
    *,
    shards: int | None = None,
    grow_to: int = 0,
    parts: EngineParts | None = None,
) -> Iterator[Cluster]:
    """The cluster of a root, its shards running. With "local" they end with this command, else they stay.

    `shards`: how many a new root begins with. `grow_to`: how many a local Ray must have room for. `parts`:
    of shards that are started now. WrongUsage, UndertowError.
    """
    from undertow.engine.cluster.settings import ClusterSettings
    from undertow.engine.storage.store_info import is_store

    if is_store(root):
        raise WrongUsage(f"{root} is the store of one process, no root of a cluster. Name another folder.")
    if shards is None and not is_root(root):
        raise WrongUsage(f"{root} is no cluster's root yet: say with --shards how many it is to have.")
    check_settings(settings)
    with wrong_usage():
        resources = ClusterSettings()
    with on_ray(address, max(shards or _shard_count(root), grow_to), resources.num_cpus):
        from undertow.engine.cluster.ray.cluster import Cluster

        before = actors(root) if is_root(root) else {}
        opened = Cluster.open(root, settings, shards=shards, resources=resources, parts=parts)
        if before:
            say(f"{len(before)} shards run already: they keep the settings that they were started with.")
        try:
            yield opened
        finally:
            (opened.stop if address == "local" else opened.close)()


def _shard_count(root: Location) -> int:
    from undertow.engine.cluster.shard_map import load

    return len(load(root).everyone)


@contextmanager
def on_ray(address: str, shards: int, shard_cpus: float) -> Iterator[None]:
    """Joined to Ray; "local" starts one, with room for the shards and for what feeds them. UndertowError."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RESTARTED)  # read when Ray is imported
    import ray
    from ray.exceptions import RayError

    from undertow.engine.base.model import UndertowError
    from undertow.engine.cluster.ray.actors import connect

    # Ray starts programs, it does not go on in a fork
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    joined = not ray.is_initialized()
    with redirect_stdout(sys.stderr):  # where Ray tells what happens to it; standard output is for results
        if joined:
            connect(address, **_local_options(shards, shard_cpus) if address == "local" else {}, **_QUIET)
        try:
            yield
        except RayError as error:
            raise UndertowError(f"the Ray cluster failed: {error}") from error
        finally:
            if joined:
                ray.shutdown()


# levels as logging has them: errors alone
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": 40}


def _local_options(shards: int, shard_cpus: float) -> dict[str, Any]:
    import math

    import psutil

    free_bytes = psutil.virtual_memory().available // STORE_SHARE
    return {
        "num_cpus": max(os.cpu_count() or 1, math.ceil(shards * shard_cpus) + 2),
        "object_store_memory": max(MIN_STORE_BYTES, min(free_bytes, MAX_STORE_BYTES)),
        "include_dashboard": False,
    }


def actors(root: Location) -> dict[str, Any]:
    """The actors of a root's shards that are there, by shard."""
    import ray

    from undertow.engine.cluster.ray.actors import NAMESPACE, actor_name
    from undertow.engine.cluster.shard_map import load

    found = {}
    for shard in load(root).everyone:
        try:
            found[shard] = ray.get_actor(actor_name(root, shard), namespace=NAMESPACE)
        except ValueError:
            continue
    return found


# ---- ingest


def ingest_on_ray(
    logs: Sequence[Log],
    root: Location,
    settings: Settings,
    address: str,
    shards: int | None,
    began_s: float,
    reading: ReadOptions,
) -> tuple[Exit, dict[str, Any]]:
    """`undertow ingest --ray`: the summary of one machine, and a report of each file that had problems."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_cluster(root, settings, address, shards=shards))
        from undertow.engine.cluster.bulk.feeding import router_to
        from undertow.engine.cluster.bulk.ingest import BulkIngest

        bar = stack.enter_context(Bar())
        problems = Problems()
        interrupted = stack.enter_context(ctrl_c())
        run = BulkIngest(
            root,
            partial(router_to, root, settings, opened.settings),
            **reading,
            max_message_bytes=settings.max_message_bytes,
            on_error=problems.error,
            on_warning=problems.warning,
            on_progress=partial(_show_stored, bar),
            stop=lambda: bool(interrupted),
        )
        run.feed(logs)
        code = _settle(opened, run.report, bar, interrupted)
        bar.close()
        problems.tell_rest(run.report)
        return code, _summary(opened, run.report, time.perf_counter() - began_s)


def _show_stored(bar: Bar, reached: Reached) -> None:
    if bar.is_due:
        text = (
            f"{reached.stored_turns:,} stored, part {reached.wave} of {reached.waves}, "
            f"{reached.groups_left:,} groups left in it"
        )
        bar.show(text, reached.wave - 1, reached.waves)


def _settle(opened: Cluster, report: BulkReport, bar: Bar, interrupted: list[int]) -> Exit:
    """Wait until all is decided, unless the run has ended or is interrupted; the exit code of it all."""
    if report.stopped_by is not None:
        say(STOPPED)
        return Exit.INPUT
    settled = None if report.interrupted else drained(opened, bar, interrupted)
    if settled is None:
        report.interrupted = True
        say(INTERRUPTED)
        return Exit.INTERRUPTED
    if not settled and tell_pending(opened):
        return Exit.LLM
    return Exit.INPUT if report.errors else Exit.DONE


def drained(opened: Cluster, bar: Bar, interrupted: list[int]) -> bool | None:
    """Whether all is decided; None: interrupted before that was known."""
    done: Future[bool] = Future()

    def drain() -> None:
        try:
            done.set_result(opened.drain())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
            done.set_exception(error)

    Thread(target=drain, name="drain", daemon=True).start()
    most = 0
    while not done.done():
        if interrupted:
            return None
        if bar.is_due:
            states = opened.status().values()
            undecided, calls = (_total(states, name) for name in ("undecided_turns", "llm_in_flight"))
            most = max(most, undecided)
            bar.show(f"deciding, {calls} LLM calls, lag {undecided:,}", most - undecided, most)
        time.sleep(POLL_S / 10)
    return done.result()


def _total(states: Any, name: str) -> int:
    return sum(int(state.get(name) or 0) for state in states)


def tell_pending(opened: Cluster) -> bool:
    """Say why work is pending. True: because an LLM server cannot be used."""
    reasons: Counter[str] = Counter()
    unusable = set()
    for state in opened.status().values():
        reasons.update(state.get("blocked", {}))
        reasons.update({f"tenant {t!r}: {why}": 1 for t, why in state.get("faulty_tenants", {}).items()})
        if state.get("llm_error"):
            unusable.add(str(state["llm_error"]))
    for error in sorted(unusable):
        say(f"pending: an LLM server cannot be used: {error}")
    for why, count in reasons.most_common():
        say(f"pending: {count} tenant{'s' * (count > 1)}: {why}")
    say(PENDING)
    return bool(unusable)


def _summary(opened: Cluster, report: BulkReport, elapsed_s: float) -> dict[str, Any]:
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
    totals = summary_of(opened.stats(), report, elapsed_s)
    return {**totals, "parked_turns": report.parked_turns, "files": files}


# ---- update, delete, erase, replay


def delete_on_ray(
    root: Location, settings: Settings, address: str, memory_id: str, tenant: str | None
) -> tuple[str, bool, Exit]:
    """`undertow delete --ray`: the kind of what is gone, whether all that follows is decided, exit code."""
    with open_cluster(root, settings, address) as opened:
        kind = opened.delete(memory_id, tenant=tenant)
        return kind, *decided(opened)


def update_on_ray(
    root: Location, settings: Settings, address: str, memory_id: str, text: str, tenant: str | None
) -> tuple[Updated, bool, Exit]:
    """`undertow update --ray`: what has been made, whether all that follows is decided, exit code."""
    with open_cluster(root, settings, address) as opened:
        updated = opened.update(memory_id, text, tenant=tenant)
        return updated, *decided(opened)


def import_on_ray(
    root: Location, settings: Settings, address: str, tenant: str, records: Sequence[Report]
) -> tuple[ImportReport, bool, Exit]:
    """`undertow import --ray`: what was stored, whether all that follows is decided, exit code."""
    with open_cluster(root, settings, address) as opened:
        imported = opened.import_(tenant, records)
        return imported, *decided(opened)


def set_policy_on_ray(
    root: Location, settings: Settings, address: str, tenant: str, policy: str, *, drop_edits: bool
) -> tuple[Report, bool, Exit]:
    """`undertow policy --ray`: the tenant's policy then, whether all that follows is decided, exit code."""
    with open_cluster(root, settings, address) as opened:
        opened.set_policy(tenant, policy, drop_edits=drop_edits)
        settled, code = decided(opened)
        return opened.policy(tenant), settled, code


def flush_on_ray(
    root: Location, settings: Settings, address: str, tenants: Sequence[str]
) -> tuple[bool, Exit]:
    """`undertow flush --ray`: whether all that follows is decided, exit code."""
    with open_cluster(root, settings, address) as opened:
        with ThreadPoolExecutor(FLUSHES) as pool:  # each waits for its tenant's decisions
            list(pool.map(opened.flush, tenants))
        return decided(opened)


def replay_on_ray(root: Location, settings: Settings, address: str) -> Exit:
    """`undertow jobs --replay --ray`."""
    with open_cluster(root, settings, address) as opened:
        say(REPLAYED.format(opened.replay_jobs()))
        _, code = decided(opened)
        return code


def decided(opened: Cluster) -> tuple[bool, Exit]:
    """Decide what can be decided; whether that was all, and the exit code that says so."""
    with Bar() as bar, ctrl_c() as interrupted:
        settled = drained(opened, bar, interrupted)
    unusable = settled is False and tell_pending(opened)
    code = Exit.INTERRUPTED if settled is None else Exit.LLM if unusable else Exit.DONE
    return bool(settled), code


def refuse_running(root: Location, address: str) -> None:
    """WrongUsage where shards of the root run. With "local" there are none: they end with their command."""
    if address == "local":
        return
    with on_ray(address, 0, 0):
        if running := actors(root):
            raise WrongUsage(
                f"{len(running)} shards of {root} are running. End them first: "
                f"undertow cluster drain --stop --store {root} --ray {address}"
            )


def erase_on_ray(
    root: Location, tenant: str, address: str, ask: Callable[[], None], *, now: bool
) -> Certificate | None:
    """`undertow erase --ray`. `ask` is called before anything is started."""
    from undertow.engine.api.erasure import NotCertified
    from undertow.engine.cluster.shard_map import load

    ask()
    with (
        open_cluster(root, settings_of(), address) as opened,
        audited(root.folder, "erase", tenant_key=load(root).tenant_key(tenant)),
    ):
        try:
            return opened.erase(tenant, now=now)
        except NotCertified as later:
            say(str(later))
            return None

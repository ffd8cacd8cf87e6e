"""Waits until everything stored is decided, and reports what is still pending and why."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from undertow.serving.cli.errors import Exit
from undertow.serving.cli.output import say
from undertow.serving.cli.progress import Bar
from undertow.serving.cli.stores import is_engine

if TYPE_CHECKING:
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.serving.cli.stores import OpenMemory

POLL_S = 0.05
# tenants of a cluster that are flushed at the same time
FLUSHES = 64
PENDING = "Everything stored is searchable. Run ingest again with a working --llm to consolidate the rest."


def drain(memory: OpenMemory) -> tuple[bool, Exit]:
    """Decide what can be decided. Returns whether nothing is pending, and the exit code."""
    if is_engine(memory):
        settled: bool | None = memory.drain()
    else:
        with Bar() as bar, ctrl_c() as interrupted:
            settled = drain_cluster(memory, bar, interrupted)
    if settled is None:
        return False, Exit.INTERRUPTED
    return settled, Exit.LLM if not settled and report_pending(memory) else Exit.DONE


def flush(memory: OpenMemory, tenants: Sequence[str]) -> tuple[bool, Exit]:
    """Flush the tenants, side by side, then `drain`."""
    if is_engine(memory):
        for tenant in tenants:
            memory.log_flush(tenant)
    else:
        with ThreadPoolExecutor(FLUSHES) as pool:  # each call waits for its tenant's decisions
            list(pool.map(memory.flush, tenants))
    return drain(memory)


def drain_cluster(cluster: Cluster, bar: Bar, interrupted: Event) -> bool | None:
    """As `Cluster.drain`, with progress. None: interrupted while waiting."""
    from undertow.engine.base.queries import DrainCommand

    done = cluster.begin(DrainCommand())
    most = 0
    while not done.done():
        if interrupted.is_set():
            return None
        if bar.is_due:
            states = cluster.status().values()
            undecided, calls = (
                sum(state.get(name) or 0 for state in states) for name in ("undecided_turns", "llm_in_flight")
            )
            most = max(most, undecided)
            bar.show(f"deciding, {calls} LLM calls, lag {undecided:,}", most - undecided, most)
        time.sleep(POLL_S)
    return done.result()


def report_pending(memory: OpenMemory) -> bool:
    """Say why work is pending and how to continue. True: an LLM server cannot be used."""
    if is_engine(memory):
        from undertow.engine.api.ingest_files import obstacles

        lines = obstacles(memory)
        unusable = memory.server_lost or memory.scheduler.llm_calls.refused is not None
    else:
        states = memory.status().values()
        lines = shard_problems(states)
        unusable = any(state.get("llm_error") for state in states)
    for line in lines:
        say(f"pending: {line}")
    say(PENDING)
    return unusable


def shard_problems(states: Iterable[Mapping[str, Any]]) -> list[str]:
    """What keeps shards from their work, by their reports of status: one line for each reason."""
    lines: list[str] = []
    blocked: Counter[str] = Counter()
    for state in states:
        if state.get("failure"):
            lines.append(f"failure: {state['failure']}")
        if state.get("llm_error"):
            lines.append(f"an LLM server cannot be used: {state['llm_error']}")
        lines += (f"faulty: tenant {name!r}: {why}" for name, why in state.get("faulty_tenants", {}).items())
        blocked.update(state.get("blocked", {}))
    lines += (f"blocked: {count} tenant{'s' * (count > 1)}: {why}" for why, count in blocked.most_common())
    return list(dict.fromkeys(lines))


@contextmanager
def ctrl_c(*others: signal.Signals) -> Iterator[Event]:
    """An event set by the first interrupt, so that a loop can end after its commit. The second one raises.

    `others`: signals that count as an interrupt too.
    """
    received = Event()

    def note(number: int, frame: object) -> None:
        if received.is_set():
            raise KeyboardInterrupt
        received.set()

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, *others)}
    except ValueError:  # not the main thread, which alone handles signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

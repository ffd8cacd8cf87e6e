"""Waits until everything stored is decided, and says what is still pending."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from undertow.serving.cli.errors import Exit
from undertow.serving.cli.output import say
from undertow.serving.cli.progress import Bar

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.serving.cli.open_store import OpenMemory

POLL_S = 0.05
# tenants of a cluster that are flushed at the same time
FLUSHES = 64
PENDING = "Everything stored is searchable. Run ingest again with a working --llm to consolidate the rest."


def settle(memory: OpenMemory) -> tuple[bool, Exit]:
    """Decide what can be decided. Returns whether nothing is left, and the exit code."""
    from undertow.engine.api.engine import Engine

    if isinstance(memory, Engine):
        settled: bool | None = memory.drain()
    else:
        with Bar() as bar, ctrl_c() as interrupted:
            settled = drained(memory, bar, interrupted)
    if settled is None:
        return False, Exit.INTERRUPTED
    unusable = not settled and tell_pending(memory)
    return settled, Exit.LLM if unusable else Exit.DONE


def flush_all(memory: OpenMemory, tenants: Sequence[str]) -> tuple[bool, Exit]:
    """Flush the tenants, then `settle`."""
    from undertow.engine.api.engine import Engine

    if isinstance(memory, Engine):
        for tenant in tenants:
            memory.log_flush(tenant)
    else:
        with ThreadPoolExecutor(FLUSHES) as pool:  # each call waits for its tenant's decisions
            list(pool.map(memory.flush, tenants))
    return settle(memory)


def drained(memory: Cluster, bar: Bar, interrupted: list[int]) -> bool | None:
    """Wait for a cluster. True: everything is decided; None: interrupted while waiting."""
    done: Future[bool] = Future()

    def drain() -> None:
        try:
            done.set_result(memory.drain())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
            done.set_exception(error)

    Thread(target=drain, name="drain", daemon=True).start()
    most = 0
    while not done.done():
        if interrupted:
            return None
        if bar.is_due:
            states = memory.status().values()
            undecided, calls = (_total(states, name) for name in ("undecided_turns", "llm_in_flight"))
            most = max(most, undecided)
            bar.show(f"deciding, {calls} LLM calls, lag {undecided:,}", most - undecided, most)
        time.sleep(POLL_S)
    return done.result()


def _total(states: Any, name: str) -> int:
    return sum(int(state.get(name) or 0) for state in states)


def tell_pending(memory: OpenMemory) -> bool:
    """Say why work is pending and how to continue. True: an LLM server cannot be used."""
    from undertow.engine.api.engine import Engine

    unusable, lines = _engine_obstacles(memory) if isinstance(memory, Engine) else _cluster_obstacles(memory)
    for line in lines:
        say(f"pending: {line}")
    say(PENDING)
    return unusable


def _engine_obstacles(engine: Engine) -> tuple[bool, list[str]]:
    from undertow.engine.api.ingest_files import obstacles

    return engine.server_lost or engine.scheduler.llm_calls.refused is not None, list(obstacles(engine))


def _cluster_obstacles(cluster: Cluster) -> tuple[bool, list[str]]:
    reasons: Counter[str] = Counter()
    unusable = set()
    for state in cluster.status().values():
        reasons.update(state.get("blocked", {}))
        reasons.update({f"tenant {t!r}: {why}": 1 for t, why in state.get("faulty_tenants", {}).items()})
        if state.get("llm_error"):
            unusable.add(str(state["llm_error"]))
    lines = [f"an LLM server cannot be used: {error}" for error in sorted(unusable)]
    lines += [f"{count} tenant{'s' * (count > 1)}: {why}" for why, count in reasons.most_common()]
    return bool(unusable), lines


@contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """Append the first interrupt to a list, so that the loop ends after its commit. The second one raises."""
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

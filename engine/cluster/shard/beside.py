"""What a thread does with the journal while the loop goes on with an engine: reads, purges, loads tenants."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.shard.commands import Command, FairQueue
from undertow.engine.cluster.shard.quarantine import reason_of
from undertow.engine.cluster.shard.quick import is_at_hand
from undertow.engine.cluster.shard.supervisor import contained

log = logging.getLogger(__name__)

# a move that was under way may have begun before the last rows, and one may fail
MOST_MOVES = 3
# a tenant of so many rows is built in some milliseconds
BUILT_QUICKLY = 4_000


def part_beside(
    engine: Engine, command: Command, waiting: FairQueue, obey: Callable[[Command], None]
) -> Callable[[], object] | None:
    """What a thread does for a command while others append to the journal; None: the command runs alone.

    That is the command itself if it reads the journal alone, or the reading of its tenant's rows. But first
    what is in the log moves to Lance, while the command is `waiting` again; of one that settles no more.
    """
    journal = engine.journal
    if command.fetched:  # what was read of its tenant would become stale
        return None
    act = _read if command.reads_journal else _fetch if _may_fetch(engine, command) else None
    if (act is None and not command.settles) or not journal.commits_quickly:
        return None
    if act is _fetch:
        engine.tenants.expect(command.tenant)  # before the log is looked into
    if command.sees_until is None:
        command.sees_until = journal.next_lsn
    try:
        with contained():
            moving = journal.move_until(command.sees_until)
            if moving is None and act is _fetch and journal.log_holds(command.tenant):
                command.sees_until = journal.next_lsn  # it was in memory since, and evicted
                moving = journal.move_until(command.sees_until)
    except Exception as error:  # noqa: BLE001 - the command meets it again, and tells its caller
        log.warning("the log cannot be moved to Lance: %s", reason_of(error))
        return None
    if moving is None:
        command.sees_until, command.moves = None, 0  # it may run again
        if act is None:
            return None
        journal.reserve()
        return partial(act, engine, command, obey)
    if command.moves == MOST_MOVES:
        return None
    command.moves += 1
    waiting.put_back(command)
    return partial(wait, [moving])


def _read(engine: Engine, command: Command, obey: Callable[[Command], None]) -> None:
    with engine.journal.beside_appends():
        obey(command)


def _may_fetch(engine: Engine, command: Command) -> bool:
    """Whether the command's tenant is to be loaded, and was not read for it before."""
    if not command.loads or command.fetched is not None or is_at_hand(engine, command.tenant):
        return False
    try:
        engine.tenants.require_here([command.tenant])
    except UndertowError:  # the command meets it again
        return False
    return True


def _fetch(engine: Engine, command: Command, _: Callable[[Command], None]) -> None:
    command.fetched = ()
    try:
        with engine.journal.beside_appends(), contained():
            command.fetched = engine.tenants.fetch(command.tenant)
    except Exception as error:  # noqa: BLE001 - the command meets it again, and tells its caller
        log.warning("tenant %r cannot be read: %s", command.tenant, reason_of(error))


def loads_quickly(command: Command) -> bool:
    """Whether `load` takes some milliseconds at most."""
    return sum(len(turns.seqs) + len(rows) for _, turns, rows in command.fetched or ()) <= BUILT_QUICKLY


def load(engine: Engine, command: Command) -> None:
    """Build the command's tenant from what was read for it, unless that may be out of date."""
    fetched = command.fetched or ()
    command.forget()
    try:
        with contained():
            engine.tenants.load(fetched)
    except Exception as error:  # noqa: BLE001 - the command meets it again, and tells its caller
        log.warning("tenant %r cannot be loaded: %s", command.tenant, reason_of(error))

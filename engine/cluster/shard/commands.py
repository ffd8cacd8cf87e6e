"""Commands to a shard's engine, and those among them that wait for their turn on a thread."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.trace_context import current_traceparent
from undertow.engine.cluster.shard.quarantine import reason_of
from undertow.engine.cluster.shard.supervisor import contained
from undertow.engine.storage.journal import Journal

log = logging.getLogger(__name__)

# a move that was under way may have begun before the last rows, and one may fail
MOST_MOVES = 3


class NotYet(Enum):
    """The result of a command that waits and has done a part of its work: it is repeated at once."""

    GO_ON = "go on"


@dataclass(slots=True)
class Command:
    """Something to do with the engine. `wait`: repeated until its result is neither None nor NotYet.

    `is_quick`: whether the engine does it within some milliseconds. It runs in the trace of its caller: see
    engine/base/trace_context.py.
    """

    run: Callable[[], Any]
    future: Future[Any]
    is_quick: Callable[[Engine], bool]
    wait: bool = False
    # whose memories it is about; empty: those of the store
    tenant: str = ""
    # whether it reads what is in memory, and changes nothing
    searches: bool = False
    # whether it reads the journal, and of memory what there is of its tenant, and changes nothing of either
    reads: bool = False
    # whether it reads the journal, or purges it, and of memory reads only which tenants there are
    reads_journal: bool = False
    # of one that reads the journal: the lsn behind what it is to see, and how often that was to move to Lance
    sees_until: int | None = None
    moves: int = 0
    traceparent: str | None = field(default_factory=current_traceparent)

    def begin(self) -> bool:
        """Whether it is to run, for the first time or again: its caller has not cancelled it before."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class FairQueue:
    """Commands whose tenants take turns."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[Command]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def append(self, command: Command) -> None:
        self._by_tenant.setdefault(command.tenant, deque()).append(command)

    def put_back(self, command: Command) -> None:
        """What `pop` has given is to be the next one again."""
        self._by_tenant.setdefault(command.tenant, deque()).appendleft(command)
        self._by_tenant.move_to_end(command.tenant, last=False)

    def pop(self) -> Command | None:
        """The next one; None: there is none."""
        if not self._by_tenant:
            return None
        tenant, waiting = self._by_tenant.popitem(last=False)
        command = waiting.popleft()
        if waiting:
            self._by_tenant[tenant] = waiting
        return command


def put_off(commands: deque[Command], is_quick: Callable[[Command], bool], until: FairQueue) -> None:
    """Move commands that are no longer quick to those for a thread."""
    for _ in range(len(commands)):
        command = commands.popleft()
        (commands if is_quick(command) else until).append(command)


def read_aside(
    journal: Journal, command: Command, waiting: FairQueue, obey: Callable[[Command], None]
) -> Callable[[], object] | None:
    """What a thread does for a command that reads the journal alone, while others append to it.

    First what is in its log moves to Lance, while the command is `waiting` again. None: it is another
    command, or nothing may be appended meanwhile; then it says why the rows cannot be moved.
    """
    if not (command.reads_journal and journal.commits_quickly):
        return None
    if command.sees_until is None:
        command.sees_until = journal.next_lsn
    try:
        with contained():
            moving = journal.move_until(command.sees_until)
    except Exception as error:  # noqa: BLE001 - the command meets it again, and tells its caller
        log.warning("the log cannot be moved to Lance: %s", reason_of(error))
        return None
    if moving is None:
        command.sees_until, command.moves = None, 0  # it may run again
        journal.reserve()
        return partial(_read, journal, command, obey)
    if command.moves == MOST_MOVES:
        return None
    command.moves += 1
    waiting.put_back(command)
    return partial(wait, [moving])


def _read(journal: Journal, command: Command, obey: Callable[[Command], None]) -> None:
    with journal.beside_appends():
        obey(command)

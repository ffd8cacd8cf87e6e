"""A process that runs engine work in forked children, for tests that kill them. Run as a script.

Importing the engine takes seconds, a fork of a process that has imported it milliseconds. Each line of
standard input is a task (JSON); the answers are one line with the child's pid once it runs and one with
its exit status (negative: the signal that ended it).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undertow.engine import journal as journal_module
from undertow.engine.config import Settings
from undertow.engine.encoder import make_encoder
from undertow.engine.engine import Engine, make_llm
from undertow.engine.ingest import Ingest
from undertow.engine.journal import Journal
from undertow.engine.model import UndertowError
from undertow.engine.trace import Trace

Say = Callable[[dict[str, Any]], None]


def ingest(engine: Engine, task: dict[str, Any], say: Say) -> None:
    """As `undertow ingest --resume` does it; each step's acknowledged turns are told by tenant."""

    def acknowledge(step: object) -> None:
        say({"acked": {t.name: len(t.seq_by_row) for t in engine.tenants.loaded()}})

    engine.resume()
    run = Ingest(engine, resume=task.get("resume", True), on_step=acknowledge)
    run.feed([Path(task["log"])])
    say({"settled": run.settle(), "new_turns": run.report.new_turns, "stats": engine.stats()})


def erase(engine: Engine, task: dict[str, Any], say: Say) -> None:
    say({"certificate": engine.erase(task["tenant"], now=True) is not None})


def hold(engine: Engine, task: dict[str, Any], say: Say) -> None:
    say({"holding": True})
    signal.pause()


def give_log(engine: Engine, task: dict[str, Any], say: Say) -> None:
    """Turns by the call that a program makes, going on after an error as a program might."""
    from undertow.engine.model import Message, Turn

    for n in range(task["turns"]):
        turn = Turn("t", (Message("user", f"{n} " + "wide words " * task["words"]),), f"k{n}")
        for _ in range(2):
            try:
                receipts = engine.add_batch([turn])
                say({"stored": [n] * bool(receipts)})
            except UndertowError as error:
                say({"error": str(error), "kind": type(error).__name__})


TASKS = {"ingest": ingest, "erase": erase, "hold": hold, "give_log": give_log}


def arm(kill: dict[str, Any]) -> None:
    """Die by SIGKILL right before or after the n-th call of a method of Journal."""
    name, left = kill["method"], kill["n"]
    method = getattr(Journal, name)

    def wrapped(self: Journal, *args: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not kill["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(self, *args, **named)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(Journal, name, wrapped)


def child(task: dict[str, Any]) -> int:
    """One task from opening the store to closing it. 1: an error that a user can meet."""
    out = os.open(task["out"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def say(line: dict[str, Any]) -> None:
        os.write(out, json.dumps(line).encode() + b"\n")  # what the kernel has taken outlives a kill

    journal_module.COMMITS_PER_COMPACTION = task.get("commits_per_compaction", 256)
    if kill := task.get("kill"):
        arm(kill)
    if limit := task.get("file_size_limit_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    settings = Settings(device="cpu", **task["settings"])
    try:
        llm = make_llm(settings, Trace())
        with Engine(Path(task["store"]), settings, make_encoder(settings), llm=llm) as engine:
            TASKS[task["task"]](engine, task, say)
    except UndertowError as error:
        say({"error": str(error), "kind": type(error).__name__})
        return 1
    return 0


def main() -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    print(json.dumps({"ready": True, "threads": threads}), flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(child(json.loads(line)))
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()

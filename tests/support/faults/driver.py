"""A process that runs engine work in forked children, for tests that kill them. Run with `python -m`.

Importing the engine takes seconds, a fork of a process that has imported it milliseconds. Each line of
standard input is a task (JSON); the answer is one line with its child's exit status (negative: the signal
that ended it). A task with `kill_after_s` is killed by SIGKILL then, unless it has ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn, UndertowError
from undertow.engine.cluster.resharding import coordinator
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import tail
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.lance_log import LanceLog
from undertow.prompts.builders import ShownMemory, ShownTurn, episode_prompt, merge_prompt, refine_prompt

from .harness import turns_of
from .moving import Shards, Traffic

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


def delete(engine: Engine, task: dict[str, Any], say: Say) -> None:
    say({"deleted": engine.delete(task["memory_id"]), "settled": engine.drain()})


def update(engine: Engine, task: dict[str, Any], say: Say) -> None:
    say({"updated": engine.update(task["memory_id"], task["text"]).id, "settled": engine.drain()})


def set_policy(engine: Engine, task: dict[str, Any], say: Say) -> None:
    engine.resume()
    told = engine.set_policy(task["tenant"], task["policy"])
    say({"begun_at": told["change"] and told["change"]["decided"]})
    say({"settled": engine.drain(), "policy": engine.policy(task["tenant"])})


def import_(engine: Engine, task: dict[str, Any], say: Say) -> None:
    records = [json.loads(line) for line in Path(task["file"]).read_text().splitlines()]
    say({"imported": engine.import_(task["tenant"], records).turns})


def add_each(engine: Engine, task: dict[str, Any], say: Say) -> None:
    """One call a text, going on after an error as a careless program might: it tries each twice."""
    for n, text in enumerate(task["texts"]):
        turn = Turn("t", (Message("user", text),), f"key {n}")
        for _ in range(2):
            try:
                say({"text": n, "receipts": len(engine.add_batch([turn]))})
            except UndertowError as error:
                say({"text": n, "error": str(error), "kind": type(error).__name__})


def reshard(task: dict[str, Any], say: Say) -> None:
    """Turns are sent before each call to a shard. `kill_at`, [n, s]: dies s seconds after the n-th time."""
    coordinator.TENANTS_PER_BATCH = 2
    logs = turns_of(Path(task["log"])).values()
    turns = [turn for of_tenant in zip(*logs, strict=True) for turn in of_tenant]
    sends, delay_s = task["kill_at"] or (-1, 0.0)
    with Shards(Path(task["root"])) as shards:
        traffic = Traffic(shards, turns)

        def send() -> None:
            nonlocal sends
            traffic.send(4)
            say({"acked": traffic.acked})
            sends -= 1
            if sends == 0:
                Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

        busy = shards.busy(send)
        send()
        if shards.map.before is not None:
            coordinator.resume(shards.root, busy)
        coordinator.reshard(shards.root, task["shards"], busy)


TASKS = {
    "ingest": ingest,
    "erase": erase,
    "delete": delete,
    "update": update,
    "import": import_,
    "set_policy": set_policy,
    "add_each": add_each,
}


def arm(kill: dict[str, Any]) -> None:
    """Die by SIGKILL right before or after the n-th call of a method of Journal, or of its table.

    The table's methods are reached by commits past the log, the journal's `_move` by many small flushes.
    """
    tail.ROWS_PER_FLUSH = 8
    if not hasattr(Journal, kill["method"]) or kill["method"] == "_tidy":
        journal_module.ROWS_PAST_LOG = 1
    name, left = kill["method"], kill["n"]
    owner = Journal if hasattr(Journal, name) else LanceLog
    method = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not kill["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(self, *args, **named)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def child(task: dict[str, Any]) -> int:
    """One task, with but for `reshard` an engine from opening the store to closing it.

    1: an error that a user can meet.
    """
    out = os.open(task["out"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def say(line: dict[str, Any]) -> None:
        os.write(out, json.dumps(line).encode() + b"\n")  # what the kernel has taken outlives a kill

    if task["task"] == "reshard":
        reshard(task, say)
        return 0
    journal_module.COMMITS_PER_COMPACTION = task.get("commits_per_compaction", 16)
    if kill := task.get("kill"):
        arm(kill)
    if limit := task.get("file_size_limit_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    settings = Settings(device="cpu", **task["settings"])
    try:
        llm = make_llm(settings)
        with Engine(Path(task["store"]), settings, make_encoder(settings), llm=llm) as engine:
            TASKS[task["task"]](engine, task, say)
    except UndertowError as error:
        say({"error": str(error), "kind": type(error).__name__})
        return 1
    return 0


def wait(pid: int, kill_after_s: float | None) -> int:
    """Until the child has ended, by itself or by our signal."""
    if kill_after_s is not None:
        deadline_s = time.monotonic() + kill_after_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.005))
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the child's
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def load_prompts() -> None:
    """Read the templates now: every child asks in the same words, though the files be edited meanwhile."""
    turn, memory = ShownTurn(1, None, "Ada: a boat"), ShownMemory(1, None, "Ada sails.")
    episode_prompt([turn])
    merge_prompt(memory, turn)
    refine_prompt(memory, [turn], [memory])


def load_client() -> None:
    """The LLM's client is imported at its first request otherwise, by each child anew."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9")
    assert client.models and client.chat.completions, "their modules are loaded when they are looked at"


def main() -> None:
    load_prompts()
    load_client()
    # a fork takes along the calling thread alone; engines begin theirs in the child, where they are used
    warnings.filterwarnings("ignore", "lance is not fork-safe")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(child(task))
        print(json.dumps({"exit": wait(pid, task.get("kill_after_s"))}), flush=True)


if __name__ == "__main__":
    main()

"""What the command-line tests share: running commands in process, and small logs whose topics recur."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer import testing

from undertow.serving.cli import app
from undertow.serving.telemetry.logs import set_up

# a run builds all commands anew otherwise, which takes longer than most of them
testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]
ENV = {"UNDERTOW_ENCODER": "hash:384", "UNDERTOW_LLM_URL": "", "UNDERTOW_LLM_PATIENCE_S": "1"}
THETAS = ("--theta-sim", "0.5", "--theta-merge", "0.55", "--theta-count", "3")
# -B: a process that is killed, or may not write, must leave no cut-off bytecode behind
PROGRAM = (sys.executable, "-B", "-m", "undertow.serving.cli")

SUMMARY = (
    "tenants turns episodes facts merges merge_refusals consolidations partition_repairs waiting_turns "
    "undecided_turns pending_jobs dead_letters llm_calls prompt_tokens cached_prompt_tokens "
    "completion_tokens elapsed_s turns_per_s"
)
SUMMARY_KEYS = SUMMARY.split()

TOPICS = (
    "the old wooden boat in the harbour needs new planks and varnish before summer says the carpenter",
    "my knee hurts when training for the marathon along the estuary with the running club on sundays",
    "the wedding garden in lisbon must be booked with flowers and music for ninety guests by september",
)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def doc(self) -> dict[str, Any]:
        """Standard output as one JSON document; fails when there is anything else."""
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@contextmanager
def logging_restored() -> Iterator[None]:
    """The logging of before comes back, not a handler of `serve` whose stream is closed."""
    root, ours = logging.getLogger(), logging.getLogger("undertow")
    before = (root.handlers[:], root.level, ours.level)
    try:
        yield
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[io.StringIO]:
    """What the process logs, as the service sets it up; the logging of before comes back."""
    stream = io.StringIO()
    with logging_restored():
        set_up(level)
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream)
        yield stream


def run(*args: str | Path, env: dict[str, str] | None = None, answer: str | None = None) -> Ran:
    """One command in this process; whatever it raises counts as a failure of the test."""
    with logging_restored():
        done = testing.CliRunner().invoke(
            app, [str(a) for a in args], env=ENV | (env or {}), input=answer, catch_exceptions=False
        )
    return Ran(done.exit_code, done.stdout, done.stderr)


def turn_line(tenant: str, n: int, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"noted {n}"}]
    day = f"2026-{1 + n // 28:02d}-{1 + n % 28:02d}T10:00:00"
    return {"tenant": tenant, "session": "s", "timestamp": day, "messages": messages, **more}


def conversation(tenant: str, turns: int) -> list[dict[str, Any]]:
    """Turns that go round three topics, each with words of its own: clusters form, merges follow."""
    return [turn_line(tenant, n, f"{TOPICS[n % 3]} {tenant} day{n} item{n * 7}") for n in range(turns)]


def write_log(path: Path, lines: Sequence[Any]) -> Path:
    """A `messages` file; a line that is text already is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def listed(store: Path, kind: str, tenant: str, *more: str) -> list[dict[str, Any]]:
    """A tenant's turns, episodes or facts."""
    return run("list", "--store", store, "--tenant", tenant, "--kind", kind, *more, "--json").lines


def tenants(store: Path) -> dict[str, int]:
    """The tenants of a store, with their numbers of turns."""
    sizes = run("list", "--store", store, "--kind", "tenants", "--json").lines
    return {record["tenant"]: record["turns"] for record in sizes}


def contents(store: Path, tenant: str) -> dict[str, list[dict[str, Any]]]:
    """All that a tenant's reports say, for comparing stores."""
    found = {kind: listed(store, kind, tenant, "--all") for kind in ("turns", "episodes", "facts")}
    return found | {"explain": run("explain", "--store", store, "--tenant", tenant, "--json").lines}

"""Services as processes: filled stores, `undertow serve` over them, and what their processes spend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

import psutil

from undertow.bench.machine import ROOT, commit
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.processes.cluster import ProcessCluster
from undertow.engine.readers import read
from undertow.engine.storage.location import Location

START_S, STOP_S, SETTLE_S = 300.0, 120.0, 120.0
ENCODER = "hash:384"
# a call, of those that fill shards
FILL_TURNS = 1_000
# admin: for /metrics; erase: for the part background
SCOPES = ("read", "write", "erase", "admin")
NOT_DECIDED = (
    "{what}, so that deciding cost less than it should. A topic recurred: try --theta-count 1000, "
    "or texts that have less in common."
)


@dataclass(frozen=True, slots=True)
class Service:
    """A running service: its address, a key for it, its process and its store."""

    url: str
    key: str
    process: psutil.Process
    store: Path

    def cpu_s(self) -> float:
        """CPU seconds that the process and its children have used."""
        times = [one.cpu_times() for one in [self.process, *self.process.children(recursive=True)]]
        return float(sum(spent.user + spent.system for spent in times))


class Side(Protocol):
    """One of the services that are compared."""

    @property
    def name(self) -> str: ...

    def fill(self, log: Path, store: Path) -> dict[str, Any]:
        """Make a store of a log, and return what shows that it is complete. UndertowError."""
        ...

    def served(self, store: Path, durability: str) -> AbstractContextManager[Service]:
        """The service over a store, in a process that ends with the block. UndertowError."""
        ...

    def decided(self, service: Service) -> dict[str, Any]:
        """Wait for what is undecided; proof that every turn was decided. UndertowError: it was not."""
        ...


@dataclass(frozen=True, slots=True)
class Checkout:
    """Undertow, of this checkout or of another one that has its own .venv.

    `workers`: shards, each in a process of its own. 0: a store in the service's process.
    `llm`: the URL of a server. "off": salience is off too.
    """

    root: Path = ROOT
    theta_count: int | None = None
    workers: int = 0
    llm: str = "off"

    @property
    def name(self) -> str:
        made = commit(self.root) or self.root.name
        return f"{made}, {self.workers} workers" if self.workers else made

    @property
    def _program(self) -> tuple[str, ...]:
        python = sys.executable if self.root == ROOT else str(self.root / ".venv" / "bin" / "python")
        if not Path(python).exists():
            raise UndertowError(f"{self.root} has no environment at .venv. Run there: make setup")
        return (python, "-m", "undertow.serving.cli")

    def _environment(self, durability: str = "commit") -> dict[str, str]:
        """This process's, without settings of Undertow but those of the run."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("UNDERTOW_")}
        kept |= {"PYTHONPATH": str(self.root / "src"), "UNDERTOW_DURABILITY": durability}
        kept |= {"UNDERTOW_SALIENCE_TURNS": "0"} if self.llm == "off" else {}
        return kept | ({} if self.theta_count is None else {"UNDERTOW_THETA_COUNT": str(self.theta_count)})

    def _fill_shards(self, log: Path, store: Path) -> dict[str, Any]:
        """By a router of this process: `undertow ingest` fills shards on Ray alone."""
        settings = Settings(
            encoder=ENCODER, llm_url=None, theta_count=self.theta_count, salience_turns=0, device="cpu"
        )
        turns = [turn for record in read(log, max_message_bytes=1_000_000) for turn in record.turns]
        with ProcessCluster(Location.of(store), settings, self.workers) as cluster:
            for start in range(0, len(turns), FILL_TURNS):
                cluster.add_batch(turns[start : start + FILL_TURNS])
        return {"tenants": len({turn.tenant for turn in turns}), "turns": len(turns)}

    def fill(self, log: Path, store: Path) -> dict[str, Any]:
        if self.workers:
            return self._fill_shards(log, store)
        command = [*self._program, "ingest", str(log), "--store", str(store), "--encoder", ENCODER]
        began_s = time.perf_counter()
        ran = subprocess.run(
            [*command, "--llm", self.llm, "--json"], capture_output=True, text=True, env=self._environment()
        )
        if ran.returncode not in (0, 4):  # 4: turns wait for an LLM, which is said better below
            raise UndertowError(f"the world could not be ingested: {ran.stderr.strip()}")
        told = json.loads(ran.stdout)
        undecided = {name: told[name] for name in ("undecided_turns", "pending_jobs")}
        if any(undecided.values()):
            raise UndertowError(NOT_DECIDED.format(what=f"the world is not decided: {undecided}"))
        kept = ("tenants", "turns", "consolidations", "llm_calls", *undecided)
        return {**{name: told[name] for name in kept}, "seconds": round(time.perf_counter() - began_s, 1)}

    @contextmanager
    def served(self, store: Path, durability: str) -> Iterator[Service]:
        keys, log = str(store.parent / "keys.json"), store.parent / "service.log"
        create = ["keys", "create", "--all-tenants", "--json", "--keys", keys]
        create += [word for scope in SCOPES for word in ("--scope", scope)]
        environment = self._environment(durability)
        created = subprocess.run(
            [*self._program, *create], stdout=subprocess.PIPE, check=True, env=environment
        )
        serve = ["serve", "--port", "0", "--encoder", ENCODER, "--llm", self.llm, "--keys", keys]
        serve += ["--workers", str(self.workers)] if self.workers else []
        command = [*self._program, *serve, "--store", str(store)]
        with started(command, log, environment) as (process, url):
            yield Service(url, json.loads(created.stdout)["key"], psutil.Process(process.pid), store)

    def decided(self, service: Service) -> dict[str, Any]:
        ends_s = time.monotonic() + SETTLE_S
        waited = 0.0
        while (counts := counters(service))["undecided_turns"] and time.monotonic() < ends_s:
            if counts["blocked_tenants"]:
                break
            time.sleep(0.1)
            waited += 0.1
        all_decided = counts["decisions"] == counts["stored_turns"] and not counts["undecided_turns"]
        if counts["blocked_tenants"] or not all_decided:
            raise UndertowError(NOT_DECIDED.format(what=f"not every turn was decided: {counts}"))
        return {**counts, "decided_after_s": round(waited, 1)}


_COUNTERS = {
    "stored_turns": r'undertow_turns_total\{[^}]*outcome="stored"[^}]*\}',
    "decisions": r"undertow_decisions_total\{[^}]*\}",
    "consolidations": r'undertow_decisions_total\{[^}]*decision="fired"[^}]*\}',
    "undecided_turns": r"undertow_undecided_turns\{[^}]*\}",
    "blocked_tenants": r"undertow_blocked_tenants\{[^}]*\}",
}


def counters(service: Service) -> dict[str, int]:
    """Turns stored and decided since the service started, and what is undecided now, from /metrics."""
    asked = Request(f"{service.url}/metrics", headers={"Authorization": f"Bearer {service.key}"})
    with urlopen(asked, timeout=30) as answer:
        return counted(answer.read().decode())


def counted(metrics: str) -> dict[str, int]:
    """The counters in Prometheus' text format, summed over the other labels."""
    return {
        name: int(sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", metrics, re.MULTILINE)))
        for name, pattern in _COUNTERS.items()
    }


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that logs its address to standard error, and the address. Terminated with the block."""
    with log.open("ab") as to:
        process = subprocess.Popen(list(command), stdout=to, stderr=to, env=environment)
    try:
        yield process, _address(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(STOP_S)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if found := re.findall(r"(http://[0-9.]+:[0-9]+)", log.read_text()):
            return str(found[-1])
        time.sleep(0.05)
    raise UndertowError(f"the service did not start; it says:\n{log.read_text()}")

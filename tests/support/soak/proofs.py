"""The long proofs, each of many short units: counts add up over runs of one source tree.

    make soak                              # lists the proofs and how far each is
    make soak PROOF=kills [SECONDS=7200]   # goes on with it for so long at most (a unit is finished)

A unit is a process that ends in figures: a test that reports them (runs.report), or a program whose last line
is one JSON object. What it counts (whole numbers) is added to `build/soak/TREE/NAME.json`; other figures are
those of the last unit. TREE is the hash of the source: a change of documents loses nothing. Once the goal is
reached, docs/results/soak-NAME.json is written. A unit that fails ends the run and counts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from undertow.bench.machine import ROOT, commit, describe, source_tree

from . import large_store

RESULTS = ROOT / "docs" / "results"
STATE = ROOT / "build" / "soak"
BUDGET_S = 7_200.0
# figures of a unit that the result names once
ABOUT = ("soak", "command", "commit", "machine", "load", "seconds")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """`command(folder, n)`: the n-th unit. Done once `goal` figures (name and number) are reached."""

    command: Callable[[Path, int], Sequence[str]]
    goal: tuple[str, int]
    about: str
    env: Mapping[str, str] = field(default_factory=dict)

    def missing(self, counts: Figures) -> int:
        return max(0, self.goal[1] - int(counts.get(self.goal[0], 0)))


def of_test(target: str, goal: tuple[str, int], about: str, **env: object) -> Proof:
    """A unit is one run of some tests of the soak; SOAK_ROUND is its number."""
    words = ("-m", "pytest", "-q", "-m", "soak", "--timeout", "0", "-p", "no:cacheprovider", *target.split())
    values = {name: str(value) for name, value in env.items()}
    return Proof(lambda _folder, _n: (sys.executable, *words), goal, about, values)


SIMULATION = "tests/soak/test_simulation.py"
FILES = "tests/soak/test_damaged_files.py"
SLOW = "tests/soak/test_cluster.py"
LOG = "tests/soak/test_log_kills.py"
OPENAPI = "tests/service/http/test_openapi.py"
KILLS = "tests/engine/step/test_kill.py"
CLUSTER = "tests/soak/test_cluster_kills.py -k"
SERVICE = "tests/soak/test_service.py -k"
PROOFS: dict[str, Proof] = {
    "kills": of_test(KILLS, ("kills", 1_000), "kills of an ingest that decides", SOAK_KILLS=50),
    "log-kills": of_test(f"{LOG} -k thousand", ("kills", 1_000), "of writers", SOAK_KILLS=50),
    "isolation": of_test(
        "tests/service/auth/test_isolation.py", ("steps", 100_000), "acts of tenants", ISOLATION_STEPS=5_000
    ),
    "openapi": of_test(OPENAPI, ("requests", 100_000), "half of them invalid", SOAK_EXAMPLES=60),
    "simulation": of_test(SIMULATION, ("seeds", 1_000), "of a simulated cluster", SOAK_SEEDS=20),
    "files": of_test(FILES, ("cases", 100_000), "damaged files", SOAK_CASES=2_000),
    "poison": of_test("tests/soak/test_poison.py", ("attacks", 30), "attacks on the local model"),
    "prompts": of_test("tests/soak/test_prompts.py", ("cases", 20), "logs for the local model"),
    "faults": of_test("tests/llm/test_faults.py", ("turns", 1), "LoCoMo's, with an LLM that fails"),
    "overload": of_test(f"{SERVICE} beyond", ("overloads", 20), "twice what the service can do"),
    "service-kills": of_test(f"{SERVICE} kill", ("service_kills", 20), "kills of the service under load"),
    "memory": of_test(f"{SERVICE} memory", ("minutes", 60), "of load, flat memory", SOAK_SECONDS=3_600),
    "bulk-kills": of_test(f"{CLUSTER} bulk", ("rounds", 8), "bulk ingests with kills", SOAK_SECONDS=300),
    "resharding-kills": of_test(f"{CLUSTER} resharding", ("reshardings", 50), "with kills", SOAK_SECONDS=300),
    "slow-llm": of_test(SLOW, ("runs", 1), "an LLM that falls behind", SOAK_SECONDS=1_800),
    "large-store": Proof(large_store.command, ("units", len(large_store.units())), "a store of 10 M turns"),
}


def kept(folder: Path, name: str) -> Figures:
    """What runs of this tree have counted."""
    path = folder / f"{name}.json"
    return {"units": 0, "elapsed_s": 0.0, **(json.loads(path.read_text()) if path.exists() else {})}


def progress(proof: Proof, counts: Figures) -> str:
    wanted, number = proof.goal
    return f"{counts.get(wanted, 0):,} of {number:,} {wanted}"


def added(counts: Figures, more: Figures) -> Figures:
    """Whole numbers are summed, those of `..._max` are not; of other figures the newer ones count."""
    total = dict(counts)
    for name, value in more.items():
        held = counts.get(name)
        if isinstance(value, dict) and isinstance(held, dict):
            total[name] = added(held, value)
        elif type(value) is int and type(held) is int:
            total[name] = max(held, value) if name.endswith("_max") else held + value
        else:
            total[name] = value
    return total


def figures_of(proof: Proof, folder: Path, n: int) -> Figures:
    """Run a unit. RuntimeError: it failed, or told nothing."""
    with TemporaryDirectory(prefix="undertow-soak-") as out:
        env = {**os.environ, **proof.env, "SOAK_ROUND": str(n), "SOAK_OUT": out}
        done = subprocess.run(proof.command(folder, n), cwd=ROOT, env=env, capture_output=True, text=True)
        told = [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]
    last = done.stdout.strip().rpartition("\n")[2]
    if not told and last.startswith("{"):
        told = [json.loads(last)]
    if done.returncode or not told:
        raise RuntimeError(f"unit {n} failed\n{done.stdout[-4_000:]}\n{done.stderr[-4_000:]}")
    counted = [{k: v for k, v in figures.items() if k not in ABOUT} for figures in told]
    return reduce(added, counted)


def run(
    name: str,
    proof: Proof,
    *,
    seconds: float = BUDGET_S,
    state: Path | None = None,
    results: Path = RESULTS,
    tell: Callable[[str], object] = print,
) -> Figures:
    """Go on with a proof until its goal is reached or the time is up. The counts. RuntimeError."""
    folder = state or STATE / source_tree()
    folder.mkdir(parents=True, exist_ok=True)
    counts = kept(folder, name)
    began_s = time.monotonic()
    while proof.missing(counts) and time.monotonic() - began_s < seconds:
        unit_s = time.monotonic()
        more = figures_of(proof, folder, counts["units"])
        spent_s = round(counts["elapsed_s"] + time.monotonic() - unit_s, 1)
        counts = {**added(counts, {**more, "units": 1}), "elapsed_s": spent_s}
        draft = folder / f"{name}.draft"
        draft.write_text(json.dumps(counts))
        draft.replace(folder / f"{name}.json")  # a kill leaves the former counts whole
        tell(f"{name}: {progress(proof, counts)}, {spent_s:,.0f} s")
    if not proof.missing(counts):
        about: Figures = {"soak": name, "command": f"make soak PROOF={name}", "source": folder.name}
        about |= {"commit": commit(), "machine": describe(), "goal": dict([proof.goal])}
        results.mkdir(parents=True, exist_ok=True)
        (results / f"soak-{name}.json").write_text(json.dumps({**about, **counts}) + "\n")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("proof", nargs="*", choices=[*PROOFS, []], help="left out: list them")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="of each proof")
    asked = parser.parse_args()
    try:
        for name in asked.proof:
            run(name, PROOFS[name], seconds=asked.seconds, tell=lambda line: print(line, flush=True))
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    for name, proof in PROOFS.items() if not asked.proof else ():
        print(f"{name:17} {progress(proof, kept(STATE / source_tree(), name))}: {proof.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

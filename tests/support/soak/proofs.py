"""The long proofs, each of many short units: counts add up over runs of one source.

    make soak                              # lists the proofs and how far each is
    make soak PROOF=kills [SECONDS=7200]   # begins units for so long, and one unit at least

A unit is a process that reports figures (runs.report). After each, docs/results/soak-NAME.json is replaced:
whole numbers are summed, other figures are the last unit's. The next run goes on from it, in any checkout, if
the proof's source has the same hash; else it begins anew. The source is the program, its own test file and
all in tests/ that is no test file. A unit that fails counts nothing and ends the run: `failed` lists the
numbers of such units. Proofs of different names may run at once. A kill loses one unit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from undertow.bench.machine import ROOT, commit, describe

from . import large_store
from .rare import FILES as RARE_FILES

BUDGET_S = 7_200.0
SOURCE = ("engine", "kernels", "prompts", "serving", "bench", "tests", "locks")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """`command(folder, n)`: the n-th unit. Done once `goal` figures (name and number) are reached."""

    command: Callable[[Path, int], Sequence[str]]
    goal: tuple[str, int]
    about: str
    env: Mapping[str, str] = field(default_factory=dict)
    keeps: bool = False  # a unit needs what the former ones have left in the folder

    def missing(self, figures: Figures) -> bool:
        return bool(figures.get(self.goal[0], 0) < self.goal[1])

    def source(self, root: Path = ROOT) -> str:
        """The hash of the program, of its test files, and of all in tests/ that is no test file."""
        own, found = self.command(root, 0), hashlib.sha256()
        for path in sorted(p for name in SOURCE for p in (root / name).rglob("*") if p.is_file()):
            name = str(path.relative_to(root))
            others = path.match("test_*.py") and name not in own
            if not others and not {"__pycache__", "node_modules"} & {*path.parts}:
                found.update(f"{name}\0".encode() + path.read_bytes())
        return found.hexdigest()[:12]


def of_test(target: str, goal: tuple[str, int], about: str, **env: object) -> Proof:
    """A unit is one run of some tests, named from tests/; SOAK_ROUND is its number."""
    words = f"-m pytest -q -rs -m soak --timeout 0 -p no:cacheprovider tests/{target}".split()
    values = {name: str(value) for name, value in env.items()}
    return Proof(lambda _folder, _n: (sys.executable, *words), goal, about, values)


def rare(_folder: Path, n: int) -> Sequence[str]:
    return (sys.executable, "-m", "tests.support.soak.rare", str(n), *RARE_FILES)


SIMULATION = "soak/test_simulation.py"
OPENAPI = "service/http/test_openapi.py"
KILLS = "engine/step/test_kill.py"
CLUSTER = "soak/test_cluster_kills.py -k"
SERVICE = "soak/test_service.py -k"
PROOFS: dict[str, Proof] = {
    "kills": of_test(KILLS, ("kills", 1_000), "kills of an ingest that decides", SOAK_KILLS=50),
    "log-kills": of_test("soak/test_log_kills.py -k thousand", ("kills", 1_000), "of writers", SOAK_KILLS=50),
    "isolation": of_test(
        "service/auth/test_isolation.py", ("steps", 100_000), "acts of tenants", ISOLATION_STEPS=5_000
    ),
    "openapi": of_test(OPENAPI, ("requests", 100_000), "half of them invalid", SOAK_EXAMPLES=60),
    "simulation": of_test(SIMULATION, ("seeds", 1_000), "of a simulated cluster", SOAK_SEEDS=20),
    "files": of_test("soak/test_damaged_files.py", ("cases", 100_000), "damaged files", SOAK_CASES=2_000),
    "poison": of_test("soak/test_poison.py", ("attacks", 30), "attacks on the local model"),
    "prompts": of_test("soak/test_prompts.py", ("cases", 20), "logs for the local model"),
    "faults": of_test("llm/test_faults.py", ("turns", 1), "LoCoMo's, with an LLM that fails"),
    "overload": of_test(f"{SERVICE} beyond", ("overloads", 20), "twice what the service can do"),
    "service-kills": of_test(f"{SERVICE} kill", ("service_kills", 20), "kills of the service under load"),
    "memory": of_test(f"{SERVICE} memory", ("minutes", 60), "of load, flat memory", SOAK_SECONDS=3_600),
    "bulk-kills": of_test(f"{CLUSTER} bulk", ("rounds", 8), "bulk ingests with kills", SOAK_SECONDS=300),
    "resharding-kills": of_test(f"{CLUSTER} resharding", ("reshardings", 50), "with kills", SOAK_SECONDS=300),
    "slow-llm": of_test("soak/test_cluster.py", ("runs", 1), "an LLM that falls behind", SOAK_SECONDS=1_800),
    "rare": Proof(rare, ("files", len(RARE_FILES)), "cases that make test leaves out"),
    "large-store": Proof(
        *(large_store.command, ("units", 303), "10 M turns"),
        env={"LARGE_TURNS": "10000000", "LARGE_TENANT_TURNS": "1000", "LARGE_PARTS": "100"},
        keeps=True,
    ),
}


def path_of(name: str, root: Path) -> Path:
    return root / "docs" / "results" / f"soak-{name}.json"


def saved(name: str, root: Path = ROOT) -> Figures:
    """What the file of a proof says; empty without one. Of an earlier source it may have any shape."""
    path = path_of(name, root)
    return dict(json.loads(path.read_text())) if path.exists() else {}


def progress(proof: Proof, state: Figures, tree: str) -> str:
    wanted, number = proof.goal
    line = f"{state.get('figures', state).get(wanted, 0):,} of {number:,} {wanted}"
    if state and state.get("source") != tree:
        return f"{line} on an earlier source"
    return f"{line}, failed units: {state['failed']}" if state.get("failed") else line


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
    """Run a unit. CalledProcessError: it failed. RuntimeError: it told nothing, as a skipped test."""
    with NamedTemporaryFile("r", prefix="undertow-soak-") as out:
        env = {**os.environ, **proof.env, "SOAK_ROUND": str(n), "SOAK_OUT": out.name}
        # a unit ends with the run, even if that is killed: it must not work on beside the next one
        command = ("setpriv", "--pdeathsig", "KILL", *proof.command(folder, n))
        done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
        told = [json.loads(line) for line in out]
    if not told:
        raise RuntimeError(f"unit {n} told nothing\n{done.stdout[-4_000:]}")
    return reduce(added, told)


def begun(name: str, proof: Proof, state: Figures, tree: str, folder: Path) -> Figures:
    """The state to go on from: that of the file, or an empty one."""
    here = state.get("source") == tree
    if here and (state["reached"] or folder.exists() or not proof.keeps):
        return state
    if state:
        why = "the store of its units is gone" if here else "its file is of an earlier source"
        print(f"{name}: begins anew, as {why}; git has what was committed", flush=True)
    shutil.rmtree(folder.parent, ignore_errors=True)
    about = {"soak": name, "command": f"make soak PROOF={name}", "source": tree, "goal": dict([proof.goal])}
    return {**about, "failed": state["failed"] if here else [], "elapsed_s": 0.0, "figures": {}}


def run(name: str, proof: Proof, seconds: float = BUDGET_S, root: Path = ROOT) -> Figures:
    """Go on with a proof until its goal is reached or the time is up: one unit at least. RuntimeError."""
    tree, began_s = proof.source(root), time.monotonic()
    folder = root / "build" / "soak" / name / tree
    state = begun(name, proof, saved(name, root), tree, folder)
    while proof.missing(state["figures"]):
        n, unit_s, failure = state["figures"].get("units", 0), time.monotonic(), None
        try:
            state["figures"] = added(state["figures"], {**figures_of(proof, folder, n), "units": 1})
            state["elapsed_s"] = round(state["elapsed_s"] + time.monotonic() - unit_s, 1)
        except subprocess.CalledProcessError as error:
            state["failed"].append(n)
            failure = RuntimeError(f"unit {n} failed\n{error.stdout[-4_000:]}\n{error.stderr[-4_000:]}")
        if proof.source(root) != tree:
            raise RuntimeError(f"the source changed during unit {n}, which counts nothing: run it again")
        reached = not (proof.missing(state["figures"]) or state["failed"])
        state |= {"commit": commit(), "machine": describe(), "reached": reached}
        draft = path_of(name, root).with_suffix(".draft")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(state) + "\n")
        draft.replace(path_of(name, root))  # a kill leaves the former file whole
        print(f"{name}: {progress(proof, state, tree)}, {state['elapsed_s']:,.0f} s", flush=True)
        if failure:
            raise failure
        if time.monotonic() - began_s >= seconds:
            break
    if not proof.missing(state["figures"]):
        shutil.rmtree(folder.parent, ignore_errors=True)
    return state


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("proof", nargs="*", choices=[*PROOFS, []], help="left out: list them")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="of each proof")
    asked = parser.parse_args()
    try:
        for name in asked.proof:
            run(name, PROOFS[name], asked.seconds)
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    for name, proof in PROOFS.items() if not asked.proof else ():
        print(f"{name:17} {progress(proof, saved(name), proof.source())}: {proof.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the tests of faults share: logs that make every kind of decision, end states, killable processes."""

from __future__ import annotations

import atexit
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import PolicyName, Turn
from undertow.engine.readers import read
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location

DRIVER = (sys.executable, "-B", "-m", "tests.support.faults.driver")
THETA: dict[str, Any] = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 3}
RATES: dict[str, Any] = {"seed": 1, "refusal_rate": 0.3, "empty_rate": 0.15}
PARKING: dict[str, Any] = {"malformed_rate": 0.12, "malformed_sticky": True}

TOPICS = (
    "harbour boat sail mast anchor tide rope deck crew wind",
    "violin bow string concert teacher scale lesson tune stage song",
    "garden tomato seed soil bean rain bed compost slug spade",
    "marathon shoe knee race mile coach stretch medal lap training",
    "kitchen bread oven flour yeast crust dough salt recipe loaf",
    "telescope star moon lens night comet orbit planet cloud dome",
)
FILLER = ("well", "maybe", "today", "later", "again", "somehow", "never", "always", "morning", "evening")


def write_log(
    path: Path, tenants: Sequence[str], turns: int, *, seed: int = 0, session_turns: int = 20
) -> Path:
    """A `messages` log: `turns` exchanges of each tenant, interleaved, on a few recurring topics."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for n in range(turns):
            for tenant in tenants:
                topic = rng.choice(TOPICS).split()
                said = [*rng.sample(topic, 6), rng.choice(FILLER), f"n{n}"]
                rng.shuffle(said)
                line = {
                    "tenant": tenant,
                    "session": f"s{n // session_turns}",
                    "timestamp": f"2026-03-{1 + n // 24 % 28:02d}T{n % 24:02d}:00:00",
                    "messages": [
                        {"role": "user", "name": "Ada", "content": " ".join(said)},
                        {"role": "assistant", "content": f"Tell me of the {topic[0]} and the {topic[1]}."},
                    ],
                }
                file.write(json.dumps(line) + "\n")
    return path


def turns_of(log: Path) -> dict[str, list[Turn]]:
    """The log's turns by tenant, in order."""
    turns: dict[str, list[Turn]] = {}
    for record in read(log, max_message_bytes=1_000_000):
        assert not record.errors
        for turn in record.turns:
            turns.setdefault(turn.tenant, []).append(turn)
    return turns


@dataclass(frozen=True)
class State:
    """A store's contents as its users can see them: by tenant, in no other order than that of seqs."""

    exports: dict[str, list[str]]
    jobs: list[dict[str, Any]]

    def kinds(self) -> set[str]:
        """Kinds of records, and of decisions, that occur."""
        records = [json.loads(line) for lines in self.exports.values() for line in lines]
        return {r["kind"] for r in records} | {r["decision"] for r in records if r["kind"] == "decision"}


def end_state(store: Path | Location) -> State:
    """All that `undertow export --vectors` and `undertow jobs` show of all tenants."""
    with reports(store) as of:
        exports = {
            name: sorted(
                orjson.dumps(record, option=orjson.OPT_SORT_KEYS).decode()
                for record in of.export(name, vectors=True)
            )
            for name in of.tenants.names()
        }
        return State(exports, of.jobs())


@contextmanager
def reports(store: Path | Location) -> Iterator[Reports]:
    with closing(Journal.open(store, writable=False)) as journal:
        yield Reports(journal)


def assert_same_state(state: State, expected: State) -> None:
    assert state.exports.keys() == expected.exports.keys()
    for tenant, lines in expected.exports.items():
        differs = sorted(set(state.exports[tenant]) ^ set(lines))
        assert not differs, f"{tenant}: {len(differs)} records differ, among them {differs[0]:.600}"
        assert state.exports[tenant] == lines, tenant
    assert state.jobs == expected.jobs


# in which every policy's windows close within a short log; nothing to those that have none
# Windows that short logs fill: those of NEMORI, and of the turns that RecMem reads besides what recurs.
WINDOWS: dict[str, Any] = {
    **{"window_messages": 8, "salience_turns": 8, "quiet_share": 0.5},
    **{"short_term_pages": 2, "heat_threshold": 2},
}
# kinds of records and decisions that a log of `write_log` makes under each policy
KINDS: Mapping[PolicyName, set[str]] = {
    "recmem": {"merged", "fired", "waits", "episode", "fact"},
    "eager": {"fired", "fact"},
    "nemori": {"fired", "waits", "episode", "fact"},
    "himem": {"fired", "waits", "episode", "fact"},
    "a-mem": {"fired", "fact"},
    "memory-os": {"fired", "waits", "episode", "fact"},
}

# each policy before a change, and after one
CHANGES: tuple[tuple[PolicyName, PolicyName], ...] = (
    ("recmem", "eager"),
    ("eager", "recmem"),
    ("recmem", "nemori"),
    ("nemori", "himem"),
    ("himem", "eager"),
    ("eager", "a-mem"),
    ("a-mem", "memory-os"),
    ("memory-os", "recmem"),
)


def stored_texts(store: Path, kind: str) -> dict[str, list[str]]:
    """Texts of every version of a kind of memory, or the texts of the turns, by tenant."""
    with reports(store) as of:
        return {
            name: [r["text"] for r in of.export(name) if r["kind"] == kind and not r.get("deleted")]
            for name in of.tenants.names()
        }


def memories_of(store: Path) -> list[str]:
    """Texts of all episodes and facts in every version."""
    return [
        text for kind in ("episode", "fact") for texts in stored_texts(store, kind).values() for text in texts
    ]


@dataclass
class Outcome:
    """How a child ended: its exit status (negative: a signal) and what it had said by then."""

    status: int
    lines: list[dict[str, Any]] = field(default_factory=list)

    def last(self, key: str) -> Any:
        return next((line[key] for line in reversed(self.lines) if key in line), None)


class Driver:
    """Runs tasks of driver.py in processes that can be killed; see there for the tasks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            DRIVER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, **task: Any) -> Outcome:
        """Run a task to its end, or until it is killed."""
        assert self._process.stdin is not None
        self._count += 1
        out = self._folder / f"child-{self._count}.jsonl"
        out.touch()
        self._process.stdin.write(json.dumps({**task, "out": str(out)}, default=str) + "\n")
        self._process.stdin.flush()
        status = int(self._answer()["exit"])
        return Outcome(status, [json.loads(line) for line in out.read_text().splitlines()])


@cache
def shared_driver() -> Driver:
    """One for all tests of a session: its start takes seconds."""
    folder = tempfile.TemporaryDirectory(prefix="fault-driver-")
    driver = Driver(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(driver.close)
    return driver


def assert_prefix_stored(store: Path, log: dict[str, list[Turn]], acked: dict[str, int]) -> dict[str, int]:
    """Each tenant's stored turns are the first ones of its log, each once, `acked` or more; how many."""
    stored: dict[str, list[str]] = {name: [] for name in log}
    if (store / "store.json").exists():
        stored |= stored_texts(store, "turn")
        with reports(store) as of:
            for name in of.tenants.names():
                seqs = [r["seq"] for r in of.turns(name)]
                assert seqs == list(range(len(seqs))), name
    for name, texts in stored.items():
        assert texts == [turn.text for turn in log[name][: len(texts)]], name
        assert len(texts) >= acked.get(name, 0), f"{name}: an acknowledged turn is lost"
    return {name: len(texts) for name, texts in stored.items()}

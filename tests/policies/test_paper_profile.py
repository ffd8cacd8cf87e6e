"""Under the profile `paper` RecMem, NEMORI and HiMem decide as at commit 9a385df, before there were profiles
of calls, salient turns and shares.

`former_decisions.json` was printed there by `python -m tests.policies.test_paper_profile`. With
UNDERTOW_PROFILE=paper that command prints what this code decides.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.replies import Messages, share
from undertow.engine.base.model import Turn
from undertow.engine.llm.client import Completion
from undertow.prompts.builders import Prompt

from ..support.engine import ENCODER, RecordingLLM, by_birth, ingest, opened, read_back, settings_of, turn_of
from ..support.faults.harness import TOPICS
from ..support.oracles.run import OracleMemory

RECORDED = Path(__file__).with_name("former_decisions.json")
THETAS = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 3, "theta_evoke": 0.5}
# name: policy, words of a topic's ten that a turn has, and settings. "usual" has the profile's own thetas.
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recmem": ("recmem", 6, THETAS),
    "recmem-usual": ("recmem", 9, {}),
    "nemori": ("nemori", 6, THETAS | {"window_messages": 8}),
    "himem": ("himem", 6, THETAS),
}
# What the other profiles do by default, and the test suite switches off.
WITH_SALIENCE = {"salience_turns": 16, "quiet_share": 0.7, "answer_tokens": None}


class Replies(MockReplies):
    """Made from the operation and the turns that a prompt shows, whatever its wording.

    A fact has the words of the one turn that it names, so that checking what a reply names (D1 of the design)
    changes nothing.
    """

    __setattr__ = object.__setattr__
    operation: str
    lines: list[tuple[int, str]]

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        user = messages[1]["content"]
        found = re.findall(r"^\[(\d+),.*?((?:[a-z]+ )+m\d+)", user, re.M)
        self.lines = [(int(number), text) for number, text in found]
        shown = sorted(set(re.findall(r"\b[fm]\d+\b", user)))
        return json.dumps(self._value(schema or {}, f"{self.seed} {self.operation} {shown}"))

    def _value(self, node: Mapping[str, Any], key: str, said: tuple[int, str] | None = None) -> Any:
        picked = share(key.encode(), "")
        if "anyOf" in node:
            return None if picked < 0.5 else 1 + int(picked * 3)
        if "enum" in node:
            return node["enum"][int(picked * len(node["enum"]))]
        match node["type"]:
            case "object":
                if self.lines and (".facts." in key or ".notes." in key):
                    said = self.lines[int(picked * len(self.lines))]
                return {n: self._value(of, f"{key}.{n}", said) for n, of in node["properties"].items()}
            case "array" if said and key.endswith((".turns", ".messages")):
                return [said[0]]
            case "array":
                least = node.get("minItems", 0)
                count = least + int(picked * (min(node["maxItems"], 3) - least + 1))
                return [self._value(node["items"], f"{key}.{n}", said) for n in range(count)]
            case "integer":
                return 1 + int(picked * (len(self.lines) + 1))
            case "boolean":
                return picked >= 0.25
            case _:
                texts = [text for _, text in self.lines] or TOPICS
                told = said[1] if said else f"{texts[int(picked * len(texts))]} {texts[0]}"
                return re.sub(r"\bm(?=\d)", "f", told)


class RepliesByOperation(RecordingLLM):
    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        self.replies = replies = Replies(int(tenant[1:]))
        replies.operation = prompt.operation
        return super().submit(prompt, tenant=tenant)


def _log(tenant: str, words: int) -> list[Turn]:
    rng = random.Random(tenant)
    said = [" ".join(rng.sample(rng.choice(TOPICS[:3]).split(), words)) for _ in range(40)]
    turns = [
        turn_of(tenant, n, f"{text} m{n}", timestamp=f"2026-03-{1 + n // 2:02d}T10:00:00")
        for n, text in enumerate(said)
    ]
    return [replace(turn, session_id=f"s{n // 9}") for n, turn in enumerate(turns)]


def _decided(folder: Path, name: str, **more: Any) -> dict[str, list[Any]]:
    """Decisions, versions and calls of two tenants. Of RecMem's facts not the sources, which D1 changed."""
    llm = RepliesByOperation(MockReplies())
    tenants = ["t0", "t1"]
    policy, words, settings = RUNS[name]
    with opened(folder / name, settings_of(policy=policy, **settings, **more), ENCODER, llm) as engine:
        for tenant in tenants:
            ingest(engine, _log(tenant, words), 40)
        assert engine.drain()
    run = read_back(folder / name, llm.prompts)
    lines: dict[str, list[Any]] = {}
    for tenant in tenants:
        decisions = [
            [d.seq, d.decision, d.merge_asked, d.nearest_episode, d.score, d.cluster, d.settled]
            for d in run.decisions[tenant]
        ]
        versions = [
            [m.made_at_seq, m.born_at_seq, m.ordinal, m.version, m.kind, m.fact_kind, m.episode_id, told]
            for m in by_birth(run.versions[tenant])
            for told in [_told(m, with_sources=policy != "recmem" or m.kind == "episode")]
        ]
        lines[tenant] = [*decisions, *versions, " ".join(p.operation for p in run.prompts[tenant])]
    as_read: dict[str, list[Any]] = json.loads(json.dumps(lines))
    return as_read


def _told(memory: OracleMemory, *, with_sources: bool) -> str:
    """A digest of the text, the memories that it replaces, and where it comes from."""
    told: list[Any] = [memory.text, memory.supersedes]
    if with_sources:
        told += [memory.sources, memory.source_messages, memory.timestamp]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=6).hexdigest()


@pytest.mark.parametrize("name", RUNS)
def test_the_profile_paper_decides_as_the_former_code(name: str, tmp_path: Path) -> None:
    former = json.loads(RECORDED.read_text())[name]
    now = _decided(tmp_path, name, profile="paper", **WITH_SALIENCE)
    assert now.keys() == former.keys()
    for tenant, lines in former.items():
        assert now[tenant] == lines, tenant
    every = json.dumps(former)
    kinds = {"fired", "waits", "episode", "fact"} | ({"merged"} if name == "recmem" else set())
    assert all(f'"{kind}"' in every for kind in kinds), "what is compared"


@pytest.mark.parametrize("name", ["recmem", "recmem-usual"])
def test_with_the_calls_of_the_paper_alone_other_turns_fire(name: str, tmp_path: Path) -> None:
    former = json.loads(RECORDED.read_text())[name]
    now = _decided(tmp_path, name, calls="paper", **WITH_SALIENCE)
    fired = [[line[0] for line in of["t0"] if line[1] == "fired"] for of in (former, now)]
    assert fired[0] != fired[1]


def test_the_profile_paper_packs_no_answer_into_a_budget() -> None:
    assert settings_of(profile="paper", answer_tokens=None).answer_budget == 0
    assert settings_of(answer_tokens=None).answer_budget == 600


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(json.dumps({name: _decided(Path(folder), name) for name in RUNS}))

"""Under the profile `paper` RecMem, NEMORI and HiMem decide as the code of 9a385df did, which had no other.

`former_decisions.json` was recorded with that commit by the functions below. `python -m
tests.policies.test_paper_profile POLICY...` prints what the code decides now.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
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
SETTINGS = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 3, "window_messages": 8, "theta_evoke": 0.5}


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


def _log(tenant: str) -> list[Turn]:
    rng = random.Random(tenant)
    said = [" ".join(rng.sample(rng.choice(TOPICS[:3]).split(), 6)) for _ in range(40)]
    turns = [
        turn_of(tenant, n, f"{words} m{n}", timestamp=f"2026-03-{1 + n // 2:02d}T10:00:00")
        for n, words in enumerate(said)
    ]
    return [replace(turn, session_id=f"s{n // 9}") for n, turn in enumerate(turns)]


def _decided(folder: Path, policy: str, **more: Any) -> dict[str, list[Any]]:
    """Decisions, versions and calls of two tenants. A fact's sources are left out."""
    llm = RepliesByOperation(MockReplies())
    tenants = ["t0", "t1"]
    settings = settings_of(policy=policy, **SETTINGS, **more)
    with opened(folder / policy, settings, ENCODER, llm) as engine:
        for tenant in tenants:
            ingest(engine, _log(tenant), 40)
        assert engine.drain()
    run = read_back(folder / policy, llm.prompts)
    lines: dict[str, list[Any]] = {}
    for tenant in tenants:
        decisions = [
            [d.seq, d.decision, d.merge_asked, d.nearest_episode, d.score, d.cluster, d.settled]
            for d in run.decisions[tenant]
        ]
        versions = [
            [m.made_at_seq, m.born_at_seq, m.ordinal, m.version, m.kind, m.fact_kind, m.episode_id, _told(m)]
            for m in by_birth(run.versions[tenant])
        ]
        lines[tenant] = [*decisions, *versions, " ".join(p.operation for p in run.prompts[tenant])]
    as_read: dict[str, list[Any]] = json.loads(json.dumps(lines))
    return as_read


def _told(memory: OracleMemory) -> str:
    told = f"{memory.text} {memory.sources if memory.kind == 'episode' else ''}"
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


@pytest.mark.parametrize("policy", ["recmem", "nemori", "himem"])
def test_the_profile_paper_decides_as_the_former_code(policy: str, tmp_path: Path) -> None:
    former = json.loads(RECORDED.read_text())[policy]
    now = _decided(tmp_path, policy, profile="paper")
    assert now.keys() == former.keys()
    for tenant, lines in former.items():
        assert now[tenant] == lines, tenant
    every = json.dumps(former)
    assert all(kind in every for kind in ('"fired"', '"waits"', '"episode"', '"fact"')), "what is compared"


def test_the_usual_profile_decides_otherwise(tmp_path: Path) -> None:
    former = json.loads(RECORDED.read_text())["recmem"]
    assert _decided(tmp_path, "recmem") != former


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(json.dumps({policy: _decided(Path(folder), policy) for policy in sys.argv[1:]}))

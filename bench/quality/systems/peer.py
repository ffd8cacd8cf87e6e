"""mem0ai or langmem as a measured system, through their runners in bench/peers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from undertow.bench.peers.process import OPERATION, PeerError, PeerProcess, Reply, Spent, added, command_of
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.json_lines import GrowingFile
from undertow.bench.quality.systems.base import Material, Means, OnProgress, System, shown
from undertow.engine.base.model import Turn, Usage

MEMORIES = 60
"""How many memories answer a question, as in the papers: 30 a speaker on LoCoMo, 45 + 15 on LongMemEval-S."""

_ADDED = "added.jsonl"


class PeerSystem(System):
    """Adds turn by turn and records each, so that a stopped run can be resumed.

    A peer's local store does not support concurrent adds. A turn whose add failed or was cut off is added
    again.
    """

    def __init__(self, name: str, means: Means, *, command: Sequence[str] | None = None) -> None:
        """`command` replaces the usual runner. PeerError: the peer is not installed or does not start."""
        self.name = name
        self._process = PeerProcess(
            name,
            command or command_of(name, means.settings, means.folder),
            means.folder,
            api_key=means.settings.llm_api_key,
        )
        try:
            made_by = {
                "peer": self._process.version,
                "encoder": means.settings.encoder,
                "model": means.settings.llm_model,
            }
            self._record = Record(means.folder / _ADDED, made_by)
        except BaseException:
            self._process.close()
            raise

    def build(self, samples: Sequence[Sample], on_progress: OnProgress) -> None:
        """PeerError: the peer failed at a turn. Turns added before it are kept."""
        total = sum(len(sample.turns) for sample in samples)
        for done, turn in enumerate((turn for sample in samples for turn in sample.turns), 1):
            if not self._record.has(turn):
                self._add(turn)
            on_progress("turns added", done, total)

    def _add(self, turn: Turn) -> None:
        try:
            reply = self._process.ask(OPERATION, **added(turn)).result()
        except PeerError as error:
            if error.spent is not None:
                self._record.write(turn, error.spent, added=False)
            raise PeerError(
                f"{error} This was turn {turn.dedupe_key} of {turn.tenant}. What was added before it is "
                "kept: run the same command again once the cause is gone."
            ) from error
        self._record.write(turn, reply.spent, added=True)

    def material(self, sample: Sample, question: Question) -> Material:
        asked = self._process.ask("search", tenant=sample.tenant, query=question.text, count=MEMORIES)
        found: Reply = asked.result()
        return Material(facts=shown([(hit["date"], hit["text"]) for hit in found.result]))

    def construction(self, tenant: str) -> dict[str, Usage]:
        return {OPERATION: self._record.usage[tenant]}

    def counts(self) -> dict[str, int]:
        """`complaints`: errors that the peer logged but did not raise, such as an unreadable reply."""
        return {"turns": len(self._record), "complaints": self._record.complaints}

    def close(self) -> None:
        self._process.close()
        self._record.close()


class Record:
    """One JSON line a turn, with its cost; the first line names the peer, the encoder and the model."""

    def __init__(self, path: Path, made_by: Mapping[str, Any]) -> None:
        """Reads the lines. UndertowError: the file is of another peer, encoder or model, or not ours."""
        self._keys: set[tuple[str, str]] = set()
        self.usage: defaultdict[str, Usage] = defaultdict(Usage)
        self.complaints = 0
        self._file = GrowingFile(path)
        try:
            self._take_up(list(self._file.lines()), made_by)
        except BaseException:
            self._file.close()
            raise

    def _take_up(self, lines: Sequence[dict[str, Any]], made_by: Mapping[str, Any]) -> None:
        if not lines:
            self._file.write(made_by)
        elif lines[0] != made_by:
            raise PeerError(
                f"{self._file.path} was made with {lines[0]}, not with {dict(made_by)}. Name another folder."
            )
        for line in lines[1:]:
            self._book(line)

    def _book(self, line: Mapping[str, Any]) -> None:
        if line["added"]:
            self._keys.add((line["tenant"], line["turn"]))
        self.usage[line["tenant"]] += Usage(**line["usage"])
        self.complaints += len(line["complaints"])

    def has(self, turn: Turn) -> bool:
        return (turn.tenant, turn.dedupe_key) in self._keys

    def write(self, turn: Turn, spent: Spent, *, added: bool) -> None:
        """`added`: whether the turn was; a failed request costs tokens too."""
        usage, complaints = asdict(spent.usage), spent.complaints
        line = {"tenant": turn.tenant, "turn": turn.dedupe_key, "added": added}
        line |= {"usage": usage, "complaints": complaints}
        self._file.write(line)
        self._book(line)

    def __len__(self) -> int:
        return len(self._keys)

    def close(self) -> None:
        self._file.close()

"""mem0ai or langmem as a measured system, through their runners in bench/peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
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
    again. The record has one JSON line a turn, with its cost; its first line names the peer, the encoder and
    the model.
    """

    def __init__(self, name: str, means: Means, *, command: Sequence[str] | None = None) -> None:
        """`command` replaces the usual runner.

        PeerError: the peer is not installed or does not start, or the record is of another peer, encoder or
        model. UndertowError: the record is not ours.
        """
        self.name = name
        settings, folder = means.settings, means.folder
        command = command or command_of(name, settings, folder)
        with ExitStack() as stack:
            process = PeerProcess(name, command, folder, api_key=settings.llm_api_key)
            self._process = stack.enter_context(process)
            self._file = stack.enter_context(closing(GrowingFile(folder / _ADDED)))
            made_by = {"peer": process.version, "encoder": settings.encoder, "model": settings.llm_model}
            self._record = self._recorded(made_by)
            self._added = {(line["tenant"], line["turn"]) for line in self._record if line["added"]}
            self._stack = stack.pop_all()

    def _recorded(self, made_by: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The lines of an earlier run."""
        lines = list(self._file.lines())
        if not lines:
            self._file.write(made_by)
        elif lines[0] != made_by:
            raise PeerError(
                f"{self._file.path} was made with {lines[0]}, not with {made_by}. Name another folder."
            )
        return lines[1:]

    def build(self, samples: Sequence[Sample], on_progress: OnProgress) -> None:
        """PeerError: the peer failed at a turn. Turns added before it are kept."""
        total = sum(len(sample.turns) for sample in samples)
        for done, turn in enumerate((turn for sample in samples for turn in sample.turns), 1):
            if (turn.tenant, turn.dedupe_key) not in self._added:
                self._add(turn)
            on_progress("turns added", done, total)

    def _add(self, turn: Turn) -> None:
        try:
            reply = self._process.ask(OPERATION, **added(turn)).result()
        except PeerError as error:
            if error.spent is not None:
                self._note(turn, error.spent, added=False)
            raise PeerError(
                f"{error} This was turn {turn.dedupe_key} of {turn.tenant}. What was added before it is "
                "kept: run the same command again once the cause is gone."
            ) from error
        self._note(turn, reply.spent, added=True)

    def _note(self, turn: Turn, spent: Spent, *, added: bool) -> None:
        """`added`: whether the turn was; a failed request costs tokens too."""
        line = {"tenant": turn.tenant, "turn": turn.dedupe_key, "added": added, **asdict(spent)}
        self._file.write(line)
        self._record.append(line)
        if added:
            self._added.add((turn.tenant, turn.dedupe_key))

    def material(self, sample: Sample, question: Question) -> Material:
        asked = self._process.ask("search", tenant=sample.tenant, query=question.text, count=MEMORIES)
        found: Reply = asked.result()
        return Material(facts=shown([(hit["date"], hit["text"]) for hit in found.result]))

    def construction(self, tenant: str) -> dict[str, Usage]:
        used = (Usage(**line["usage"]) for line in self._record if line["tenant"] == tenant)
        return {OPERATION: sum(used, Usage())}

    def counts(self) -> dict[str, int]:
        """`complaints`: errors that the peer logged but did not raise, such as an unreadable reply."""
        complaints = sum(len(line["complaints"]) for line in self._record)
        return {"turns": len(self._added), "complaints": complaints}

    def close(self) -> None:
        self._stack.close()

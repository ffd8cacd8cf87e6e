"""The first minute without an LLM: a conversation is stored, searched, and its searches explained."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from undertow.engine.api.engine import Engine
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.config import Settings
from undertow.engine.base.results import Report
from undertow.engine.encoders.factory import make_encoder
from undertow.serving.demo.demo import CONVERSATION, QUESTIONS

SHOWN_CHARS = 110
NEXT = """
Next:
  undertow ingest your-chats.jsonl --store memories              # or an export: docs/importing.md
  undertow search "a question" --tenant NAME --store memories --explain
  undertow ingest your-chats.jsonl --store memories --llm URL    # makes episodes and facts of them"""


def run(settings: Settings, out: Console) -> dict[str, Any]:
    """Store, search and explain the demo's conversation in a temporary store; returns the figures.

    UndertowError: the encoder is not here.
    """
    began_s = time.perf_counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="undertow-")))
        out.print(f"Loading the encoder {settings.encoder} ...")
        engine = stack.enter_context(Engine(folder / "store", settings, make_encoder(settings)))
        work = Ingest(engine)
        work.feed([CONVERSATION])
        work.settle()
        turns, spent_s = work.report.read_turns, work.report.admit_s
        out.print(f"\n{turns} turns are stored and can be found, after {spent_s:.2f} s and no LLM call.")
        questions = orjson.loads(QUESTIONS.read_bytes())
        found = [_search(engine, question, out) for question in questions]
        recurred = _recurred(engine, questions[0]["tenant"], out)
    out.print(Text(NEXT))
    return {
        "turns": turns,
        "searches": found,
        "recurred_at": recurred,
        "elapsed_s": round(time.perf_counter() - began_s, 3),
    }


def _search(engine: Engine, question: dict[str, str], out: Console) -> Report:
    """The nearest turn to a question, and why."""
    found = engine.search(question["tenant"], question["question"], k_sub=3, explain=True)
    report = found.explained(found.ranked(1))
    assert report is not None, "it was asked for"
    (best,) = found.ranked(1)
    parts = report["scores"][best.id]
    words = ", ".join(parts["matched"]) or "none"
    out.print(Text.assemble("\n", ("Search  ", "bold"), question["question"]))
    out.print(Text.assemble(("Found   ", "bold cyan"), _cut(best.memory)))
    out.print(
        Text(f"Why     score {best.score:.2f}: cosine {parts['cosine']:.2f}; its words of the query: {words}")
    )
    return {"query": question["question"], "found": best.memory, "score": best.score, **parts}


def _recurred(engine: Engine, tenant: str, out: Console) -> int | None:
    """The first turn whose topic comes back, which waits for an LLM. None: none does."""
    turns = engine.tenants.get(tenant)
    seq = next((job.seq for job in turns.jobs.values()), None)
    if seq is None:
        out.print("\nNo topic comes back in these turns, so no LLM would be asked.")
        return None
    again = turns.said(seq)[0]
    out.print(
        f"\nAn LLM is asked only once a topic comes back: first at turn {seq}. It, and those before it:"
    )
    near = engine.search(tenant, again, k_sub=len(turns.seq_by_row), k_epi=0, k_sem=0).turns
    before = [hit.source_seqs[0] for hit in near if hit.source_seqs[0] < seq]
    for one in (seq, *sorted(before[: engine.settings.recurrence_count - 1])):
        out.print(Text(f"  turn {one:>2}  {_cut(turns.said(one)[0])}"))
    return seq


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[:SHOWN_CHARS] + " ..."

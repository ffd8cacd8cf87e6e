"""The demo: ingests a small conversation, shows its memories, asks three questions, reports the cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.ingest_files import Ingest, obstacles
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, UndertowError, Usage
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.token_count import token_count
from undertow.engine.readers import read
from undertow.engine.step.scheduler import StepReport
from undertow.kernels.device import cpu_count
from undertow.prompts.builders import Prompt, ShownTurn, episode_prompt
from undertow.serving.vllm.local_server import DRAFTING, OFFLINE_MODEL, LocalVLLM, report_to

CONVERSATION = Path(__file__).with_name("conversation.jsonl")
QUESTIONS = Path(__file__).with_name("questions.json")
MODEL_NAME = "undertow-demo"


def run(settings: Settings, out: Console) -> dict[str, Any]:
    """Run the demo in a temporary store and report on `out`; returns its figures.

    UndertowError: there is no LLM server, or it does not decide everything.
    """
    with ExitStack() as stack:
        settings = stack.enter_context(_server(settings, out))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="undertow-demo-")))
        out.print(f"Loading the encoder {settings.encoder} ...")
        encoder, llm = make_encoder(settings), make_llm(settings)
        engine = stack.enter_context(Engine(folder / "store", settings, encoder, llm=llm))
        _remember(engine, out)
        answers = [_ask(engine, q, out) for q in orjson.loads(QUESTIONS.read_bytes())]
        return _cost(engine, answers, out)


@contextmanager
def _server(settings: Settings, out: Console) -> Iterator[Settings]:
    """The settings with an LLM server: the one they name, or a local one for the duration of the block."""
    if settings.llm_url is not None:
        out.print(f"Using the LLM server at {settings.llm_url}.")
        yield settings
        return
    out.print("Starting a local vLLM server; the first start takes some minutes on a CPU.")
    report = report_to(sys.stderr.write)
    with LocalVLLM(
        OFFLINE_MODEL,
        MODEL_NAME,
        max_model_len=settings.context_tokens,
        threads=cpu_count(),
        extra_args=DRAFTING,
        progress=report,
    ) as server:
        yield settings.model_copy(update={"llm_url": server.url, "llm_model": MODEL_NAME})


def _remember(engine: Engine, out: Console) -> None:
    turns = sum(len(r.turns) for r in read(CONVERSATION, max_message_bytes=engine.settings.max_message_bytes))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=out) as bar:
        task = bar.add_task("turns decided", total=turns)

        def show(report: StepReport) -> None:
            bar.advance(task, report.decided)
            for memory in report.made:
                bar.console.print(_shown(memory))

        work = Ingest(engine, on_step=show)
        work.feed([CONVERSATION])
        if not work.settle():
            raise UndertowError("the demo cannot go on: " + "; ".join(obstacles(engine)))


def _shown(memory: Memory) -> Text:
    new = "new" if memory.version == 1 else f"version {memory.version} of an"
    style = "bold cyan" if memory.kind == "episode" else "green"
    return Text.assemble((f"{new} {memory.kind} ", style), f"(turn {memory.made_at_seq}) {memory.text}")


def _ask(engine: Engine, question: dict[str, str], out: Console) -> dict[str, str]:
    answer = engine.answer(question["tenant"], question["question"])
    out.print(Text.assemble("\n", ("Question  ", "bold"), question["question"]))
    out.print(Text.assemble(("Answer    ", "bold"), answer.text))
    out.print(Text.assemble(("Expected  ", "dim"), question["gist"]))
    return {"question": question["question"], "answer": answer.text, "expected": question["gist"]}


def _cost(engine: Engine, answers: list[dict[str, str]], out: Console) -> dict[str, Any]:
    spent = {op: Usage(**used) for op, used in store_usage(engine.tenants).items()}
    asked = spent.pop("answer", Usage())
    built = sum(spent.values(), Usage())
    tokens = token_count(engine.settings)
    every_turn = sum(tokens.of_prompt(prompt) for prompt in _one_prompt_a_turn(engine))
    counts = engine.stats()
    out.print(
        f"\nTurns read: {counts['turns']}. Made of them: episodes: {counts['episodes']}, facts: "
        f"{counts['facts']}. LLM calls: {built.calls}."
    )
    out.print(
        f"Building memory sent {built.prompt_tokens:,} prompt tokens ({built.cached_prompt_tokens:,} of them "
        f"from the server's cache) and got {built.completion_tokens:,} back; the three answers took "
        f"{asked.prompt_tokens:,} and {asked.completion_tokens:,}."
    )
    out.print(
        f"One LLM call per turn would have sent about {every_turn:,} prompt tokens: an estimate, from each "
        f"turn alone in the episode prompt, counted by {tokens.name}."
    )
    return {
        **counts,
        "construction": asdict(built),
        "answering": asdict(asked),
        "estimated_prompt_tokens_one_call_a_turn": every_turn,
        "answers": answers,
    }


def _one_prompt_a_turn(engine: Engine) -> Iterator[Prompt]:
    for name in engine.tenants.names():
        tenant = engine.tenants.get(name)
        for turn in map(tenant.turn, tenant.seq_by_row):
            yield episode_prompt([ShownTurn(1, turn.timestamp, turn.text)])

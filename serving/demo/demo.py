"""The demo: a small conversation in, memories as they appear, three questions, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
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
from undertow.engine.llm.client import Completion, LLMClient, OnCall, OnText
from undertow.engine.readers import read
from undertow.engine.step.scheduler import StepReport
from undertow.kernels.device import cpu_count
from undertow.prompts.builders import Prompt, ShownTurn, episode_prompt
from undertow.serving.vllm.local_server import DRAFTING, OFFLINE_MODEL, LocalVLLM, report_to

CONVERSATION = Path(__file__).with_name("conversation.jsonl")
QUESTIONS = Path(__file__).with_name("questions.json")
MODEL_NAME = "undertow-demo"


class Measured:
    """An `LLMClient` that passes everything on and notes how many tokens a character of prompt costs."""

    def __init__(self, inner: LLMClient) -> None:
        self._inner = inner
        self._seen: list[tuple[int, int]] = []  # (characters, tokens) of each prompt sent exactly once

    @property
    def tokens_per_char(self) -> float:
        """0 when the server reports no usage."""
        chars = sum(c for c, _ in self._seen)
        return sum(t for _, t in self._seen) / chars if chars else 0.0

    @property
    def on_call(self) -> OnCall | None:
        return self._inner.on_call

    @on_call.setter
    def on_call(self, on_call: OnCall | None) -> None:
        self._inner.on_call = on_call

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        return self._noted(prompt, self._inner.submit(prompt, tenant=tenant))

    def stream(self, prompt: Prompt, *, tenant: str, on_text: OnText) -> Future[Completion]:
        return self._noted(prompt, self._inner.stream(prompt, tenant=tenant, on_text=on_text))

    def _noted(self, prompt: Prompt, future: Future[Completion]) -> Future[Completion]:
        future.add_done_callback(lambda done: self._note(prompt, done))
        return future

    def _note(self, prompt: Prompt, done: Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None and done.result().usage.calls == 1:
            self._seen.append((prompt_chars(prompt), done.result().usage.prompt_tokens))

    def cancel(self, future: Future[Completion]) -> None:
        self._inner.cancel(future)

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    @property
    def unreachable_s(self) -> float | None:
        return self._inner.unreachable_s

    @property
    def last_error(self) -> str | None:
        return self._inner.last_error

    def close(self) -> None:
        self._inner.close()


def prompt_chars(prompt: Prompt) -> int:
    return len(prompt.system) + len(prompt.user)


def run(settings: Settings, out: Console) -> dict[str, Any]:
    """Run the demo in a temporary store, telling it on `out`; returns its figures.

    UndertowError when no server can be had or the server does not decide everything.
    """
    with ExitStack() as stack:
        settings = stack.enter_context(_server(settings, out))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="undertow-demo-")))
        client = make_llm(settings)
        assert client is not None, "the server's URL is set by now"
        llm = Measured(client)
        out.print(f"Loading the encoder {settings.encoder} ...")
        engine = stack.enter_context(Engine(folder / "store", settings, make_encoder(settings), llm=llm))
        _remember(engine, out)
        answers = [_ask(engine, q, out) for q in orjson.loads(QUESTIONS.read_bytes())]
        return _cost(engine, llm, answers, out)


@contextmanager
def _server(settings: Settings, out: Console) -> Iterator[Settings]:
    """The settings with a server: the one they name, or a local one that ends with the block."""
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
                bar.console.print(_told(memory))

        work = Ingest(engine, on_step=show)
        work.feed([CONVERSATION])
        if not work.settle():
            raise UndertowError("the demo cannot go on: " + "; ".join(obstacles(engine)))


def _told(memory: Memory) -> Text:
    new = "new" if memory.version == 1 else f"version {memory.version} of an"
    style = "bold cyan" if memory.kind == "episode" else "green"
    return Text.assemble((f"{new} {memory.kind} ", style), f"(turn {memory.made_at_seq}) {memory.text}")


def _ask(engine: Engine, question: dict[str, str], out: Console) -> dict[str, str]:
    answer = engine.answer(question["tenant"], question["question"])
    out.print(Text.assemble("\n", ("Question  ", "bold"), question["question"]))
    out.print(Text.assemble(("Answer    ", "bold"), answer.text))
    out.print(Text.assemble(("Expected  ", "dim"), question["gist"]))
    return {"question": question["question"], "answer": answer.text, "expected": question["gist"]}


def _cost(engine: Engine, llm: Measured, answers: list[dict[str, str]], out: Console) -> dict[str, Any]:
    spent = {op: Usage(**used) for op, used in store_usage(engine.tenants).items()}
    asked = spent.pop("answer", Usage())
    built = sum(spent.values(), Usage())
    every_turn = round(_chars_of_one_call_a_turn(engine) * llm.tokens_per_char)
    counts = engine.stats()
    out.print(
        f"\n{counts['turns']} turns became {counts['episodes']} episodes and {counts['facts']} facts with "
        f"{built.calls} LLM calls."
    )
    out.print(
        f"Building memory sent {built.prompt_tokens:,} prompt tokens ({built.cached_prompt_tokens:,} of them "
        f"from the server's cache) and got {built.completion_tokens:,} back; the three answers took "
        f"{asked.prompt_tokens:,} and {asked.completion_tokens:,}."
    )
    out.print(
        f"One LLM call per turn would have sent about {every_turn:,} prompt tokens: an estimate, from each "
        f"turn alone in the episode prompt, at {llm.tokens_per_char:.3f} tokens a character as measured here."
    )
    return {
        **counts,
        "construction": asdict(built),
        "answering": asdict(asked),
        "estimated_prompt_tokens_one_call_a_turn": every_turn,
        "answers": answers,
    }


def _chars_of_one_call_a_turn(engine: Engine) -> int:
    chars = 0
    for name in engine.tenants.names():
        tenant = engine.tenants.get(name)
        for seq in tenant.seq_by_row:
            turn = tenant.turn(seq)
            chars += prompt_chars(episode_prompt([ShownTurn(1, turn.timestamp, turn.text)]))
    return chars

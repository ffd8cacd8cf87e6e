"""The protocol against a real vLLM server, which an actor on Ray keeps; only the tiny model is a stand-in."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Usage
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import BadReply, OpenAILLM
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    answer_prompt,
    episode_prompt,
    merge_prompt,
    refine_prompt,
)
from undertow.prompts.reply_schemas import MergeReply
from undertow.serving import doctor
from undertow.serving.vllm.local_server import SERVER_PYTHON

from ..support.engine import opened, rows_of, settings_of, turn_of
from .tiny_model import make_tiny_model

pytestmark = pytest.mark.vllm

IN_FLIGHT = 24
CONTEXT_TOKENS = 4096
START_TIMEOUT_S = 420.0


class KeptServer:
    """A running vLLM server and the actor that keeps it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.url = str(self._asked("ready", START_TIMEOUT_S))
        self.root_url = self.url.removesuffix("/v1")

    @property
    def pid(self) -> int | None:
        pid: int | None = self._asked("state").pid
        return pid

    def stop(self) -> None:
        self._asked("stop")

    def _asked(self, method: str, *args: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*args))


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer byte-level Llama with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), context_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def tiny_vllm(ray_address: str, tiny_model_dir: Path) -> Iterator[KeptServer]:
    """A running vLLM server that serves the tiny model under the name `tiny`; its start takes a minute."""
    if not SERVER_PYTHON.exists() and "CI" not in os.environ:
        pytest.skip(f"no vLLM environment ({SERVER_PYTHON} is missing): run `make setup-vllm`")
    import ray

    from undertow.serving.vllm.ray_actor import ServerPlan, VLLMActor

    plan = ServerPlan(
        model=str(tiny_model_dir),
        served_name="tiny",
        num_gpus=0,
        port=0,
        max_model_len=CONTEXT_TOKENS,
        kv_cache_gib=1,
        start_timeout_s=START_TIMEOUT_S,
    )
    # nameless: the tests of the actors end all that have names
    actor: Any = ray.remote(VLLMActor).options(num_cpus=0, max_concurrency=8).remote(plan, 0)
    try:
        server = KeptServer(actor)
        yield server
        server.stop()
    finally:
        ray.kill(actor)


@pytest.fixture
def client(tiny_vllm: KeptServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_vllm.url, api_key="none", max_retries=0, timeout=240) as made:
        yield made


def ask(client: openai.OpenAI, text: str, max_tokens: int = 16) -> ChatCompletion:
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=max_tokens, temperature=0
    )


def asked_of(n: int) -> list[Prompt]:
    """One prompt of each operation with a reply schema; `n` makes them differ."""
    turns = [ShownTurn(i, "2026-01-05", f"Ann: day {i}{n}, {'rain ' * n}") for i in (1, 2, 3)]
    memory = ShownMemory(1, "2026-01-05", f"Ann sails {'on ' * n}")
    return [episode_prompt(turns), merge_prompt(memory, turns[0]), refine_prompt(memory, turns, [memory])]


@pytest.fixture
def calls() -> list[tuple[Usage, str]]:
    """(usage, outcome) of each HTTP request of `llm`."""
    return []


@pytest.fixture
def llm(tiny_vllm: KeptServer, calls: list[tuple[Usage, str]]) -> Iterator[OpenAILLM]:
    settings = Settings(
        llm_url=tiny_vllm.url, llm_model="tiny", context_tokens=CONTEXT_TOKENS, reply_tokens=1_500
    )
    with OpenAILLM(settings, on_call=lambda *call: calls.append(call[-2:])) as made:
        yield made


def metrics(server: KeptServer) -> dict[str, float]:
    """The server's counters and gauges by bare name, added up over their labels."""
    with urllib.request.urlopen(f"{server.root_url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name = series.split("{", 1)[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_schemas_hold_for_many_requests_at_once_and_they_share_steps(
    llm: OpenAILLM, calls: list[tuple[Usage, str]], tiny_vllm: KeptServer
) -> None:
    for prompt in asked_of(IN_FLIGHT):  # the server compiles each schema once, and requests wait for that
        llm.submit(prompt, tenant="t").result(240)
    calls.clear()
    prompts = [prompt for n in range(IN_FLIGHT // 3) for prompt in asked_of(n)]
    before = metrics(tiny_vllm)
    replies = [future.result(240) for future in [llm.submit(p, tenant="t") for p in prompts]]
    after = metrics(tiny_vllm)

    for prompt, done in zip(prompts, replies, strict=True):
        assert prompt.reply is not None
        assert isinstance(done.reply, prompt.reply)
    assert len({done.reply for done in replies if isinstance(done.reply, MergeReply)}) > 1, "prompts matter"

    assert len(calls) == sum(done.usage.calls for done in replies)
    generated = sum(done.usage.completion_tokens for done in replies)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == generated
    # one request at a time takes a step a token
    steps = after["vllm:iteration_tokens_total_count"] - before["vllm:iteration_tokens_total_count"]
    assert 0 < steps < generated / 2


def test_the_doctor_finds_that_it_takes_all_that_is_sent(tiny_vllm: KeptServer) -> None:
    """Token limit, temperature, seed, and a schema with lengths: nothing has to be left out."""
    found = doctor._server(Settings(llm_url=tiny_vllm.url, llm_model="tiny", reply_tokens=1_500))
    assert found.ok and found.text == f"{tiny_vllm.url} serves tiny"


def test_usage_counts_the_tokens_of_the_template_and_the_reply(
    llm: OpenAILLM, calls: list[tuple[Usage, str]], tiny_vllm: KeptServer, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    turns = [ShownTurn(1, None, text) for text in ("Grüße, 東京 🚆", "a line\nand <b>another</b>" * 9)]
    for prompt in [
        *asked_of(1),
        merge_prompt(ShownMemory(1, None, "<|end|>"), turns[0]),
        episode_prompt(turns),
    ]:
        calls.clear()
        before = metrics(tiny_vllm)
        spent = llm.submit(prompt, tenant="t").result(120).usage
        after = metrics(tiny_vllm)
        text = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
        assert calls[0][0].prompt_tokens == len(tokenizer.encode(text, add_special_tokens=False))
        for series, counted in (("prompt", spent.prompt_tokens), ("generation", spent.completion_tokens)):
            name = f"vllm:{series}_tokens_total"
            assert after[name] - before[name] == counted > 0


def test_an_answer_is_told_in_pieces_with_the_usage_of_the_whole(
    llm: OpenAILLM, calls: list[tuple[Usage, str]]
) -> None:
    memory = ShownMemory(1, "2026-01-05", "Ann sails on Lake Como")
    outcomes: list[Usage] = []
    for n in range(3):  # a model that makes no sense may say nothing, or never stop
        prompt = answer_prompt(f"Where does Ann sail, {n}?", [memory], [], [], None)
        pieces: list[str] = []
        calls.clear()
        try:
            told = llm.stream(prompt, tenant="t", on_text=pieces.append).result(120)
        except BadReply as bad:
            assert pieces or len(calls) == 2
            outcomes.append(bad.usage)
        else:
            assert "".join(pieces) == told.reply
            outcomes.append(told.usage)
        assert [outcome for _, outcome in calls][-1] in ("ok", "bad")
    assert all(usage.prompt_tokens > 0 and usage.completion_tokens > 0 for usage in outcomes)


def test_a_repeated_prompt_is_cached_and_counted(
    llm: OpenAILLM, calls: list[tuple[Usage, str]], tiny_vllm: KeptServer
) -> None:
    for prompt in asked_of(11):
        llm.submit(prompt, tenant="t").result(120)
        calls.clear()
        before = metrics(tiny_vllm)
        again = llm.submit(prompt, tenant="t").result(120).usage
        after = metrics(tiny_vllm)
        first = calls[0][0]
        assert len(prompt.system) < first.cached_prompt_tokens < first.prompt_tokens
        hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
        assert hits == again.cached_prompt_tokens


def test_the_engine_loses_nothing_with_a_model_that_makes_no_sense(
    tiny_vllm: KeptServer, tmp_path: Path
) -> None:
    """Replies that cannot be used park their job; every turn is decided all the same."""
    settings = settings_of(
        llm_url=tiny_vllm.url,
        llm_model="tiny",
        context_tokens=CONTEXT_TOKENS,
        reply_tokens=200,
        theta_sim=0.2,
        theta_merge=0.2,
        theta_count=2,
    )
    turns = [turn_of("ann", n, f"I sail my boat on the lake, day {n}") for n in range(12)]
    outcomes: list[str] = []
    llm = OpenAILLM(settings)
    before = metrics(tiny_vllm)
    with opened(tmp_path, settings, HashingEncoder(384), llm) as engine:
        llm.on_call = lambda *call: outcomes.append(call[-1])
        engine.add_batch(turns)
        assert engine.drain()
        figures = engine.stats()
        assert engine.search("ann", "boat on the lake", k_sub=12).turns
    after = metrics(tiny_vllm)

    assert figures["turns"] == 12
    assert figures["undecided_turns"] == figures["pending_jobs"] == 0
    assert len(rows_of(tmp_path, "decision")) == 12
    assert "ok" in outcomes, f"no reply could be used: {outcomes}"
    assert figures["llm_calls"] == outcomes.count("ok") + outcomes.count("bad")
    for series, figure in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        name = f"vllm:{series}_tokens_total"
        assert after[name] - before[name] == figures[figure] > 0


def test_a_prompt_over_the_context_is_a_400_and_harms_nobody(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x" * 5_000)
    assert caught.value.status_code == 400
    assert "4096" in str(caught.value)
    assert ask(client, "still there?").usage is not None


def test_stop_leaves_no_process_and_the_port_is_free_again(
    client: openai.OpenAI, tiny_vllm: KeptServer
) -> None:
    """Keep it the last one here: another start of the server would take as long as the first."""
    ask(client, "is anybody there?")
    leader = psutil.Process(tiny_vllm.pid)
    family = [leader, *leader.children(recursive=True)]
    assert len(family) > 1, "vLLM runs its engine in a process of its own"

    tiny_vllm.stop()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    with pytest.raises(openai.APIConnectionError):
        ask(client, "anybody?")
    at = urlsplit(tiny_vllm.url)
    socket.create_server((at.hostname or "", at.port or 0)).close()

"""What each system gives the answering prompt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.systems.base import Material, System, prompt_of
from undertow.bench.quality.systems.baselines import BYTES_PER_TOKEN, NaiveRAG, chunked, tokens_of
from undertow.bench.quality.systems.registry import SYSTEMS
from undertow.engine.base.model import Message, Turn
from undertow.engine.llm.client import ServerRefused

from ...support.eval import conversation, haystack, means, only, talk, written


def quiet(what: str, done: int, total: int) -> None:
    pass


def given(system: System, sample: Sample, number: int = 0) -> Material:
    return system.material(sample, sample.questions[number])


def sample_of(sizes: Sequence[int]) -> Sample:
    """Messages of about so many estimated tokens, two a turn, one evidence id each."""
    messages = [
        Message("user", f"{n} ".ljust(round(size * BYTES_PER_TOKEN), "x"), "Ann")
        for n, size in enumerate(sizes)
    ]
    pairs = [tuple(messages[n : n + 2]) for n in range(0, len(messages), 2)]
    turns = tuple(Turn("t", pair, str(n), "s", "2023-05-08") for n, pair in enumerate(pairs))
    ids = iter(range(len(messages)))
    holds = tuple(tuple(f"D{next(ids)}" for _ in pair) for pair in pairs)
    return Sample("t", turns, holds, ())


def test_full_context_shows_every_turn_in_order(tmp_path: Path) -> None:
    sample = only(written(tmp_path, conversation()))
    system = SYSTEMS["full-context"](means(tmp_path))
    system.build([sample], quiet)
    material = given(system, sample)
    assert [memory.text for memory in material.turns] == [turn.text for turn in sample.turns]
    assert [memory.number for memory in material.turns] == [1, 2, 3, 4]
    assert material.turns[3].date == "12 May 2023, 09:00"
    assert "most relevant" not in prompt_of(sample.questions[0], material, "notes").user
    assert material.in_turns == ("D1:1", "D1:2", "D1:3", "D1:4", "D1:5", "D2:1")
    assert material.episodes == material.facts == () and system.construction(sample.tenant) == {}


def test_chunks_are_whole_messages_and_hold_the_one_that_overflows() -> None:
    chunks = list(chunked(sample_of([60, 60, 60, 300, 10]), 100))
    assert [chunk.holds for chunk in chunks] == [("D0", "D1"), ("D2", "D3"), ("D4",)]
    assert chunks[0].text.split("\n")[0].startswith("8 May 2023 Ann: 0 ")
    assert tokens_of(chunks[1].text) > 300, "a message longer than a chunk is not cut"
    assert [chunk.date for chunk in chunks] == ["2023-05-08"] * 3
    exact = list(chunked(sample_of([200, 1]), tokens_of("8 May 2023 Ann: ") + 150))
    assert [chunk.holds for chunk in exact] == [("D0",), ("D1",)], "a full chunk takes no more"


def test_naive_rag_gives_the_nearest_chunks_best_first(tmp_path: Path) -> None:
    words = ["boats sail", "kiln clay", "chess rooks", "owls hoot", "tea leaves", "jazz horns"]
    talked = talk(f"{text} " * 10 for text in words)
    sample = only(written(tmp_path, conversation(conversation=talked)))
    asked = Question("q", "owls hoot owls hoot, not tea leaves", "single-hop", (), "", None)
    for benchmark, shown in (("locomo", 3), ("longmemeval", 5)):
        system = NaiveRAG(20, means(tmp_path, benchmark))  # type: ignore[arg-type]
        system.build([sample], quiet)
        material = system.material(sample, asked)
        assert len(material.turns) == len(material.in_turns) == shown
        assert material.in_turns[:2] == ("D1:4", "D1:5")
        assert "owls hoot" in material.turns[0].text


def test_the_names_of_naive_rag_say_its_chunks(tmp_path: Path) -> None:
    sample = sample_of([500] * 20)
    counts = {}
    for name in ("naive-rag-2048", "naive-rag-4096"):
        system = SYSTEMS[name](means(tmp_path))
        system.build([sample], quiet)
        asked = Question("q", "xxxx", "single-hop", (), "", None)
        counts[name] = len(system.material(sample, asked).in_turns)
        assert system.name == name
    # with their dates and names a bit more than 500 each: 5 and 9 a chunk, 3 chunks
    assert counts == {"naive-rag-2048": 15, "naive-rag-4096": 20}


def test_evidence_of_a_chunk_is_its_sessions_in_longmemeval(tmp_path: Path) -> None:
    sample = only(written(tmp_path, haystack()), "longmemeval")
    system = SYSTEMS["naive-rag-2048"](means(tmp_path, "longmemeval"))
    system.build([sample], quiet)
    material = given(system, sample)
    assert material.in_turns == ("s1", "s2")
    lines = material.turns[0].text.split("\n")
    assert lines[0] == "20 May 2023, 02:21 user: I like tea."
    assert lines[2].startswith("21 May 2023"), "each line has its own date"


def test_an_unreachable_server_is_no_built_system(tmp_path: Path) -> None:
    sample = only(written(tmp_path, conversation(conversation=talk(["the same boat"] * 8))))
    nobody = means(
        tmp_path, llm_url="http://127.0.0.1:9/v1", llm_patience_s=0.1, theta_sim=0.4, theta_count=2
    )
    system = SYSTEMS["recmem"](nobody)
    with closing(system), pytest.raises(ServerRefused, match="not all turns are consolidated"):
        system.build([sample], quiet)

"""The public calls of the engine: what they refuse, what they survive, what they hide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import InputError, Message, Turn, UndertowError
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.store_info import StoreError

from ...support.cluster.in_process import FailingEncoder


def settings(**changes: Any) -> Settings:
    return Settings(encoder="hash:384", **{"theta_sim": 0.5, "theta_count": 3, **changes})


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def engine_of(folder: Path, encoder: Encoder | None = None, **changes: Any) -> Engine:
    return Engine(folder, settings(**changes), encoder or HashingEncoder(384), llm=MockLLM())


def test_a_failed_step_acknowledges_nothing_and_leaves_a_store_that_opens(tmp_path: Path) -> None:
    encoder = FailingEncoder([])
    with engine_of(tmp_path, encoder) as engine:
        engine.add("ann", said("one"), idempotency_key="a")
        encoder.words = ["two"]
        with pytest.raises(RuntimeError, match="no vector for two"):
            engine.add("ann", said("two"), idempotency_key="b")
        encoder.words = []
        with pytest.raises(UndertowError, match="opened again"):
            engine.add("ann", said("two"), idempotency_key="b")
    with engine_of(tmp_path) as engine:
        receipts = engine.add("ann", said("two"), idempotency_key="b")
        assert [(r.seq, r.duplicate) for r in receipts] == [(1, False)]
        assert engine.stats()["turns"] == 2


def test_a_tenant_whose_turns_are_all_deleted_goes_on_where_its_log_ended(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        (receipt,) = engine.add("ann", said("forget me"))
        assert receipt.id is not None
        assert engine.delete(receipt.id) == "turn"
    with engine_of(tmp_path) as engine:
        seqs = [engine.add("ann", said(f"turn {n}"))[0].seq for n in range(3)]
        assert seqs == [2, 3, 4], "after the turn and the record that deleted it"
    with engine_of(tmp_path) as engine:
        assert engine.stats()["turns"] == 3
        assert engine.erase("ann", now=True) is not None
        with pytest.raises(UndertowError, match="no tenant"):
            engine.search("ann", "turn")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"tenant": "", "messages": said("x")}, "tenant"),
        ({"tenant": "a\x00b", "messages": said("x")}, "tenant"),
        ({"tenant": "ann", "messages": said("x" * 2_000_000)}, "content"),
        ({"tenant": "ann", "messages": said("x"), "timestamp": "yesterday"}, "timestamp"),
        ({"tenant": "ann", "messages": said("x"), "metadata": {"a": object()}}, "metadata"),
        ({"tenant": "ann", "messages": [{"role": "user"}]}, "content"),
    ],
)
def test_add_refuses_bad_input_by_field_and_stores_nothing(
    tmp_path: Path, call: dict[str, Any], field: str
) -> None:
    with engine_of(tmp_path) as engine:
        with pytest.raises(InputError, match=field):
            engine.add(call.pop("tenant"), call.pop("messages"), **call)
        engine.add("ann", said("still works"))
        assert engine.stats()["turns"] == 1


def test_an_idempotency_key_alone_says_that_a_call_is_the_same(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        engine.add("ann", said("first wording"), idempotency_key="k")
        (again,) = engine.add("ann", said("second wording"), idempotency_key="k")
        assert again.duplicate
        same = [engine.add("ann", said("without a key"))[0].duplicate for _ in range(2)]
        assert same == [False, False]


def test_an_answer_is_asked_with_what_fits_the_context(tmp_path: Path) -> None:
    with engine_of(tmp_path, theta_count=50, context_tokens=2048, reply_tokens=256) as engine:
        long = " ".join(f"word{n}" for n in range(300))
        engine.add_batch([Turn("ann", (Message("user", f"{n} cake {long}"),), f"k{n}") for n in range(10)])
        answer = engine.answer("ann", "cake")
        assert 0 < answer.usage.prompt_tokens <= 2048


def test_texts_with_their_timestamp_are_another_kind_of_vector(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        engine.add("ann", said("one"), timestamp="2026-05-08")
    with pytest.raises(StoreError, match="reindex"):
        engine_of(tmp_path, embed_timestamp=True)

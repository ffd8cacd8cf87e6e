"""Before a shard serves, its encoder and its kernels have run once: nothing of it is stored or counted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import StatsQuery, TenantsQuery
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.step.warm_up import TEXTS, warm_up
from undertow.kernels.arena.arena import Arena
from undertow.serving.async_memories import open_memories

from ...support.cluster.in_process import FailingEncoder, mock_llm, settings


class Lent(Arena):
    """Knows how many rows were put into it."""

    rows = 0

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        handles = super().extend(*args, **kwargs)
        self.rows += len(handles)
        return handles


def test_the_kernels_have_read_and_the_arena_is_as_before() -> None:
    arena = Lent(384)
    warm_up(HashingEncoder(384), arena)
    assert arena.rows == 2 * len(TEXTS)
    assert arena.used_bytes == 0


COMPILED = """
import sys
import numba
from pathlib import Path
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.step.warm_up import warm_up
from undertow.kernels.arena.arena import make_arena

encoder = HashingEncoder(16)
warm_up(encoder, make_arena(16, "cpu"))

def compiled():
    return {
        (name, value.__name__): len(value.signatures)
        for name, module in sys.modules.items() if name.startswith("undertow.")
        for value in vars(module).values() if isinstance(value, numba.core.dispatcher.Dispatcher)
    }

with Engine(Path(sys.argv[1]), Settings(device="cpu", theta_count=1_000), encoder) as engine:
    before = compiled()
    for turns in (5, 600):
        engine.add_batch([Turn("ann", (Message("user", f"boat {n}"),), str(n)) for n in range(turns)])
    while engine.step().decided:
        pass
    assert engine.search("ann", "the boat").turns and engine.search("ann", "the boat", since="2020-01-01")
    print({key: now for key, now in compiled().items() if now != before.get(key)})
"""


def test_after_it_few_turns_many_and_a_search_compile_nothing(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (told.stdout.strip(), told.returncode) == ("{}", 0), told.stderr


def test_a_shard_is_open_when_it_is_warm_and_has_counted_nothing(tmp_path: Path) -> None:
    recorder = FailingEncoder([])

    def encoder(_: Settings) -> Encoder:
        return recorder

    async def go() -> None:
        parts = EngineParts(encoder=encoder, llm=mock_llm)
        opened = await asyncio.to_thread(open_memories, tmp_path, settings(), parts=parts)
        async with opened as memories:
            assert list(chain.from_iterable(recorder.asked)) == list(TEXTS)
            assert (await memories.call(StatsQuery()))["turns"] == 0
            assert await memories.call(TenantsQuery()) == []
            (state,) = (await memories.status()).values()
            assert state["state"] == "serving"
            assert state["tally"]["phases"] == {}
            assert state["tally"]["turns"].get("stored", 0) == 0

    asyncio.run(go())


def test_an_encoder_that_fails_is_told_with_its_cause(tmp_path: Path) -> None:
    def encoder(_: Settings) -> Encoder:
        return FailingEncoder(["Nobody"])

    with pytest.raises(UndertowError, match="the encoder cannot be used: RuntimeError: no vector for Nobody"):
        open_memories(tmp_path, settings(), parts=EngineParts(encoder=encoder, llm=mock_llm))

"""mem0ai as one of the compared services: its package behind a minimal ASGI wrapper.

Its own server is in no package. The wrapper (bench/peers/mem0_server.py) has the two routes that the loads
use, with the same bodies. Both sides embed with the same encoder and ask the same mock LLM server. mem0ai has
infer=True, its default: an add is answered after its LLM call. Undertow has its default thresholds and
salience: it answers an add once that is stored, and calls the LLM later. So `llm_part` waits for that too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from undertow.bench.machine import ROOT
from undertow.bench.peers.process import PYTHON
from undertow.bench.system.service.parts import Figures, Filled, Load, Mix
from undertow.bench.system.service.served import ENCODER, Service, started
from undertow.bench.system.service.world import Conversations
from undertow.engine.base.model import UndertowError

SMALL = Conversations(turns=150, tenants=5)
"""mem0ai's adds are slow, and its local store compares a query with the vectors of all tenants."""

LLM_LATENCY_S = 0.2


@dataclass(frozen=True, slots=True)
class Mem0Service:
    llm: str

    @property
    def name(self) -> str:
        return "mem0ai behind a minimal ASGI wrapper, infer=True, Qdrant's local store"

    def fill(self, log: Path, store: Path) -> dict[str, Any]:
        turns = [json.loads(line) for line in log.read_text().splitlines()]
        with self.served(store, "commit") as service:
            for turn in turns:  # one after the other, as a tenant's exchanges have an order
                body = json.dumps({"messages": turn["messages"]}).encode()
                urlopen(Request(f"{service.url}/v1/tenants/{turn['tenant']}/memories", body)).close()
        return {"turns": len(turns)}

    @contextmanager
    def served(self, store: Path, durability: str) -> Iterator[Service]:
        """`durability` has no effect: the package has no such setting."""
        if not PYTHON.exists():
            raise UndertowError("mem0ai needs an environment of its own. Run: make setup-peers")
        store.mkdir(exist_ok=True)
        command = [str(PYTHON), "-m", "undertow.bench.peers.mem0_server", "--folder", str(store)]
        environment = {n: text for n, text in os.environ.items() if not re.match("UNDERTOW_|OPENAI_", n)}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "TOKENIZERS_PARALLELISM": "false"}
        command += ["--url", self.llm, "--encoder", ENCODER]
        with started(command, store.parent / "service.log", environment) as (process, address):
            yield Service(address, "none", psutil.Process(process.pid), store)

    def decided(self, service: Service) -> dict[str, Any]:
        """It has nothing left to do."""
        return {}


def llm_part(filled: Filled, mix: Mix, durability: str, *, seconds: float, rate: float, llm: str) -> Figures:
    """An open loop at a fixed rate, and what is spent from its start until all is decided."""
    with filled.loaded(mix, durability) as load:
        load.at_rate(rate, min(seconds, 5.0))  # to warm up
        before = _spent(load, llm) | {"decided_after_s": 0.0}
        _, at_rate = load.at_rate(rate, seconds)
        after = _spent(load, llm)
    spent = {name: round(count - before.get(name, 0), 2) for name, count in after.items()}
    return {"open_loop": at_rate, "until_decided": spent}


def _spent(load: Load, llm: str) -> Figures:
    """Counts since the service and the LLM server have started, once all is decided."""
    decided = {**load.decided(), "cpu_s": load.cpu_s()}
    with urlopen(llm.removesuffix("/v1") + "/stats", timeout=30) as answer:
        told = json.load(answer)
    calls = {"llm_calls": sum(told["calls"].values())} | {f"calls_{k}": n for k, n in told["calls"].items()}
    return decided | calls | {name: count for name, count in told.items() if name.endswith("_tokens")}

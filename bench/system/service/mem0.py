"""mem0ai as one of the compared services: its package behind a minimal ASGI wrapper.

Its own server is in no package. The wrapper (bench/peers/mem0_server.py) has the two routes that the loads
use, with the same bodies. Adds have infer=False: mem0ai then stores each message with its vector and makes no
LLM call: the address it is given has no server. That is its cheapest add. With infer=True it would call the
LLM for each add, and Undertow for none, as no topic recurs here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from undertow.bench.machine import ROOT
from undertow.bench.peers.process import PYTHON
from undertow.bench.system.service.open_loop import Caller, run_loop
from undertow.bench.system.service.served import ENCODER, Service, started
from undertow.bench.system.service.world import World
from undertow.engine.base.model import UndertowError

SMALL = World(turns=20, tenants=50)
"""Its adds are slow, and its local store compares a query with the vectors of all tenants."""

_FILLING_AT_ONCE = 2
_NO_LLM = "http://127.0.0.1:9/v1"


@dataclass(frozen=True, slots=True)
class Mem0Service:
    world: World = SMALL

    @property
    def name(self) -> str:
        return "mem0ai behind a minimal ASGI wrapper, infer=False, Qdrant's local store"

    def fill(self, log: Path, store: Path) -> dict[str, Any]:
        with self.served(store, "commit") as service:
            run_loop(self._fill(service))
        return {"tenants": self.world.tenants, "turns": self.world.turns * self.world.tenants}

    async def _fill(self, service: Service) -> None:
        caller = Caller(service.url)
        await caller.all_of(self.world.all_adds(service.url, service.key), _FILLING_AT_ONCE)
        caller.close()

    @contextmanager
    def served(self, store: Path, durability: str) -> Iterator[Service]:
        """`durability` has no effect: the package has no such setting."""
        if not PYTHON.exists():
            raise UndertowError("mem0ai needs an environment of its own. Run: make setup-peers")
        store.mkdir(exist_ok=True)
        command = [str(PYTHON), "-m", "undertow.bench.peers.mem0_server", "--folder", str(store)]
        environment = {n: text for n, text in os.environ.items() if not re.match("UNDERTOW_|OPENAI_", n)}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "TOKENIZERS_PARALLELISM": "false"}
        command += ["--url", _NO_LLM, "--model", "none", "--encoder", ENCODER]
        with started(command, store.parent / "service.log", environment) as (process, address):
            yield Service(address, "none", psutil.Process(process.pid), store)

    def decided(self, service: Service) -> dict[str, Any]:
        """It decides nothing."""
        return {}
